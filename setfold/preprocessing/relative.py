"""Numbers relative to their set: to its centre, or to its last event."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from setfold.core.arguments import check_sizes
from setfold.core.passes import Layer
from setfold.encoders.concat import Concat
from setfold.encoders.deep_sets import Pool
from setfold.errors import InputError

HOURS = 24.0


class RelativeLayer(Layer):
    """Subtracts the mean of the set from some columns, and turns times of others into ages.

        center:   x_i - mean_j x_j
        latest:   log(1 + h_i),  h_i = 24 (max_j t_j - t_i), the age in hours of a time in days

    All other columns are kept. As every layer it needs one more pass over a set.

    Args:
        dim: The width of the elements.
        center: Places of the columns that are centred.
        latest: Places of the columns that hold times.

    >>> layer = RelativeLayer(2, center=[0], latest=[1])
    >>> layer(torch.tensor([[[1.0, 0.0], [3.0, 1.0]]]))
    tensor([[[-1.0000,  3.2189],
             [ 1.0000,  0.0000]]])
    """

    def __init__(self, dim: int, center: Sequence[int] = (), latest: Sequence[int] = ()) -> None:
        check_sizes(dim=dim)
        lists = isinstance(center, list | tuple) and isinstance(latest, list | tuple)
        places = [*center, *latest] if lists else []
        whole = all(type(place) is int and 0 <= place < dim for place in places)
        if not places or not whole or len({*places}) < len(places):
            raise InputError(
                f"center and latest must be lists of different places in 0..{dim - 1}, at least "
                f"one; got {center!r:.60} and {latest!r:.60}."
            )
        pool = Concat({"mean": Pool(dim, "mean"), "max": Pool(dim, "max")})
        super().__init__(pool, _Relative(dim, list(center), list(latest)))
        self.dim = self.dim_out = dim
        self.center = list(center)
        self.latest = list(latest)

    def extra_repr(self) -> str:
        return f"center={self.center}, latest={self.latest}"


class _Relative(nn.Module):
    def __init__(self, dim: int, center: list[int], latest: list[int]) -> None:
        super().__init__()
        self.dim = dim
        self.center = center
        self.latest = latest

    def forward(self, elements: Tensor, summary: Tensor) -> Tensor:
        mean, largest = summary.unsqueeze(1).split(self.dim, -1)  # (B, 1, d) each
        columns = list(elements.unbind(-1))
        for place in self.center:
            columns[place] = columns[place] - mean[..., place]
        for place in self.latest:
            age = (largest[..., place] - columns[place]).clamp(min=0)
            columns[place] = torch.log1p(HOURS * age)
        return torch.stack(columns, -1)
