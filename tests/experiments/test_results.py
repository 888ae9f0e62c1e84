"""Check the committed results: RESULTS.md matches the records, and recipes state what they found."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

import experiments.recipes
from experiments import page, records
from experiments.blocks import complete
from experiments.differences import table_of
from experiments.recipe import Size
from experiments.records import Record
from experiments.statistics import judge

NUMBER = r"-?\d+\.\d+(?:e-\d+)?"
ROOT = Path(experiments.recipes.__file__).parents[2]
RECIPES = experiments.recipes.all_recipes()


@pytest.fixture(scope="module")
def committed() -> dict[str, list[Record]]:
    return {name: records.read(ROOT / "results" / "records", name) for name in RECIPES}


def test_every_file_of_records_belongs_to_a_recipe_and_has_the_small_size(committed):
    files = {path.stem for path in (ROOT / "results" / "records").glob("*.jsonl")}
    assert files <= set(RECIPES)
    for name, found in committed.items():
        assert {(one.recipe, one.size) for one in found} <= {(name, Size.SMALL)}


def test_the_page_and_its_figures_are_made_from_the_records(committed):
    results = ROOT / "RESULTS.md"
    if not results.exists():
        assert not any(committed.values()), "records, but no page: python -m experiments report"
        return
    text, figures = page.render(list(RECIPES.values()), committed)
    assert results.read_text(encoding="utf-8") == text, "out of date: python -m experiments report"
    assert {path.name for path in (ROOT / "results").glob("*.png")} == set(figures)


def test_figures_are_small():
    for path in (ROOT / "results").glob("*.png"):
        assert path.stat().st_size <= 120_000, f"{path.name} is too large for a README"


def test_recipes_that_were_run_say_what_was_found(committed):
    for found in iter_modules(experiments.recipes.__path__):
        module = import_module(f"experiments.recipes.{found.name}")
        recipe = getattr(module, "RECIPE", None)
        if recipe is not None and committed[recipe.name]:
            counting = complete(recipe, committed[recipe.name], Size.SMALL)
            assert counting, f"{module.__name__}: records of other settings than it has now"
            headline = " ".join(recipe.headline(counting).split())
            assert headline in " ".join((module.__doc__ or "").split()), module.__name__


@pytest.fixture(scope="module")
def counting(committed) -> dict[str, list[Record]]:
    """The records that count, of the recipes that were run."""
    found = {
        name: complete(recipe, committed[name], Size.SMALL) for name, recipe in RECIPES.items()
    }
    return {name: several for name, several in found.items() if several}


def test_claims_are_judged_by_comparisons(counting):
    """Or by the recipe itself, if nothing is compared."""
    for name, several in counting.items():
        recipe = RECIPES[name]
        judged = judge(recipe.comparisons(several))
        assert (judged is None) != (recipe.outcome is None), name
        assert recipe.summary, f"{name}: what is the claim, in one line?"


def test_texts_use_only_numbers_of_the_tables(counting):
    for name, several in counting.items():
        recipe = RECIPES[name]
        table = recipe.section(several).table + table_of(recipe.comparisons(several), None)
        shown = set(re.findall(NUMBER, table))
        assert set(re.findall(NUMBER, recipe.summary)) <= shown, name
        exact = re.findall(r"\d+\.\d{3,}", recipe.verdict)  # others are rounded, or percentages
        assert set(exact) <= set(re.findall(r"\d+\.\d{3,}", table)), name


def test_the_summary_fits_on_a_screen():
    top, _, _ = (ROOT / "RESULTS.md").read_text(encoding="utf-8").partition("## How to read")
    assert len(top.splitlines()) <= 50
