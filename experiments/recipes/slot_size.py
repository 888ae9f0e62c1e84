"""Vary the slot size h (the paper's Figure 6e).

    python -m experiments run slot-size --size small     # about 7 minutes on two cores

Paper: with one slot, h = 32, 64, 128 and 256 matter a lot (a plot without numbers).
Measured: SSE, as printed: best 0.276 at 256, worst 0.293 at 64; SSE, slots apart: best 0.176 at 32,
worst 0.188 at 64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from experiments import report
from experiments.recipe import Outcome, Recipe
from experiments.recipes.common import curve_section
from experiments.recipes.settings import AS_PRINTED, NLL, SLOTS_APART
from experiments.recipes.slot_count import best_of, varied
from experiments.records import Record
from experiments.report import Section

SIZES = (32, 64, 128, 256)
POOLS = {
    method: {dim: replace(pool, dim_slot=dim) for dim in SIZES}
    for method, pool in {"SSE, as printed": AS_PRINTED, "SSE, slots apart": SLOTS_APART}.items()
}


def section(records: Sequence[Record]) -> Section:
    """Plot NLL against the slot size."""
    values = report.grid(records, "nll", "method", "h")
    return curve_section(values, "slot size h", NLL, best=min, log=True)


RECIPE = Recipe(
    number=10,
    name="slot-size",
    title="The slot size",
    claim="""With a single slot, its size h = 32, 64, 128 or 256 has a significant impact on
    NLL. Random slots can suffer from a bad choice; learned slots gain from a larger size.""",
    runs=lambda size, seed: varied(POOLS, "h", size, seed),
    section=section,
    headline=lambda records: best_of(records, "h"),
    outcome=Outcome.FAILS,
    holds="no",
    summary="""The slot size has little effect: for sizes 32 to 256, NLL is 0.276 to 0.293 as
    printed and 0.176 to 0.188 with slots apart.""",
    verdict="""With one slot, the slot size cannot matter: every element has weight 1 whatever
    the slot contains, and slots, queries and keys get no gradient. The columns as printed
    differ only because another size draws other initial weights. With eight learned slots
    apart the size could matter, but it does not: the means are within the spread between
    seeds.""",
    cut="""As in the choice of the aggregate: 200 pixels of 32 x 32 images; 3 epochs on 8,000
    images.""",
    minutes=7,
)
