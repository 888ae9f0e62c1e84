"""Stack 1 to 6 levels of Slot Set Encoders (the paper's Figures 3c and 6g).

    python -m experiments run hierarchy --size small     # about 10 minutes on two cores

Paper: stacking helps a little, and hurts after 4 levels (a plot without numbers).
Measured: SSE, as printed: best 0.290 at 1, worst 0.522 at 6; SSE, slots apart: best 0.176 at 1,
worst 0.505 at 6; SSE, slots apart, residual: best 0.198 at 1, worst 0.258 at 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from experiments import report
from experiments.pools import Hierarchy, Pool, ResidualHierarchy, Slots
from experiments.recipe import Recipe
from experiments.recipes.common import against, changes, curve_section
from experiments.recipes.settings import AS_PRINTED, NLL, SLOTS_APART
from experiments.recipes.slot_count import best_of, varied
from experiments.records import Record
from experiments.report import Section
from experiments.statistics import LOG_LOSS, Comparison, Part

LEVELS = (1, 2, 3, 4, 5, 6)


def stack(slots: Slots, levels: int, kind: type[Hierarchy] = Hierarchy) -> Hierarchy:
    """Stack `levels` levels of the same slots; the slot size starts at 32 and doubles."""
    return kind(tuple(replace(slots, dim_slot=32 * 2**level) for level in range(levels)))


POOLS: dict[str, dict[int, Pool]] = {
    "SSE, as printed": {levels: stack(AS_PRINTED, levels) for levels in LEVELS},
    "SSE, slots apart": {levels: stack(SLOTS_APART, levels) for levels in LEVELS},
    "SSE, slots apart, residual": {
        levels: stack(SLOTS_APART, levels, ResidualHierarchy) for levels in LEVELS
    },
}


def section(records: Sequence[Record]) -> Section:
    """Plot NLL against the number of levels."""
    values = report.grid(records, "nll", "method", "levels")
    return curve_section(values, "levels", NLL, best=min)


def comparisons(records: Sequence[Record]) -> list[Comparison]:
    """Compare up to four levels with one, and four levels with more."""
    values, unit = report.grid(records, "nll", "method", "levels"), " levels"
    claimed = [(2, 1), (3, 1), (4, 1), (4, 5), (4, 6)]
    printed, apart, residual = POOLS
    return [
        *changes(values, [printed], claimed, LOG_LOSS, unit),
        *changes(values, [apart], claimed, LOG_LOSS, unit, part=Part.APART),
        *changes(values, [residual], [(2, 1), (6, 1)], LOG_LOSS, unit, part=Part.ASIDE),
        *against(values, residual, [apart], LOG_LOSS, unit, part=Part.ASIDE, at=(6,)),
    ]


RECIPE = Recipe(
    number=11,
    name="hierarchy",
    title="Hierarchies",
    claim="""With one slot of size 32 at the first level and twice the size at each further
    level, stacking brings marginal gains, and NLL gets worse after 4 levels.""",
    runs=lambda size, seed: varied(POOLS, "levels", size, seed),
    section=section,
    headline=lambda records: best_of(records, "levels"),
    comparisons=comparisons,
    summary="A few levels of slots help, more than four hurt",
    verdict="""Two, three and four levels are worse than one, as printed and with slots apart, with
    every seed. The means rise further with five and six levels, but that more than four are worse
    than four is not shown. With six levels the model learns almost nothing in three epochs. As
    printed, each level has one slot, and every element has weight 1. A further level is then a
    further linear map of the same sum: it adds nothing and has to be learned. Slots apart fail for
    another reason: the slots of an upper level are averages of the same eight vectors, so they
    become alike from level to level, the differences between images shrink, and attention gets no
    gradient. `setfold.diagnose` shows this before training. *Residual* is the remedy of the
    library: inputs of a level are normalized, and each level adds to the slots below it. Six levels
    then train, and are better than six without it by 0.247. But a gain over one level is not shown,
    and the means rise with every level.""",
    cut="""As in the choice of the aggregate: 200 pixels of 32 x 32 images; 3 epochs on 8,000
    images.""",
    minutes=10,
)
