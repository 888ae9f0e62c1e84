"""Where slots lie: points, grids, and what belongs to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from setfold.core.arguments import check_flags, check_sizes, numbers_of
from setfold.core.inputs import check_kind
from setfold.core.passes import Layer
from setfold.encoders.deep_sets import Pool
from setfold.errors import InputError

# Spacings of a grid that are normal numbers in float32, with some room for coordinates.
MIN_SPACING, MAX_SPACING = 1e-30, 1e30


class Box(NamedTuple):
    """The units in which places are located, and the bounds in these units; (p,) each."""

    origin: Tensor
    spacing: Tensor
    lower: Tensor
    upper: Tensor


class Places(nn.Module):
    """Points at which slots lie, anywhere.

    Args:
        points: (K, p), a tensor or nested lists.
        learned: whether training moves the points.

    Attributes:
        dim: the number p of coordinates.
        num_slots: the number K of points.
        shape: the shape of the grid; None for points that lie anywhere.

    >>> Places([[0.0, 0.0], [1.0, 1.0]]).num_slots
    2
    """

    shape: tuple[int, ...] | None = None

    def __init__(self, points: Tensor | Sequence[Sequence[float]], learned: bool = False) -> None:
        super().__init__()
        check_flags(learned=learned)
        self.points = _points(points)
        self.learned = learned
        self.num_slots, self.dim = len(self.points), len(self.points[0])
        start = torch.tensor(self.points, dtype=torch.get_default_dtype()) if learned else None
        self.coordinates = None if start is None else nn.Parameter(start)

    @property
    def is_regular(self) -> bool:
        """Whether the points are exactly those of a grid."""
        return False

    def box(self, like: Tensor) -> Box:
        """The units and the bounds, with the dtype and device of a tensor."""
        points = torch.tensor(self.points, dtype=torch.float64)
        origin = points.new_zeros(self.dim)
        return _box(like, origin, origin + 1, points.amin(0), points.amax(0))

    def locate(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """The points (K, p) in the units, and how far they are from those of a grid."""
        if self.coordinates is None:
            points = torch.tensor(self.points, dtype=like.dtype, device=like.device)
        else:
            points = self.coordinates
        return points, points.new_zeros(())

    def extra_repr(self) -> str:
        return f"num_slots={self.num_slots}, dim={self.dim}, learned={self.learned}"


class Grid(Places):
    """The centres of the cells of a regular grid over a box, in any number of dimensions.

    Args:
        low: the lower corner of the box; a number for one dimension.
        high: the upper corner.
        shape: the number of cells along each axis.
        learned: whether training moves the points away from the centres.

    >>> Grid(low=(0, 0), high=(1, 2), shape=(2, 2)).centres()
    tensor([[0.2500, 0.5000],
            [0.2500, 1.5000],
            [0.7500, 0.5000],
            [0.7500, 1.5000]])
    """

    shape: tuple[int, ...]

    def __init__(
        self,
        low: float | Sequence[float],
        high: float | Sequence[float],
        shape: int | Sequence[int],
        learned: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        check_flags(learned=learned)
        self.low, self.high = numbers_of("low", low), numbers_of("high", high)
        self.shape = _shape([shape] if isinstance(shape, int) else shape)
        self.dim = len(self.shape)
        if not len(self.low) == len(self.high) == self.dim:
            raise InputError(
                "low, high and shape must have one number for each axis; got "
                f"{len(self.low)}, {len(self.high)} and {self.dim} numbers."
            )
        for low, high, size in zip(self.low, self.high, self.shape, strict=True):
            if not MIN_SPACING <= (high - low) / size <= MAX_SPACING:
                raise InputError(
                    "low must be below high on each axis, by numbers that float32 can hold; got "
                    f"{self.low} and {self.high}."
                )
        self.learned = learned
        self.num_slots = math.prod(self.shape)
        self.shift = nn.Parameter(torch.zeros(self.num_slots, self.dim)) if learned else None

    @property
    def is_regular(self) -> bool:
        return self.shift is None

    def box(self, like: Tensor) -> Box:
        low, high = torch.tensor([self.low, self.high], dtype=torch.float64)
        sizes = torch.tensor(self.shape, dtype=torch.float64)
        spacing = (high - low) / sizes
        return _box(like, low + spacing / 2, spacing, -0.5 + 0 * sizes, sizes - 0.5)

    def locate(self, like: Tensor) -> tuple[Tensor, Tensor]:
        axes = [torch.arange(size, dtype=like.dtype, device=like.device) for size in self.shape]
        points = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).view(-1, self.dim)
        if self.shift is None:
            return points, points.new_zeros(())
        return points + self.shift, self.shift.detach().abs().amax()

    def centres(self, like: Tensor | None = None) -> Tensor:
        """The points (K, p) in the coordinates of the elements.

        Args:
            like: a tensor whose dtype and device they get; None for those of the grid.
        """
        if like is None:
            like = torch.empty(0) if self.shift is None else self.shift
        box = self.box(like)
        return box.origin + box.spacing * self.locate(like)[0]

    def extra_repr(self) -> str:
        return f"low={self.low}, high={self.high}, shape={self.shape}, learned={self.learned}"


def _box(like: Tensor, *values: Tensor) -> Box:
    return Box(*(value.to(like.device, like.dtype) for value in values))


def _points(given: Tensor | Sequence[Sequence[float]]) -> list[list[float]]:
    """Points (K, p) as lists, validated. They are on the CPU, also where a model is only sketched."""
    if isinstance(given, Tensor):
        check_kind("points", given)
        found = given.detach().to("cpu", torch.float64)
    else:
        try:
            found = torch.tensor(given, dtype=torch.float64, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"points must be numbers (K, p); {error}.") from error
    if found.dim() != 2 or not found.numel() or not bool(found.isfinite().all()):
        raise InputError(
            f"points must be finite numbers (K, p), at least one; got {tuple(found.shape)}."
        )
    return found.tolist()


def _shape(given: Sequence[int]) -> tuple[int, ...]:
    """The shape of a grid, validated."""
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise InputError(f"shape must be a size for each axis; got {given!r}.")
    check_sizes(**{f"shape[{axis}]": size for axis, size in enumerate(given)})
    check_sizes(**{"the number of slots": math.prod(given)})
    return tuple(given)


class SlotGrid(nn.Module):
    """Arrange slots as a grid for convolutions: (B, K, c) -> (B, c, *shape).

    Args:
        shape: the shape of the grid, with K cells.

    >>> SlotGrid((4, 5))(torch.randn(2, 20, 3)).shape
    torch.Size([2, 3, 4, 5])
    """

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = _shape(shape)

    def forward(self, encoding: Tensor) -> Tensor:
        if encoding.dim() != 3 or encoding.shape[1] != math.prod(self.shape):
            raise InputError(
                f"expected an encoding (B, {math.prod(self.shape)}, c) for a grid {self.shape}; got "
                f"{tuple(encoding.shape)}."
            )
        return encoding.transpose(1, 2).unflatten(2, self.shape)

    def extra_repr(self) -> str:
        return f"shape={self.shape}"


class Zoom(nn.Module):
    """Slots of a grid, read relative to the bounding box that a set has so far.

    The grid over a large area is fixed, so the encoder is a fold in one pass. Beside it a `Pool`
    keeps the bounding box. At readout, the slots are interpolated at the centres of a grid over the
    set's own box, a cube around its middle with the longest side. Slots beyond the grid are zeros.

    Args:
        places: the grid of the `PlacedSlotEncoder`.
        dim_in: width d of the elements.
        shape: the shape of the grid over the set's own box.
        position: the columns of an element that are its position; by default the first ones.

    >>> from setfold import Composition, Concat, PlacedSlotEncoder
    >>> grid = Grid(low=(-100, -100), high=(100, 100), shape=(64, 64))
    >>> parts = [PlacedSlotEncoder(3, grid), Pool(3, ["max", "min"])]
    >>> model = Composition(Concat(parts), head=Zoom(grid, 3, shape=(8, 8)))
    >>> model(torch.randn(2, 100, 3)).shape
    torch.Size([2, 64, 1])
    """

    def __init__(
        self,
        places: Grid,
        dim_in: int,
        shape: Sequence[int],
        position: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        check_sizes(dim_in=dim_in)
        if not isinstance(places, Grid):
            raise InputError(f"places must be a Grid; got {type(places).__name__}.")
        self.places = places
        self.dim_in = dim_in
        self.shape = _shape(shape)
        if len(self.shape) != places.dim:
            raise InputError(
                f"shape must have {places.dim} sizes, one for each axis; got {self.shape}."
            )
        columns = [*range(places.dim)] if position is None else position
        self.position = position_columns(columns, places.dim, dim_in)

    def forward(self, encoding: Tensor) -> Tensor:
        slots = self.places.num_slots
        width = (encoding.shape[-1] - 2 * self.dim_in) // slots
        if encoding.dim() != 2 or width * slots + 2 * self.dim_in != encoding.shape[1] or not width:
            raise InputError(
                f"expected encodings (B, {slots} c + {2 * self.dim_in}) of a Concat of a "
                f'PlacedSlotEncoder and a Pool of ["max", "min"]; got {tuple(encoding.shape)}.'
            )
        flat, high, low = encoding.split([slots * width, self.dim_in, self.dim_in], 1)
        middle, half = _middle_and_half(high[:, self.position], low[:, self.position])
        unit = Grid([-1.0] * self.places.dim, [1.0] * self.places.dim, self.shape)
        points = middle.unsqueeze(1) + half.unsqueeze(1) * unit.centres(encoding)  # (B, M, p)
        box = self.places.box(encoding)
        return self._interpolated(flat.unflatten(1, (slots, width)), (points - box[0]) / box[1])

    def _interpolated(self, slots: Tensor, at: Tensor) -> Tensor:
        """Slots (B, K, c) between their places, at points (B, M, p) in units of the grid."""
        first = at.detach().floor()
        share, found = at - first, torch.zeros((), dtype=slots.dtype, device=slots.device)
        for corner in product((0, 1), repeat=self.places.dim):
            weight: Any = 1.0
            place: Any = 0
            for axis, (step, size) in enumerate(zip(corner, self.places.shape, strict=True)):
                index = first[..., axis] + step
                near = share[..., axis] if step else 1 - share[..., axis]
                weight = weight * near * ((index >= 0) & (index < size))
                place = place * size + index.clamp(0, size - 1).long()
            chosen = slots.gather(1, place.unsqueeze(-1).expand(-1, -1, slots.shape[-1]))
            found = found + weight.unsqueeze(-1) * chosen
        return found

    def extra_repr(self) -> str:
        return f"dim_in={self.dim_in}, shape={self.shape}, position={self.position}"


class UnitBox(Layer):
    """Moves and scales the positions of each set into the box from -1 to 1.

        y_i = (x_i - middle) / half the longest side of the set's bounding box

    All axes have the same scale, so shapes are kept. Other columns are left as they are. It needs
    the bounding box, so in a `LayeredSetEncoder` it takes one more pass over the set.

    Args:
        dim_in: width d of the elements.
        position: the columns that are the position; None for all.

    >>> box = UnitBox(3, position=(0, 1))
    >>> box(torch.tensor([[[10.0, 0.0, 5.0], [30.0, 10.0, 6.0]]]))
    tensor([[[-1.0000, -0.5000,  5.0000],
             [ 1.0000,  0.5000,  6.0000]]])
    """

    def __init__(self, dim_in: int, position: Sequence[int] | None = None) -> None:
        check_sizes(dim_in=dim_in)
        if position is not None:
            position = position_columns(position, None, dim_in)
        super().__init__(Pool(dim_in, ["max", "min"]), _IntoBox(position))
        self.dim_in = self.dim_out = dim_in
        self.position = position


class _IntoBox(nn.Module):
    """Moves and scales elements, given the largest and smallest coordinates of their set."""

    def __init__(self, position: list[int] | None) -> None:
        super().__init__()
        self.position = position

    def forward(self, elements: Tensor, bounds: Tensor) -> Tensor:
        columns = slice(None) if self.position is None else self.position
        high, low = (part[:, None, columns] for part in bounds.chunk(2, -1))
        middle, half = _middle_and_half(high, low)
        scaled = (elements[..., columns] - middle) / half
        if self.position is None:
            return scaled
        moved = elements.clone()
        moved[..., columns] = scaled
        return moved


def _middle_and_half(high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """The middle (..., p) of a box, and half its longest side (..., 1); 1 for a single point."""
    half = (high / 2 - low / 2).amax(-1, keepdim=True)  # sums of large numbers could overflow
    return high / 2 + low / 2, torch.where(half > 0, half, 1)


def position_columns(given: Sequence[int], dim: int | None, dim_in: int) -> list[int]:
    """The columns that are the position of an element, validated.

    Args:
        given: The columns.
        dim: How many there must be; None for any number.
        dim_in: The width of the elements.
    """
    listed = isinstance(given, Sequence) and not isinstance(given, str) and len(given) > 0
    columns = [*given] if listed else []
    valid = all(type(column) is int and 0 <= column < dim_in for column in columns)
    wanted = len(columns) if dim is None else dim
    if not listed or not valid or len(columns) != wanted or len({*columns}) < wanted:
        number = "" if dim is None else f"{dim} "
        raise InputError(
            f"position must be {number}different columns in 0..{dim_in - 1}, one for each "
            f"coordinate of the places; got {given!r:.200}."
        )
    return columns
