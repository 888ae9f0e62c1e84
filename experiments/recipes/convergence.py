"""Compare how fast the encoders learn to complete CelebA images (the paper's Figure 2d).

    python -m experiments run convergence --size small     # reuses models of `reconstruction`

Paper: the Slot Set Encoder, trained on subsets of 1000 of 4096 pixels, converges faster.
Measured: after 3 of 6 epochs: SSE, slots attended 0.136; SSE, slots apart 0.220; Attention, slots
apart 0.264; Deep Sets 0.308; SSE, as printed 0.338; PMA 0.373.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from experiments import report
from experiments.recipe import Recipe, Run, Size
from experiments.recipes.common import at, curve_section, ranking, tested
from experiments.recipes.reconstruction import NOTES, both_variants, largest
from experiments.recipes.settings import NLL
from experiments.records import Record
from experiments.report import Section
from experiments.statistics import Comparison


def runs(size: Size, seed: int) -> list[Run]:
    """Train each method on subsets of the pixels; the report shows the training history."""
    return [tested(method, training) for method, training in largest(size, seed).items()]


def section(records: Sequence[Record]) -> Section:
    """Plot validation NLL against epochs."""
    values = report.traces(records, "nll")
    return replace(curve_section(values, "epoch", f"validation {NLL}", best=min), notes=NOTES)


def comparisons(records: Sequence[Record]) -> list[Comparison]:
    """Compare both variants with Deep Sets and PMA at each validation, and attended slots."""
    return both_variants(report.traces(records, "nll"), " epochs")


def headline(records: Sequence[Record]) -> str:
    """Rank the methods halfway through training."""
    values = report.traces(records, "nll")
    epochs = sorted(next(iter(values.values())))
    half = epochs[(len(epochs) - 1) // 2]
    return f"after {half:g} of {epochs[-1]:g} epochs: {ranking(at(values, half), best=min)}"


RECIPE = Recipe(
    number=6,
    name="convergence",
    title="Convergence when trained on subsets",
    claim="""Trained on random subsets of 1000 of an image's 4096 pixels, the Slot Set Encoder
    converges faster than Deep Sets and the Set Transformer's PMA.""",
    runs=runs,
    section=section,
    headline=headline,
    comparisons=comparisons,
    summary="SSE converges faster than Deep Sets and PMA",
    verdict="""With slots apart, the Slot Set Encoder learns faster than both others from the first
    validation on, with every seed: after three epochs it is close to what Deep Sets reaches after
    six. A decoder that attends to the slots gets there before the end of the third epoch. As
    printed, the Slot Set Encoder is behind Deep Sets with every seed, and shown to be worse from
    4.5 epochs on. It is better than PMA at the first validation, and no difference is shown later.
    The reason is the same as in image completion. As printed, the encoding is a linear map of one
    mean. Slots apart are soft regions of the image, and each gives the decoder separate information
    from early on. These are validation NLLs.""",
    cut="As in image completion.",
    minutes=4,
)
