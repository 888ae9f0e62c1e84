"""Check the committed results: RESULTS.md matches the records, and recipes state what they found."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

import experiments.recipes
from experiments import records, report
from experiments.recipe import Size
from experiments.records import Record

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
    page = ROOT / "RESULTS.md"
    if not page.exists():
        assert not any(committed.values()), "records, but no page: python -m experiments report"
        return
    text, figures = report.render(list(RECIPES.values()), committed)
    assert page.read_text(encoding="utf-8") == text, "out of date: python -m experiments report"
    assert {path.name for path in (ROOT / "results").glob("*.png")} == set(figures)


def test_figures_are_small():
    for path in (ROOT / "results").glob("*.png"):
        assert path.stat().st_size <= 120_000, f"{path.name} is too large for a README"


def test_recipes_that_were_run_say_what_was_found(committed):
    for found in iter_modules(experiments.recipes.__path__):
        module = import_module(f"experiments.recipes.{found.name}")
        recipe = getattr(module, "RECIPE", None)
        if recipe is not None and committed[recipe.name]:
            counting = report.complete(recipe, committed[recipe.name], Size.SMALL)
            assert counting, f"{module.__name__}: records of other settings than it has now"
            headline = " ".join(recipe.headline(counting).split())
            assert headline in " ".join((module.__doc__ or "").split()), module.__name__
            assert recipe.holds != "open", f"{module.__name__}: does the claim hold?"
            assert recipe.outcome is not None, f"{module.__name__}: does the claim hold?"


def test_summaries_use_only_numbers_of_the_tables(committed):
    for recipe in RECIPES.values():
        counting = report.complete(recipe, committed[recipe.name], Size.SMALL)
        if not counting:
            assert not recipe.summary, f"{recipe.name} was not run"
            continue
        numbers = re.findall(r"-?\d+\.\d+(?:e-\d+)?", recipe.summary)
        assert numbers, recipe.name
        shown = set(re.findall(r"-?\d+\.\d+(?:e-\d+)?", recipe.section(counting).table))
        assert set(numbers) <= shown, recipe.name
