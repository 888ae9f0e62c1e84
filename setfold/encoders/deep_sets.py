"""Deep Sets without set-dependent layers, which folds (Zaheer et al., NeurIPS 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from setfold.core.arguments import check_sizes
from setfold.core.composition import Composition
from setfold.core.encoder import StreamingSetEncoder
from setfold.core.readout import FIELDS, Count, fields_of, parse_aggregates, read
from setfold.core.statistic import Field, Fields, Statistics


class Pool(StreamingSetEncoder):
    """The sum, mean, maximum or minimum of the elements, (B, n, d) -> (B, dim_readout).

    Args:
        dim_in: width d of the elements.
        aggregate: "sum", "mean", "max" or "min", or a list of them to concatenate.

    >>> Pool(2, "max")(torch.tensor([[[1.0, 5.0], [3.0, 4.0]]]))
    tensor([[3., 5.]])
    """

    dim_in: int
    like: Tensor

    def __init__(self, dim_in: int, aggregate: str | Sequence[str] = "mean") -> None:
        super().__init__()
        check_sizes(dim_in=dim_in)
        self.aggregates = parse_aggregates(aggregate, weighted=False)
        self.dim_in = dim_in
        self.aggregate = aggregate if isinstance(aggregate, str) else list(aggregate)
        # There are no parameters, so an empty buffer keeps the device and dtype.
        self.register_buffer("like", torch.empty(0), persistent=False)

    def extra_repr(self) -> str:
        return f"dim_in={self.dim_in}, aggregate={self.aggregate!r}"

    @property
    def dim_readout(self) -> int:
        """The width of the readout (B, dim_readout): all aggregates, concatenated."""
        return self.dim_in * len(self.aggregates)

    def fields(self, frame: tuple[Tensor, ...]) -> Fields:
        return {name: Field(FIELDS[name], (self.dim_in,)) for name in fields_of(self.aggregates)}

    def absorb(self, elements: Tensor, mask: Tensor | None, prepared: Any) -> Statistics:
        return {name: FIELDS[name].absorb(elements, mask) for name in fields_of(self.aggregates)}

    def finish(self, statistics: Statistics, count: Count, prepared: Any) -> Tensor:
        values = {name: parts[0] for name, parts in statistics.items()}
        return read(self.aggregates, values, count, None).to(self.like.dtype)


class DeepSets(Composition):
    """head(aggregate_i features(x_i)): an element-wise network, a pool, and a head.

    The original also has layers that subtract the set's maximum or mean. They need all elements at
    once; see `EquivariantDeepSets`.

    Args:
        features: a module applied to each element, (N, ...) -> (N, dim_features).
        dim_features: width of the features.
        aggregate: "sum", "mean", "max" or "min", or a list of them to concatenate.
        head: a module on (B, dim_features * number of aggregates); None for no head.

    >>> features = nn.Sequential(nn.Linear(3, 16), nn.ReLU())
    >>> DeepSets(features, dim_features=16, head=nn.Linear(16, 10))(torch.randn(2, 100, 3)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        features: nn.Module,
        dim_features: int,
        aggregate: str | Sequence[str] = "mean",
        head: nn.Module | None = None,
    ) -> None:
        super().__init__(Pool(dim_features, aggregate), features, head)
        self.dim_features = dim_features
        self.aggregate = aggregate if isinstance(aggregate, str) else list(aggregate)
