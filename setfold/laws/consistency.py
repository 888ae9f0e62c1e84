"""Mini-batch consistency (Property 1 of the paper), for models without states."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from setfold.laws.law import Case, Law, Model, Pair, difference
from setfold.laws.report import CONSISTENCY_LAW


def _combinations(model: Model, case: Case) -> Iterator[Pair]:
    """g(f(X_1), ..., f(X_p)) and f(X), for the closest g of mean, sum, max and min."""
    chunks = [chunk for chunk in case.chunks if chunk.shape[1]]
    expected = model(case.elements)
    found = torch.stack([model(chunk) for chunk in chunks])  # (p, B, ...)
    share = torch.tensor([c.shape[1] for c in chunks]).to(found) / case.elements.shape[1]
    average = torch.tensordot(share, found, dims=1)
    candidates = (average, found.sum(0), found.amax(0), found.amin(0))
    yield min(candidates, key=lambda c: difference(c, expected)), expected


CONSISTENCY = Law(
    CONSISTENCY_LAW,
    "The mean, sum, max or min of the chunks' encodings is the encoding of the whole set.",
    _combinations,
    obstacle=lambda model: None,
)
