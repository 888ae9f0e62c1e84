"""Every recipe runs, from its trainings to its section of the page, on made-up data."""

from __future__ import annotations

import importlib
import inspect
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from experiments import page, records
from experiments.recipe import Size, settings_of
from experiments.recipes import all_recipes, common, gradients, places_digits, places_large_faces
from experiments.running import Options, run
from experiments.tasks import centroids

RECIPES = all_recipes()


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """One folder for all recipes, so that they share trainings as they do in earnest."""
    return tmp_path_factory.mktemp("experiments")


@pytest.fixture
def brief(monkeypatch):
    """Evaluate on few pictures, and end projections early."""
    for recipe in (places_digits, places_large_faces):
        monkeypatch.setattr(recipe, "TESTED", 10)
    monkeypatch.setattr(centroids, "TSNE", partial(centroids.TSNE, max_iter=250))


def test_recipes_are_numbered_without_gaps():
    numbers = [recipe.number for recipe in RECIPES.values()]
    assert numbers == list(range(1, len(RECIPES) + 1))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
@pytest.mark.usefixtures("brief")
def test_smoke(recipe, out, monkeypatch):
    failures = run([recipe], Size.SMOKE, options=Options(out, device="cpu", threads=1))
    assert failures == []
    found = records.read(out / "records" / Size.SMOKE, recipe.name)
    assert len(found) == len(recipe.runs(Size.SMOKE, 0))
    numbers = [value for one in found for value in flat(one.metrics.values())]
    assert all(math.isfinite(value) for value in numbers)
    text, figures = page.render([recipe], {recipe.name: found}, Size.SMOKE)
    assert recipe.title in text
    assert "nan" not in text.lower().split()
    assert all(name.startswith(recipe.name) for name in figures)
    names = {one.method for one in recipe.runs(Size.SMALL, 0)}
    assert without_values(recipe.comparisons, found, monkeypatch) <= names
    # While runs are missing, whichever they are, there is a section of the others.
    methods = list(dict.fromkeys(one.method for one in found))
    half = len(methods) // 2
    for some in (methods[:half], methods[half:]):
        there = [one for one in found if one.method in some]
        text, _ = page.render([recipe], {recipe.name: there}, Size.SMOKE)
        assert ("**Not run yet** with these seeds" in text) == (0 < len(some) < len(methods))


def without_values(comparisons, found, monkeypatch) -> set[str]:
    """Return the names of methods to compare that have no values; one may be misspelt."""
    asked = set()

    def was_run(values, *methods):
        asked.update(method for method in methods if method not in values)
        return set(methods) <= values.keys()

    with monkeypatch.context() as patch:
        patch.setattr(common, "was_run", was_run)
        comparisons(found)
    return asked


def flat(values):
    for value in values:
        if isinstance(value, list):
            yield from flat(value)
        elif not isinstance(value, str):
            yield value


@pytest.mark.parametrize("size", [Size.SMALL, Size.PAPER])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_runs_differ_and_seeds_reach_the_trainings(recipe, size):
    several = recipe.runs(size, 0)
    told = {(one.method, str(sorted(one.settings.items()))) for one in several}
    assert len(told) == len(several)  # or one record would replace another
    for first, second in zip(several, recipe.runs(size, 1), strict=True):
        if first.training is not None:
            assert first.training.seed == 0
            assert settings_of(replace(first.training, seed=1, start=None)) == settings_of(
                replace(second.training, start=None)
            )
            assert not first.training.task.made_up


# What these methods keep of a set differs by design, so the models have equally many parameters.
EQUAL_PARAMETERS = (
    "places-clouds",
    "places-faces",
    "places-digits",
    "places-large-faces",
    "modelnet-long",
    "modelnet-longest",
    "one-pass",
    "neural-processes",
    "neural-processes-large",
    "needles",
)
SMALLER = {  # as in the recipe that they extend
    "modelnet-long": ["Deep Sets, max"],
    "modelnet-longest": ["Deep Sets, max"],
}


@pytest.mark.parametrize("name", EQUAL_PARAMETERS)
def test_methods_have_about_as_many_parameters(name):
    several = RECIPES[name].runs(Size.SMALL, 0)
    counts = {}
    for one in several:
        if one.training is not None and one.method not in SMALLER.get(name, ()):
            model = replace(one.training.task, made_up=True).build()
            count = sum(p.numel() for p in model.parameters())
            of = one.settings.get("data", one.settings.get("task"))
            counts.setdefault(of, []).append(count)
    assert all(max(some) < 1.4 * min(some) for some in counts.values())


# These have as many parameters as another method of their recipe.
MATCHED = {
    ("digit-centroids", "Deep Sets, matched"): "SSE, wide slots",
    ("image-centroids", "Deep Sets, matched"): "SSE, wide slots",
    ("convergence", "Deep Sets, matched"): "SSE, slots attended",
    ("convergence", "Attention, slots attended"): "SSE, slots attended",
    ("modelnet-streaming", "Deep Sets, max, matched"): "SSE, as printed, learned",
    ("modelnet-streaming", "Deep Sets, max, matched, varied"): "SSE, as printed, learned",
}


@pytest.mark.parametrize("size", [Size.SMALL, Size.PAPER])
@pytest.mark.parametrize(("name", "method"), MATCHED)
def test_matched_methods_have_as_many_parameters_as_another(name, method, size):
    tasks = {one.method: one.training.task for one in RECIPES[name].runs(size, 0) if one.training}
    models = [replace(tasks[one], made_up=True).build() for one in (method, MATCHED[name, method])]
    ours, theirs = (sum(p.numel() for p in model.parameters()) for model in models)
    assert ours == pytest.approx(theirs, rel=0.04)  # with fewer classes than in earnest


def test_gradients_are_compared_at_equal_time():
    several = {one.method: one.training for one in gradients.runs(Size.SMALL, 0)}
    exact = several["exact"].epochs * gradients.MILLISECONDS["exact"]
    for method in ("whole set at once", "unbiased", "subset"):
        epochs = several[f"{method}, equal time"].epochs
        assert 0.9 * exact < epochs * gradients.MILLISECONDS[method] <= exact
        assert replace(several[f"{method}, equal time"], epochs=3) == several[method]


WIDER = ("Deep Sets, max, matched", "Deep Sets, max, matched, varied")  # instead of slots


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_methods_are_compared_at_equal_size(recipe):
    """Encodings of one recipe are equally wide, whatever the encoder."""
    if recipe.name in EQUAL_PARAMETERS:
        pytest.skip("compared at equal numbers of parameters")
    sizes = set()
    for one in recipe.runs(Size.SMOKE, 0):
        if one.training is not None and one.method not in WIDER:
            torch.manual_seed(0)
            task = one.training.task
            model, batch = task.build(), task.batch(torch.arange(4))
            encoder = getattr(model, "encoder", model)
            seen = []
            handle = encoder.register_forward_hook(lambda *hooked, s=seen: s.append(hooked[-1]))
            task.loss(model, batch)
            handle.remove()
            sizes.update(encoding[0].numel() for encoding in seen)
    assert len(sizes) <= 1


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_docstrings_give_the_command(recipe):
    homes = [m for m in all_modules() if getattr(m, "RECIPE", None) is recipe]
    assert len(homes) == 1
    assert f"python -m experiments run {recipe.name} --size small" in homes[0].__doc__
    assert "Measured: " in homes[0].__doc__


def all_modules():
    folder = Path(inspect.getfile(all_recipes)).parent
    names = [path.stem for path in folder.glob("*.py") if path.stem != "__init__"]
    return [importlib.import_module(f"experiments.recipes.{name}") for name in names]
