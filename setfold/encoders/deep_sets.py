"""Deep Sets without set-dependent layers, which folds (Zaheer et al., NeurIPS 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from setfold.core.absorb import Arrivals, has_methods_of
from setfold.core.composition import Composition, apply_features
from setfold.core.readout import FIELDS, Count, fields_of, parse_aggregates, read
from setfold.core.statistic import Field, Fields, Statistics, Sum
from setfold.encoders.layers import runs_only
from setfold.encoders.parameter_free import ParameterFreeEncoder
from setfold.kernels.modes import accumulator_dtype
from setfold.kernels.ragged import reduce_groups


class Pool(ParameterFreeEncoder):
    """The sum, mean, maximum or minimum of the elements, (B, n, d) -> (B, dim_readout).

    Args:
        dim_in: width d of the elements.
        aggregate: "sum", "mean", "max" or "min", or a list of them to concatenate.

    >>> import torch
    >>> Pool(2, "max")(torch.tensor([[[1.0, 5.0], [3.0, 4.0]]]))
    tensor([[3., 5.]])
    """

    def __init__(self, dim_in: int, aggregate: str | Sequence[str] = "mean") -> None:
        super().__init__(dim_in)
        self.aggregates = parse_aggregates(aggregate, weighted=False)
        self.aggregate = aggregate if isinstance(aggregate, str) else list(aggregate)

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

    def absorb_ragged(
        self, elements: Tensor, index: Tensor, batch_size: int, prepared: Any
    ) -> Arrivals | None:
        found = reduce_groups(elements, index, batch_size, fields_of(self.aggregates))
        if found is None:
            return None
        statistics: Statistics = {name: (value,) for name, value in found.items()}
        return iter([(None, statistics)])

    def finish(self, statistics: Statistics, count: Count, prepared: Any) -> Tensor:
        values = {name: parts[0] for name, parts in statistics.items()}
        return read(self.aggregates, values, count, None).to(self.like.dtype)


class DeepSets(Composition):
    """head(aggregate_i features(x_i)): an element-wise network, a pool, and a head.

    The original also has layers that subtract the set's maximum or mean. They need all elements at
    once; see `EquivariantDeepSets`.

    If features that are summed end with a linear layer, it is applied to the sum of its inputs,
    once per chunk instead of once per element: sum_i (W h_i + b) = W sum_i h_i + n b.

    Args:
        features: a module applied to each element, (N, ...) -> (N, dim_features).
        dim_features: width of the features.
        aggregate: "sum", "mean", "max" or "min", or a list of them to concatenate.
        head: a module on (B, dim_features * number of aggregates); None for no head.

    >>> import torch
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

    def prepare(self, frame: tuple[Tensor, ...]) -> None:
        return None  # a pool has no weights

    def featurize(
        self, elements: Tensor, mask: Tensor | None, context: tuple[Tensor, ...]
    ) -> Tensor:
        """The features (B, n, dim_features), or the inputs (B, n, p) of their last linear layer.

        The latter if `absorb` applies that layer to the sum. A subclass that overrides one of the
        two methods gets the features.
        """
        *others, last = self._layers()
        if last is None or context:
            found = super().featurize(elements, mask, context)
            if self._layers()[-1] is last:
                return found
            return self.featurize(elements, mask, context)  # a lazy layer has become a linear one

        def apply_others(rows: Tensor) -> Tensor:
            for layer in others:
                rows = layer(rows)
            return rows

        found = apply_features(apply_others, elements, mask)
        if found.shape[2:] != (last.in_features,):  # to be reported
            return super().featurize(elements, mask, context)
        return found

    def absorb(self, elements: Tensor, mask: Tensor | None, prepared: Any) -> Statistics:
        last = self._layers()[-1]
        if last is None:
            return super().absorb(elements, mask, prepared)
        (total,) = Sum().absorb(elements, mask)
        count = elements.shape[1] if mask is None else mask.sum(1, keepdim=True)
        return {"sum": (_sum_of_last(last, total, count),)}

    def absorb_ragged(
        self, elements: Tensor, index: Tensor, batch_size: int, prepared: Any
    ) -> Arrivals | None:
        last = self._layers()[-1]
        if last is None:
            return super().absorb_ragged(elements, index, batch_size, prepared)
        found = reduce_groups(elements, index, batch_size, ["sum"])
        if found is None:
            return None
        count = torch.bincount(index, minlength=batch_size).unsqueeze(1)
        statistics: Statistics = {"sum": (_sum_of_last(last, found["sum"], count),)}
        return iter([(None, statistics)])

    def _layers(self) -> list[Any]:
        """The layers of the features, the last of which may follow the sum; [None] if it may not.

        It must be linear, and sums must be wider than its inputs: W sum_i h_i and n b may cancel,
        and would lose digits that each W h_i + b has. Nothing may look at the features in between.
        """
        features: Any = self.features
        layers = list(features) if runs_only(features, nn.Sequential) else []
        layers = layers or [features]
        if self.encoder.fields(()).keys() != {"sum"} or not runs_only(layers[-1], nn.Linear):
            return [None]
        own = has_methods_of(DeepSets, self, ("featurize", "absorb"))
        if not (own and has_methods_of(Pool, self.encoder, ("featurize", "absorb"))):
            return [None]
        weight = layers[-1].weight
        fits = weight.shape[0] == self.dim_features
        return layers if fits and weight.dtype != accumulator_dtype(weight.device) else [None]


def _sum_of_last(last: nn.Linear, total: Tensor, count: Tensor | int) -> Tensor:
    """The sum of what a linear layer returns, from the sum (B, p) of its inputs, in float64."""
    found = total @ last.weight.t().to(total.dtype)
    return found if last.bias is None else found + last.bias.to(total.dtype) * count
