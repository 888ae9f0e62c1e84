"""Slots with places: elements attend to the slots that are near them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from setfold.core.arguments import (
    check_choice,
    check_flags,
    check_positive,
    check_sizes,
    numbers_of,
    words_of,
)
from setfold.core.encoder import StreamingSetEncoder
from setfold.core.readout import Count, mean_of, weighted_mean_of
from setfold.core.state import SetState
from setfold.core.statistic import (
    OUTSIDE,
    CentralMoments,
    Field,
    Fields,
    Max,
    Min,
    Statistics,
    Sum,
)
from setfold.encoders.places import Places, position_columns
from setfold.errors import InputError
from setfold.kernels.modes import without_autocast
from setfold.kernels.places import (
    VALUES,
    Attention,
    Layout,
    least_weight,
    pair_all,
    placed_extrema,
    placed_sums,
)

ATTENTIONS = ("softmax", "kernel")
WHAT_TO_DO = ("clamp", "drop")  # with elements outside
AGGREGATES = ("sum", "mean", "weighted_mean", "variance", "density", "mass", "max", "min")
OF_WEIGHTS = ("density", "mass")  # aggregates of the weights alone
MAX_REACH = 12.0  # beyond it weights would underflow in float32


class PlacedSlotEncoder(StreamingSetEncoder):
    """Pools a set into slots that have places. Elements attend to the slots that are near them.

    With the position p_i of an element, the place mu_j of a slot and a width s_j:

        w_ij = exp(-|p_i - mu_j|^2 / 2 s_j^2) if |p_i - mu_j| <= reach s_j, else 0

    With attention="softmax" the weights of an element are divided by their sum over the slots: the
    posterior of a mixture, as in Fisher vectors. With "kernel" they are used as they are: the set
    convolution of ConvCNP. The state is a plain sum or maximum for each slot, so the encoder is a
    fold. On a grid an element touches only a few slots, so its cost does not depend on K. The
    encoding is (B, K, dim_readout); `SlotGrid` arranges it for convolutions.

    Args:
        dim_in: width d of the elements.
        places: where the slots are: a `Grid`, or `Places` for any points.
        width: the width s, in units of the grid's spacing (in the units of the elements for
            `Places`); one number, or one for each slot.
        values: what is weighted and aggregated; a list of "features", the columns other than the
            position; "offsets", (p_i - mu_j) / s_j; and "squares", offsets squared minus 1. The
            default is "features", or "offsets" if an element is only a position.
        aggregate: "sum", "mean" (over all elements), "weighted_mean", "variance" (weighted), "max"
            or "min" of w_ij v_i among the elements within reach; "density" for sum_i w_ij, "mass"
            for the mean of w_ij over the elements; or a list of them, concatenated. A slot without
            elements within reach reads as zeros.
        attention: "softmax" or "kernel".
        position: the columns of an element that are its position; by default the first ones.
        reach: distance in widths beyond which weights are exactly 0; at most 12.
        outside: what to do with elements outside the box of the grid (of the points): "clamp" moves
            them to its border, "drop" ignores them. `outside_count` returns how many there were.
        learn_width: whether training changes the width.

    >>> from setfold import Grid, SlotGrid
    >>> grid = Grid(low=(0, 0), high=(1, 1), shape=(8, 8))
    >>> encoder = PlacedSlotEncoder(3, grid, aggregate=["density", "weighted_mean"])
    >>> pixels = torch.rand(5, 100, 3)  # x, y and a brightness
    >>> SlotGrid(grid.shape)(encoder(pixels)).shape
    torch.Size([5, 2, 8, 8])
    """

    dim_in: int
    like: Tensor

    def __init__(
        self,
        dim_in: int,
        places: Places,
        width: float | Sequence[float] = 0.6,
        values: str | Sequence[str] | None = None,
        aggregate: str | Sequence[str] = "weighted_mean",
        attention: str = "softmax",
        position: Sequence[int] | None = None,
        reach: float = 3.0,
        outside: str = "clamp",
        learn_width: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(dim_in=dim_in)
        check_choice(ATTENTIONS, attention=attention)
        check_choice(WHAT_TO_DO, outside=outside)
        check_flags(learn_width=learn_width)
        check_positive(reach=reach)
        if reach > MAX_REACH:
            raise InputError(f"reach must be at most {MAX_REACH:g}; got {reach!r}.")
        if not isinstance(places, Places):
            raise InputError(
                f"places must be a Grid or Places; got {type(places).__name__}. For points in a "
                "tensor pass Places(points)."
            )
        self.dim_in = dim_in
        self.places = places
        columns = [*range(places.dim)] if position is None else position
        self.position = position_columns(columns, places.dim, dim_in)
        only_positions = dim_in == places.dim
        if values is None:
            values = "offsets" if only_positions else "features"
        self.values = words_of(VALUES, "values", values)
        if "features" in self.values and only_positions:
            raise InputError(
                f"all {dim_in} columns are the position, so there are no features. Choose "
                'values="offsets", or pass elements with more columns.'
            )
        self.aggregates = tuple(words_of(AGGREGATES, "aggregate", aggregate))
        self.aggregate = aggregate if isinstance(aggregate, str) else [*aggregate]
        self.attention = attention
        self.outside = outside
        self.learn_width = learn_width
        self.reach = float(reach)
        widths = numbers_of("width", width)
        alone = isinstance(width, int | float)
        if not alone and len(widths) != places.num_slots:
            raise InputError(
                f"width must be one number or {places.num_slots}, one for each slot; got "
                f"{len(widths)}."
            )
        for each in widths:
            check_positive(width=each)
        self.width = widths[0] if alone else [*widths]
        logs = torch.tensor([math.log(each) for each in widths]) if learn_width else None
        self.log_width = None if logs is None else nn.Parameter(logs)
        # There may be no parameters, so an empty buffer keeps the device and dtype.
        self.register_buffer("like", torch.empty(0), persistent=False)
        linear = all(name in ("sum", "mean", *OF_WEIGHTS) for name in self.aggregates)
        self.slots_cancel = linear and attention == "softmax" and self.values == ["features"]

    @property
    def num_slots(self) -> int:
        return self.places.num_slots

    @property
    def dim_value(self) -> int:
        """The number of values that are weighted."""
        dim = self.places.dim
        return sum(self.dim_in - dim if name == "features" else dim for name in self.values)

    @property
    def dim_readout(self) -> int:
        """The width of the readout (B, K, dim_readout): all aggregates, concatenated."""
        return sum(1 if name in OF_WEIGHTS else self.dim_value for name in self.aggregates)

    def extra_repr(self) -> str:
        return (
            f"dim_in={self.dim_in}, width={self.width}, values={self.values}, "
            f"aggregate={self.aggregate!r}, attention={self.attention!r}, "
            f"position={self.position}, reach={self.reach}, outside={self.outside!r}"
        )

    # ---- the fold ------------------------------------------------------------------------------

    @property
    def first_weight(self) -> Tensor:
        return self.like

    def fields(self, frame: tuple[Tensor, ...]) -> Fields:
        found: dict[str, Field] = {}
        names, shape = self.aggregates, (self.num_slots, self.dim_value)
        if "variance" in names:
            found["moments"] = Field(CentralMoments(), shape)
        elif any(name not in ("max", "min") for name in names):
            found["sum"] = Field(Sum(), (self.num_slots, self.dim_value + 1))
        if "max" in names:
            found["max"] = Field(Max(), shape)
        if "min" in names:
            found["min"] = Field(Min(), shape)
        return {**found, OUTSIDE: Field(Sum(), (1,))}

    def prepare(self, frame: tuple[Tensor, ...]) -> Layout:
        like = self.like.to(torch.promote_types(self.like.dtype, torch.float32))
        with without_autocast(like.device):
            points, drift = self.places.locate(like)
            if self.log_width is None:
                widths = torch.tensor(self.width, dtype=like.dtype, device=like.device).view(-1)
            else:
                widths = self.log_width.to(like.dtype).exp()
            radius = self.reach * widths.detach().amax() + drift
            return Layout(points.to(like.dtype), widths, radius.double(), *self.places.box(like))

    @property
    def _attention(self) -> Attention:
        places = self.places
        normalized = self.attention == "softmax"
        values = tuple(self.values)
        return Attention(normalized, self.reach, values, places.shape, places.is_regular)

    def _split(
        self, elements: Tensor, mask: Tensor | None, layout: Layout
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Positions in units of the layout, features, mask, and which elements are outside."""
        elements = elements.to(torch.promote_types(elements.dtype, layout.points.dtype))
        positions = (elements[..., self.position] - layout.origin) / layout.spacing
        outside = ((positions < layout.lower) | (positions > layout.upper)).any(-1)  # (B, n)
        if mask is not None:
            outside = outside & mask
        if self.outside == "drop":
            mask = ~outside if mask is None else mask & ~outside
        positions = torch.minimum(torch.maximum(positions, layout.lower), layout.upper)
        return positions, self._features(elements), mask, outside

    def _features(self, elements: Tensor) -> Tensor:
        """The columns other than the position."""
        dim = self.places.dim
        if self.position == [*range(dim)]:
            return elements[..., dim:]
        return elements[..., [c for c in range(self.dim_in) if c not in self.position]]

    def absorb(self, elements: Tensor, mask: Tensor | None, prepared: Layout) -> Statistics:
        with without_autocast(elements.device):
            positions, features, mask, outside = self._split(elements, mask, prepared)
            found: Statistics = {}
            for name in self.fields(()):
                if name in ("max", "min"):
                    best = placed_extrema(
                        positions, features, mask, prepared, self._attention, name == "max"
                    )
                    found[name] = (best,)
                elif name == "sum":
                    sums = placed_sums(
                        positions, features, mask, prepared, self._attention, squared=False
                    )
                    found[name] = (sums,)
                elif name == "moments":
                    found[name] = self._moments(positions, features, mask, prepared)
            found[OUTSIDE] = (outside.sum(1, keepdim=True, dtype=torch.float64),)
            return found

    def _moments(
        self, positions: Tensor, features: Tensor, mask: Tensor | None, prepared: Layout
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mass, weighted mean and weighted squared distances from it, for each slot and value."""
        # Relative to the mean of the chunk the squares lose no digits, however large features are.
        present = torch.ones_like(positions[..., 0]) if mask is None else mask.to(positions.dtype)
        number = present.sum(1)[:, None, None].clamp_min(1)
        centre = ((features * present.unsqueeze(-1)).sum(1, keepdim=True) / number).detach()
        sums = placed_sums(
            positions, features - centre, mask, prepared, self._attention, squared=True
        )
        total, of_squares, mass = sums.split([self.dim_value, self.dim_value, 1], -1)
        mean = total / torch.where(mass > 0, mass, 1)
        squares = (of_squares - total * mean).clamp_min(0)
        shifts = [
            centre if name == "features" else centre.new_zeros(centre.shape[0], 1, self.places.dim)
            for name in self.values
        ]
        mean = torch.where(mass > 0, mean + torch.cat(shifts, -1), 0)
        return mass.expand_as(mean), mean, squares

    def finish(self, statistics: Statistics, count: Count, prepared: Layout) -> Tensor:
        sums, mass, moments = None, None, statistics.get("moments")
        if moments is not None:
            mass = moments[0][..., 0]
            sums = moments[0] * moments[1]
        elif "sum" in statistics:
            # After a removal a slot without elements may keep what rounding left of them.
            total = statistics["sum"][0]
            least = 0.5 * least_weight(prepared, self._attention)
            total = torch.where(total[..., -1:] < least, 0, total)
            sums, mass = total[..., :-1], total[..., -1]
        readouts = []
        for name in self.aggregates:
            if name in ("max", "min"):
                value = statistics[name][0]
                readouts.append(torch.where(value.isinf(), 0, value))
                continue
            assert sums is not None
            assert mass is not None
            readouts.append(_read(name, sums, mass, moments, count))
        return torch.cat(readouts, -1).to(self.like.dtype)

    def outside_count(self, state: SetState) -> Tensor:
        """The number of elements (B,) outside the box, which were clamped or dropped."""
        return state.statistics[OUTSIDE][0][:, 0].round().long()

    def weigh(self, elements: Tensor, state: SetState, prepared: Layout) -> Tensor:
        positions, _, mask, _ = self._split(elements, None, prepared)
        weights = pair_all(positions, prepared, self._attention).weights
        weights = weights if mask is None else weights * mask.unsqueeze(-1)
        return weights.to(elements.dtype)


def _read(name: str, sums: Tensor, mass: Tensor, moments: Any, count: Count) -> Tensor:
    """One aggregate (B, K, ...) of sums (B, K, c) and masses (B, K)."""
    if name == "sum":
        return sums
    if name == "mean":
        return mean_of(sums, count)
    if name == "weighted_mean":
        return weighted_mean_of(sums, mass) if moments is None else moments[1]
    if name == "density":
        return mass.unsqueeze(-1)
    if name == "mass":
        return mean_of(mass.unsqueeze(-1), count)
    return weighted_mean_of(moments[2], mass)
