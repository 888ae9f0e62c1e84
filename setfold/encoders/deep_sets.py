"""Deep Sets in the form that folds (Zaheer et al., NeurIPS 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from setfold.core.arguments import refuse_sizes
from setfold.core.composition import Composition
from setfold.core.encoder import StreamingSetEncoder
from setfold.core.readout import Count, parse_aggregates, read, statistics_of
from setfold.core.statistic import REDUCTIONS, Statistics


class Pool(StreamingSetEncoder):
    """The sum, mean, maximum or minimum of the elements themselves.

    Args:
        dim_in: width d of the elements.
        aggregate: "sum", "mean", "max" or "min", or a list of them, read side by side.

    >>> Pool(2, "max")(torch.tensor([[[1.0, 5.0], [3.0, 4.0]]]))
    tensor([[3., 5.]])
    """

    dim_in: int
    like: Tensor
    defers = True

    def __init__(self, dim_in: int, aggregate: str | Sequence[str] = "mean") -> None:
        super().__init__()
        refuse_sizes(dim_in=dim_in)
        self.dim_in = dim_in
        self.aggregate = aggregate if isinstance(aggregate, str) else list(aggregate)
        self.aggregates = parse_aggregates(aggregate, weighted=False)
        self.statistic_names = statistics_of(self.aggregates)
        self.sums_show_all = "sum" in self.statistic_names
        # Remembers device and dtype, which a module without parameters would not.
        self.register_buffer("like", torch.empty(0), persistent=False)

    def extra_repr(self) -> str:
        return f"dim_in={self.dim_in}, aggregate={self.aggregate!r}"

    @property
    def dim_readout(self) -> int:
        """The width of the readout (B, dim_readout): all aggregates side by side."""
        return self.dim_in * len(self.aggregates)

    def identity(self, batch_size: int, frame: tuple[Tensor, ...]) -> Statistics:
        shape = (batch_size, self.dim_in)
        return {
            name: REDUCTIONS[name].identity(shape, device=self.like.device)
            for name in self.statistic_names
        }

    def absorb(self, elements: Tensor, mask: Tensor | None, prepared: Any) -> Statistics:
        return {name: REDUCTIONS[name].absorb(elements, mask) for name in self.statistic_names}

    def finish(self, statistics: Statistics, count: Count, frame: tuple[Tensor, ...]) -> Tensor:
        values = {name: parts[0] for name, parts in statistics.items()}
        return read(self.aggregates, values, count, None).to(self.like.dtype)


class DeepSets(Composition):
    """head(aggregate_i features(x_i)): an element-wise network, a pool, and a head.

    The original's layers that subtract the set's maximum or mean are left out: they look at all
    elements at once.

    Args:
        features: a module applied to each element, (N, ...) -> (N, dim_features).
        dim_features: what the features put out.
        aggregate: "sum", "mean", "max" or "min", or a list of them, read side by side.
        head: any module on (B, dim_features * number of aggregates); None for nothing.

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
