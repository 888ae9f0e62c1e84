"""The table that compares all encoders, and the paper's verdicts that come out of it."""

from __future__ import annotations

import doctest
import inspect
import io
import json

import pytest
import torch
from rich.console import Console

import setfold
from setfold.encoders.deep_sets import Pool
from setfold.laws.gallery import EXHIBITS
from setfold.laws.survey import LAW_NAMES, Survey, chunking_error
from setfold.laws.wrong_way import ChunkAverage, PublishedSlotSetEncoder

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def survey():
    told = []
    found = setfold.check_all(processes=False, progress=lambda *news: told.append(news))
    assert told[0] == (0, len(EXHIBITS), EXHIBITS[0].name)
    assert told[-1] == (len(EXHIBITS), len(EXHIBITS), "")
    return found


def test_the_example_is_right(survey):
    """It is skipped where examples run, because it makes this survey once more."""
    text = setfold.check_all.__doc__.replace("# doctest: +SKIP", "")
    example = doctest.DocTestParser().get_doctest(text, {"survey": survey}, "check_all", None, None)
    first, *example.examples = example.examples
    assert first.source.strip() == "survey = check_all(processes=False)"
    assert doctest.DocTestRunner().run(example) == (0, 3)


def test_every_encoder_is_what_it_claims(survey):
    assert survey.passed, str(survey)


ONE, NEVER = "folds in one pass", "cannot be folded"


@pytest.mark.parametrize(
    ("name", "verdict", "reason"),
    [
        ("SlotSetEncoder, mean", ONE, ""),
        ("SlotSetEncoder, max", ONE, ""),
        ("HierarchicalSlotSetEncoder", ONE, ""),
        ("SlotSetEncoder → SetTransformer", ONE, ""),
        ("DeepSets, element-wise", ONE, ""),
        ("AttentionPool", ONE, ""),
        ("Concat, max + slots + softmax", ONE, ""),
        ("PlacedSlotEncoder, grid", ONE, ""),
        ("EquivariantDeepSets, max", "folds in 3 passes", "message passing"),
        ("SetTransformer, ISAB", "folds in 3 passes", "self-attention"),
        ("SetNorm → Pool", "folds in 2 passes", "message passing"),
        ("SlotAttention", "folds in 3 passes", "iterations"),
        ("FullSetTransformer, SAB", NEVER, "self-attention"),
        ("FSPool", NEVER, "sorting"),
        ("JanossyPool, pairs", NEVER, "permutations"),
        ("WRONG: published SSE, sum", "chunks combine", ""),
        ("WRONG: published SSE, mean", NEVER, "aggregates chunks"),
        ("WRONG: slots redrawn, sum", NEVER, "redraws"),
    ],
)
def test_verdicts(survey, name, verdict, reason):
    entry = survey[name]
    assert entry.verdict == verdict
    assert entry.obstacle.startswith(reason)
    assert bool(entry.obstacle) == bool(reason)


@pytest.mark.parametrize("name", ["EquivariantDeepSets, max", "FullSetTransformer, SAB", "FSPool"])
def test_the_papers_three_verdicts_are_measured(survey, name):
    entry = survey[name]
    assert entry.report["mini-batch consistency"].verdict == "fails"
    assert entry.report["mini-batch consistency"].errors["float64"] > 1e-3
    assert entry.chunk_average > 1e-3


def test_a_fold_is_exact_where_averaging_is_not(survey):
    for entry in survey.entries:
        if entry.verdict.startswith("folds"):
            assert entry.fold_error <= 1e-12
    assert survey["AttentionPool"].chunk_average > 1e-3


def test_every_exported_encoder_is_shown():
    shown = {type(exhibit.make()) for exhibit in EXHIBITS if not exhibit.wrong}
    wrong = {type(exhibit.make()) for exhibit in EXHIBITS if exhibit.wrong}
    exported = {
        kind
        for name in setfold.__all__
        if inspect.isclass(kind := getattr(setfold, name))
        and issubclass(kind, setfold.SetEncoder)
        and not inspect.isabstract(kind)
    }
    assert shown == exported
    assert wrong == {ChunkAverage, PublishedSlotSetEncoder}


def test_the_table_shows_every_law_and_every_encoder(survey):
    shown = str(survey)
    assert all(entry.name in shown for entry in survey.entries)
    assert all(name in " ".join(shown.split()) for name in LAW_NAMES)
    assert all(len(entry.marks) == len(LAW_NAMES) for entry in survey.entries)
    assert "✗" not in survey["SlotSetEncoder, max"].marks


def test_the_survey_is_ready_for_json(survey):
    found = json.loads(json.dumps(survey.as_dict()))
    assert found["passed"] is True
    assert len(found["encoders"]) == len(EXHIBITS)
    assert found["encoders"][0]["report"]["laws"]


class Liar(Pool):
    """Claims to fold, and averages maxima."""

    def update(self, state, elements, **options):
        seen = super().update(state, elements, **options)
        return seen.with_statistics({"max": (seen.statistics["max"][0] / 2,)}, seen.count)


def test_who_is_not_what_it_claims_is_named(survey):
    report = setfold.check(Liar(4, "max"), processes=False)
    entry = type(survey.entries[0])("Liar", report, 0.0, "")
    lying = Survey((entry,))
    assert not lying.passed
    assert "Not as documented: Liar" in str(lying)


def test_averaging_means_of_equal_chunks_is_no_mistake():
    torch.manual_seed(0)
    assert chunking_error(Pool(4, "mean")) < 1e-12
    assert chunking_error(Pool(4, "sum")) > 0.5


def test_a_narrow_terminal_still_shows_everything(survey):
    buffer = io.StringIO()
    Console(file=buffer, width=80, color_system=None).print(survey)
    shown = " ".join(buffer.getvalue().split())
    assert "…" not in shown
    assert "FSPool: sorting" in shown
    assert "folds in one pass" in shown
