"""Random configurations: an encoder, a dtype, sets of elements, and a way to fold them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

import setfold
from tests.differential.encoders import Draw, draw_encoder
from tests.differential.formulas import names_of

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
EXPONENTS = {torch.float16: (-8.0, 5.0)}  # of ten: the size of elements
WIDE = (-30.0, 30.0)
MODERATE = (-1.0, 2.0)  # where attention distinguishes elements
LONGEST = 9


@dataclass(frozen=True)
class Route:
    """How elements reach the encoder.

    Args:
        way: "forward", "update", "merge" or "fold".
        form: "dense", with a mask if sets differ in length, or "ragged".
        chunks: how many parts the sets are split into.
        mode: "plain", "no_grad" or "inference".
        gradient: how `fold` keeps gradients.
        slots: "default", "drawn" by a generator, "own" ones of each set, or "more" than usual.
        padding: what masked elements are.
        removes: whether more elements are added, and removed again.
        saved: whether states go through a file.
        small_tiles: whether kernels see as many tiles as they would of large sets.
    """

    way: str
    form: str
    chunks: int
    mode: str
    gradient: str
    slots: str
    padding: float
    removes: bool
    saved: bool
    small_tiles: bool


@dataclass(frozen=True)
class Configuration:
    """Everything that one comparison needs; `number` reproduces it.

    Args:
        number: of which all follows.
        encoder: in evaluation mode.
        dtype: of weights and elements.
        sets: the elements (n, d) of each set.
        gone: elements of each set that are added and removed again.
        route: how they reach the encoder.
        draw: decides whatever else the route needs.
    """

    number: int
    encoder: setfold.StreamingSetEncoder
    dtype: torch.dtype
    sets: list[Tensor]
    gone: list[Tensor]
    route: Route
    draw: Draw

    @property
    def is_finite(self) -> bool:
        """Whether all elements are finite in the dtype."""
        return all(bool(rows.isfinite().all()) for rows in (*self.sets, *self.gone))

    def __str__(self) -> str:
        largest = max((float(rows.abs().max()) for rows in self.sets if rows.numel()), default=0.0)
        return (
            f"configuration {self.number}: python -m tests.differential {self.number}\n"
            f"{self.encoder}\n{self.dtype}, sets of {[len(rows) for rows in self.sets]} elements "
            f"up to {largest:.3g}, {[len(rows) for rows in self.gone]} removed\n{self.route}"
        )


def draw_configuration(number: int) -> Configuration:
    """The configuration with a number."""
    draw = np.random.default_rng([number, 2021])
    encoder = draw_encoder(draw)
    dtype = DTYPES[draw.integers(len(DTYPES))]
    width = encoder.dim_in or _width_of(encoder)
    encoder = encoder.to(dtype)
    route = _draw_route(draw, encoder)
    count = int(draw.integers(1, 4))
    sets = _draw_sets(draw, count, width, dtype)
    gone = _draw_sets(draw, count, width, dtype) if route.removes else [s[:0] for s in sets]
    return Configuration(number, encoder, dtype, sets, gone, route, draw)


def _width_of(encoder: setfold.StreamingSetEncoder) -> int:
    """The width of the elements of an encoder that begins with features."""
    layers = (part for part in encoder.modules() if isinstance(part, nn.Linear))
    return next(layers).in_features


def _draw_sets(draw: Draw, count: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    low, high = MODERATE if draw.integers(2) else EXPONENTS.get(dtype, WIDE)
    scale, kind = 10 ** draw.uniform(low, high), draw.integers(5)
    found = []
    for _ in range(count):
        length = int(draw.integers(0, LONGEST)) if draw.integers(8) else 0
        rows = draw.standard_normal((length, width))
        if kind == 0:
            rows = rows.round()  # ties and zeros
        elif kind == 1:
            rows += 1000.0  # far from zero
        elif kind == 2:  # of very different sizes
            rows *= 10 ** draw.uniform(-8, 0, (length, 1))
        with np.errstate(over="ignore"):
            found.append(torch.from_numpy(scale * rows).to(dtype))
    return found


def _draw_route(draw: Draw, encoder: setfold.StreamingSetEncoder) -> Route:
    ways, slots, removes = ["forward", "update", "merge", "fold"], ["default"], False
    if encoder.slot_dims:
        slots += ["own"]
        if encoder.draws_slots and not any(_is_learned(part) for part in encoder.modules()):
            slots += ["drawn"]
        if isinstance(encoder, setfold.SlotSetEncoder) and encoder.slots == "random":
            slots += ["more"]
    way = str(draw.choice(ways))
    if way in ("update", "merge"):
        removes = not draw.integers(4 if is_removable(encoder) else 20)
    return Route(
        way,
        form=str(draw.choice(["dense", "ragged"])),
        chunks=1 if way == "forward" else int(draw.integers(1, 5)),
        mode=str(draw.choice(["plain", "no_grad", "inference"])),
        gradient=str(draw.choice(["exact", "unbiased", "autograd"])),
        slots=str(draw.choice(slots)) if way in ("update", "merge") else "default",
        padding=float(draw.choice([0.0, np.nan, np.inf, 1e4])),
        removes=removes,
        saved=bool(draw.integers(4) == 0),
        small_tiles=bool(draw.integers(3) == 0),
    )


def _is_learned(module: nn.Module) -> bool:
    return isinstance(module, setfold.SlotSetEncoder) and module.slots == "learned"


def is_removable(encoder: nn.Module) -> bool:
    """Whether elements can be removed: sums can; a maximum or weights relative to a peak cannot."""
    if isinstance(encoder, setfold.Composition):
        return is_removable(encoder.encoder)
    if isinstance(encoder, setfold.Concat):
        return all(is_removable(part) for part in encoder.encoders.values())
    if isinstance(encoder, setfold.HierarchicalSlotSetEncoder):
        return is_removable(encoder.levels[0])
    if isinstance(encoder, setfold.SlotSetEncoder) and encoder.attention == "softmax":
        return not {"max", "min", "weighted_mean"} & set(names_of(encoder))
    if isinstance(encoder, setfold.PlacedSlotEncoder):
        return not {"max", "min", "variance"} & set(names_of(encoder))
    if isinstance(encoder, setfold.SlotSetEncoder | setfold.Pool):
        return not {"max", "min"} & set(names_of(encoder))
    return False
