"""Plain statistics of a set: what one would compute without a set encoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from setfold.core.readout import Count, mean_of
from setfold.core.statistic import CentralMoments, Field, Fields, Max, Min, Statistics, spread
from setfold.encoders.parameter_free import ParameterFreeEncoder

FIELDS = {"moments": CentralMoments(), "max": Max(), "min": Min()}


class SummaryStatistics(ParameterFreeEncoder):
    """Count, mean, standard deviation, minimum and maximum: (B, n, d) -> (B, 1 + 4 d).

    The count is read as log(1 + n). All numbers of an empty set are 0. Put it beside other encoders
    with `Concat`, so that a model never lacks these statistics.

    Args:
        dim_in: width d of the elements.

    >>> SummaryStatistics(1)(torch.tensor([[[1.0], [3.0]]]))
    tensor([[1.0986, 2.0000, 1.0000, 1.0000, 3.0000]])
    """

    @property
    def dim_readout(self) -> int:
        """The width of the readout (B, dim_readout)."""
        return 1 + 4 * self.dim_in

    def fields(self, frame: tuple[Tensor, ...]) -> Fields:
        return {name: Field(statistic, (self.dim_in,)) for name, statistic in FIELDS.items()}

    def absorb(self, elements: Tensor, mask: Tensor | None, prepared: Any) -> Statistics:
        return {name: statistic.absorb(elements, mask) for name, statistic in FIELDS.items()}

    def finish(self, statistics: Statistics, count: Count, prepared: Any) -> Tensor:
        _, mean, squares = statistics["moments"]
        variance = mean_of(squares, count)
        varies = variance > 0  # the square root has no gradient at 0
        deviation = torch.where(varies, torch.where(varies, variance, 1).sqrt(), 0)
        extrema = [statistics[name][0] for name in ("min", "max")]
        number = torch.as_tensor(count, device=mean.device).to(mean.dtype).expand(mean.shape[0])
        empty = spread(number == 0, mean)
        parts = [mean, deviation, *(torch.where(empty, 0, part) for part in extrema)]
        return torch.cat([number.log1p().unsqueeze(1), *parts], 1).to(self.like.dtype)
