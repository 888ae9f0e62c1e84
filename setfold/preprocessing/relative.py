"""Numbers relative to their set: to its centre, or to its last event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from setfold.core.arguments import check_sizes
from setfold.core.encoder import StreamingSetEncoder
from setfold.core.passes import Layer
from setfold.core.readout import FIELDS, Count, read
from setfold.core.statistic import Field, Fields, Statistics
from setfold.encoders.concat import Concat
from setfold.encoders.deep_sets import Pool
from setfold.errors import InputError
from setfold.kernels.modes import accumulator_dtype

HOURS = 24.0


class RelativeLayer(Layer):
    """Subtracts the mean of the set from some columns, and turns times of others into ages.

        center:   x_i - mean_j x_j
        latest:   log(1 + h_i),  h_i = 24 (max_j t_j - t_i), the age in hours of a time in days

    A time is two columns, whole days and the rest of a day, as `TimeColumn` makes them. The rest
    and all other columns are kept. As every layer it needs one more pass over a set.

    Args:
        dim: The width of the elements.
        center: Places of the columns that are centred.
        latest: Places of the columns that hold whole days; the rest of a day is in the next.

    >>> layer = RelativeLayer(3, center=[0], latest=[1])
    >>> layer(torch.tensor([[[1.0, 0.0, 0.5], [3.0, 1.0, 0.5]]]))
    tensor([[[-1.0000,  3.2189,  0.5000],
             [ 1.0000,  0.0000,  0.5000]]])
    """

    def __init__(self, dim: int, center: Sequence[int] = (), latest: Sequence[int] = ()) -> None:
        check_sizes(dim=dim)
        lists = isinstance(center, list | tuple) and isinstance(latest, list | tuple)
        whole = lists and all(type(place) is int for place in [*center, *latest])
        places = [*center, *latest, *(place + 1 for place in latest)] if whole else []
        inside = all(0 <= place < dim for place in places)
        if not places or not inside or len({*places}) < len(places):
            raise InputError(
                f"center and latest must be lists of different places in 0..{dim - 1}, at least "
                "one, and the place after each of latest must be free; got "
                f"{center!r:.60} and {latest!r:.60}."
            )
        parts: dict[str, StreamingSetEncoder] = {"mean": Pool(dim, "mean")}
        if latest:
            parts["latest"] = _Latest(dim, latest)
        pool = Concat(parts)
        super().__init__(pool, _Relative(dim, list(center), list(latest)))
        self.dim = self.dim_out = dim
        self.center = list(center)
        self.latest = list(latest)

    def extra_repr(self) -> str:
        return f"center={self.center}, latest={self.latest}"


class _Latest(Pool):
    """The latest times (B, 2 k): whole days, then the rests. They are compared in float64."""

    def __init__(self, dim: int, latest: Sequence[int]) -> None:
        super().__init__(dim, "max")
        self.latest = list(latest)

    @property
    def dim_readout(self) -> int:
        return 2 * len(self.latest)

    def fields(self, frame: tuple[Tensor, ...]) -> Fields:
        return {"max": Field(FIELDS["max"], (len(self.latest),))}

    def absorb(self, elements: Tensor, mask: Tensor | None, prepared: Any) -> Statistics:
        wide = elements.to(accumulator_dtype(elements.device))
        times = wide[..., self.latest] + wide[..., [place + 1 for place in self.latest]]
        return {"max": FIELDS["max"].absorb(times, mask)}

    def finish(self, statistics: Statistics, count: Count, prepared: Any) -> Tensor:
        times = read(self.aggregates, {"max": statistics["max"][0]}, count, None)
        days = times.floor()
        return torch.cat([days, times - days], -1).to(self.like.dtype)


class _Relative(nn.Module):
    def __init__(self, dim: int, center: list[int], latest: list[int]) -> None:
        super().__init__()
        self.dim = dim
        self.center = center
        self.latest = latest

    def forward(self, elements: Tensor, summary: Tensor) -> Tensor:
        times = len(self.latest)
        mean, days, rest = summary.unsqueeze(1).split([self.dim, times, times], -1)  # (B, 1, ...)
        columns = list(elements.unbind(-1))
        for place in self.center:
            columns[place] = columns[place] - mean[..., place]
        for number, place in enumerate(self.latest):
            whole = days[..., number] - columns[place]
            age = (whole + (rest[..., number] - columns[place + 1])).clamp(min=0)
            columns[place] = torch.log1p(HOURS * age)
        return torch.stack(columns, -1)
