"""How fast the encoders learn to complete CelebA (the paper's Figure 2d).

    python -m experiments run convergence --size small     # shows what `reconstruction` trains

Paper: the Slot Set Encoder, trained on subsets of 1000 of 4096 pixels, converges faster.
Here: nothing is run yet.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments import report
from experiments.recipe import Recipe, Run, Size
from experiments.recipes.common import at, curve_section, ranking, tested
from experiments.recipes.reconstruction import largest
from experiments.recipes.settings import NLL
from experiments.records import Record
from experiments.report import Section


def runs(size: Size, seed: int) -> list[Run]:
    """Each method's training on subsets of the pixels; its history is what is shown."""
    return [tested(method, training) for method, training in largest(size, seed).items()]


def section(records: Sequence[Record]) -> Section:
    """Validation NLL against epochs."""
    return curve_section(report.traces(records, "nll"), "epoch", f"validation {NLL}", best=min)


def headline(records: Sequence[Record]) -> str:
    """The methods half-way."""
    values = report.traces(records, "nll")
    epochs = sorted(next(iter(values.values())))
    half = epochs[len(epochs) // 2]
    return f"after {half:g} of {epochs[-1]:g} epochs: {ranking(at(values, half), best=min)}"


RECIPE = Recipe(
    number=6,
    name="convergence",
    title="Convergence when trained on subsets",
    claim="""Trained on random subsets of 1000 of an image's 4096 pixels, the Slot Set Encoder converges
    faster than Deep Sets and the Set Transformer's PMA.""",
    runs=runs,
    section=section,
    headline=headline,
    holds="open",
    verdict="",
    cut="As for image completion.",
    minutes=1,
)
