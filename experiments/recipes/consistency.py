"""Which set encoders are Mini-Batch Consistent (the paper's Table 2, and Propositions 1 and 2).

    python -m experiments run consistency --size small     # about 4 minutes on two cores

Paper: Deep Sets (original), Set Transformer and FSPool fail; the Slot Set Encoder passes.
Here: 12 encoders fold in one pass and 5 in several, to 5.0e-16; 8 do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn

import setfold
from experiments import report
from experiments.recipe import Metrics, Recipe, Run, Size
from experiments.records import Record
from experiments.report import Section
from setfold.laws.gallery import EXHIBITS, Exhibit
from setfold.laws.survey import examine

PAPER = {
    "SlotSetEncoder, mean": "passes",
    "DeepSets, element-wise": "passes",
    "EquivariantDeepSets, max": "fails",
    "FullSetTransformer, SAB": "fails",
    "SetTransformer, ISAB": "fails",
    "FSPool": "fails",
}
SMOKE = ("DeepSets, element-wise", "FSPool")  # one that folds, one that cannot


def verdict_on(model: nn.Module, exhibit: Exhibit) -> Metrics:
    """What the laws of `setfold check` say of one encoder, which needs no training for it."""
    entry = examine(exhibit, setfold.check, processes=False)
    name, verdict, _, error, average, why = entry.row
    return {"encoder": name, "verdict": verdict, "fold": error, "average": average, "why": why}


def runs(size: Size, seed: int) -> list[Run]:
    """One run for each encoder."""
    shown = [one for one in EXHIBITS if size is not Size.SMOKE or one.name in SMOKE]
    return [Run(one.name, None, partial(verdict_on, exhibit=one), seed=seed) for one in shown]


def section(records: Sequence[Record]) -> Section:
    """Encoders in the order of the gallery, with the paper's verdict."""
    places = {exhibit.name: place for place, exhibit in enumerate(EXHIBITS)}
    told = ("verdict", "fold", "average", "why")
    rows = [
        [record.method, PAPER.get(record.method), *(str(record.metrics[name]) for name in told)]
        for record in sorted(records, key=lambda record: places[record.method])
    ]
    headers = ["encoder", "paper", "here", "error of the fold", "of chunk and average", "why"]
    return Section(report.table(headers, rows))


def headline(records: Sequence[Record]) -> str:
    """How many fold, and how exactly."""
    verdicts = [str(record.metrics["verdict"]) for record in records]
    once = verdicts.count("folds in one pass")
    several = sum(verdict.startswith("folds") for verdict in verdicts) - once
    worst = max(float(str(one.metrics["fold"])) for one in records if one.metrics["fold"])
    return (
        f"{once} encoders fold in one pass and {several} in several, to {worst:.1e}; "
        f"{len(verdicts) - once - several} do not"
    )


RECIPE = Recipe(
    number=1,
    name="consistency",
    title="Who is mini-batch consistent",
    claim="""The Slot Set Encoder satisfies Property 1, for every partition of a set; Deep Sets as
    published (message passing), Set Transformer (self-attention) and FSPool (sorting) do not.""",
    runs=runs,
    section=section,
    headline=headline,
    holds="yes, and more is possible",
    verdict="""The claim holds as a theorem and is checked as one: the laws of `setfold check` run on
    every encoder in float64. Two things go beyond it. What fails in one pass may fold in several:
    Deep Sets as published and the Set Transformer with inducing points are exact if the chunks can be read
    again. And the Slot Set Encoder is consistent as the paper defines it, not as published code
    computes it: a mean or a maximum over the chunks' sums, or slots that are drawn anew for each
    chunk, break it, which the last rows show.""",
    cut="Nothing.",
    minutes=4,
    seeds=dict.fromkeys(Size, 1),
)
