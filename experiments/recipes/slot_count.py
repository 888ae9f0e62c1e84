"""The number of slots K (the paper's Figure 6f).

    python -m experiments run slot-count --size small     # about 15 minutes on two cores

Paper: K between 32 and 128 is best of 1, 32, 64, 128 and 256 (a plot without numbers).
Here: SSE, as printed: best 0.288 at 32, worst 0.296 at 256; SSE, slots apart: best 0.188 at 8,
worst 0.527 at 32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from experiments import report
from experiments.pools import Pool
from experiments.recipe import Recipe, Run, Size
from experiments.recipes.common import curve_section, tested, with_task
from experiments.recipes.settings import ABLATION, AS_PRINTED, NLL, SLOTS_APART
from experiments.records import Record
from experiments.report import Section

# As printed, every slot is 64 wide and slots are averaged; apart, they share 64 dimensions.
POOLS: Mapping[str, Mapping[int, Pool]] = {
    "SSE, as printed": {
        count: replace(AS_PRINTED, num_slots=count) for count in (1, 32, 64, 128, 256)
    },
    "SSE, slots apart": {
        count: replace(SLOTS_APART, num_slots=count) for count in (2, 4, 8, 16, 32)
    },
}


def varied(pools: Mapping[str, Mapping[int, Pool]], name: str, size: Size, seed: int) -> list[Run]:
    """A run for each pool, whose settings tell the number that is varied."""
    base = replace(ABLATION[size], seed=seed)
    return [
        tested(method, with_task(base, pool=pool), **{name: number})
        for method, line in pools.items()
        for number, pool in line.items()
        if size is not Size.SMOKE or number == max(line)
    ]


def best_of(records: Sequence[Record], name: str) -> str:
    """The best number of each method."""
    values = report.grid(records, "nll", "method", name)
    told = []
    for method, line in values.items():
        means = {number: report.mean_and_deviation(seeds)[0] for number, seeds in line.items()}
        best, worst = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
        told.append(
            f"{method}: best {means[best]:z.3f} at {best}, worst {means[worst]:z.3f} at {worst}"
        )
    return "; ".join(told)


def section(records: Sequence[Record]) -> Section:
    """NLL against the number of slots."""
    values = report.grid(records, "nll", "method", "K")
    return curve_section(values, "slots K", NLL, best=min, log=True)


RECIPE = Recipe(
    number=9,
    name="slot-count",
    title="The number of slots",
    claim="""Very few or very many slots hurt: of K = 1, 32, 64, 128 and 256, values between 32 and 128 are
    best for a 64-dimensional encoding.""",
    runs=lambda size, seed: varied(POOLS, "K", size, seed),
    section=section,
    headline=lambda records: best_of(records, "K"),
    holds="only with slots apart",
    verdict="""With slots apart, two slots are too few and 32 too many: 64 numbers are then one value and one mass for each
    slot, and nothing was learned in three epochs. Eight are best; at 16 one seed of three is much worse than the
    others. As printed the number of slots cannot matter: they are added up, attention cancels, and what is left is
    one plain sum. The columns differ by what seeds make.""",
    cut="As for the choice of g: 200 pixels of 32 x 32 images; 3 epochs on 8,000 images.",
    minutes=15,
)
