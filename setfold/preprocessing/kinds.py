"""The kinds of columns.

NumberColumn      (x - center) / scale, after a logarithm if wanted; a mark where x is missing
VectorColumn      the same for a list of numbers
CategoryColumn    the place of a value in a list of known values; 0 for any other
TimeColumn        days since an origin; then hour and weekday
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor, nn

from setfold.core.arguments import (
    check_flags,
    check_numbers,
    check_positive,
    check_sizes,
    check_text,
)
from setfold.errors import InputError
from setfold.preprocessing.columns import Column, as_numbers, as_text, is_text, is_vector

DAY = 86_400e6  # microseconds
MONDAY = 4  # 1970-01-05 was the first Monday, 4 days after the origin of timestamps
ROUNDING = 1e-6  # of numbers that were float32 in between
MAX_EXACT = 2**24  # whole numbers up to this are exact in float32


class NumberColumn(Column):
    """A number x becomes (x - center) / scale.

    Args:
        name: The name of the column.
        center: A number to subtract.
        scale: A number to divide by.
        log: Whether to take sign(x) log(1 + |x|) first, for counts and amounts of many magnitudes.
        missing: Whether values may be missing. Each value then becomes two numbers: the number, 0
            where it is missing, and 1 where it is missing, else 0.

    >>> column = NumberColumn("amount", center=10.0, scale=2.0, missing=True)
    >>> column.read(pa.array([12.0, None])).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """

    def __init__(
        self,
        name: str,
        center: float = 0.0,
        scale: float = 1.0,
        log: bool = False,
        missing: bool = False,
    ) -> None:
        super().__init__()
        check_text(name=name)
        check_positive(scale=scale)
        check_flags(log=log, missing=missing)
        check_numbers(center=center)
        self.name = name
        self.center = center
        self.scale = scale
        self.log = log
        self.missing = missing
        self.takes_missing = missing
        self.width = self.dim_out = 2 if missing else 1

    def extra_repr(self) -> str:
        how = ", log" if self.log else ""
        return f"{self.name!r}, center={self.center:g}, scale={self.scale:g}{how}"

    def fits(self, kind: pa.DataType) -> bool:
        is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
        other = pa.types.is_boolean(kind) or pa.types.is_decimal(kind) or pa.types.is_null(kind)
        return is_number or other

    def expected(self) -> str:
        return "numbers"

    def read(self, values: pa.Array) -> np.ndarray:
        numbers = as_numbers(values)
        if self.log:
            numbers = np.sign(numbers) * np.log1p(np.abs(numbers))
        numbers = (numbers - self.center) / self.scale
        if not self.missing:
            return numbers[:, None]
        absent = np.isnan(numbers)
        return np.stack([np.where(absent, 0.0, numbers), absent], 1)

    def show(self, numbers: Sequence[float]) -> str:
        if self.missing and numbers[1]:
            return "missing"
        value = numbers[0] * self.scale + self.center
        if abs(value) < ROUNDING * (abs(self.center) + self.scale):
            value = 0.0
        return f"{math.copysign(math.expm1(abs(value)), value) if self.log else value:.4g}"


class VectorColumn(Column):
    """A list of numbers x becomes (x - center) / scale, place by place.

    Args:
        name: The name of the column.
        center: The numbers to subtract.
        scale: The numbers to divide by.

    >>> column = VectorColumn("embedding", center=[1.0, 0.0], scale=[1.0, 2.0])
    >>> column.read(pa.array([[3.0, 4.0]])).tolist()
    [[2.0, 2.0]]
    """

    def __init__(self, name: str, center: Sequence[float], scale: Sequence[float]) -> None:
        super().__init__()
        check_text(name=name)
        lists = isinstance(center, list | tuple) and isinstance(scale, list | tuple)
        if not lists or not center or len(center) != len(scale):
            raise InputError(
                "center and scale must be lists of the same length, at least 1; got "
                f"{center!r:.60} and {scale!r:.60}."
            )
        for number, unit in zip(center, scale, strict=True):
            check_numbers(center=number)
            check_positive(scale=unit)
        self.name = name
        self.center = list(center)
        self.scale = list(scale)
        self.width = self.dim_out = len(self.center)

    def extra_repr(self) -> str:
        return f"{self.name!r}, {self.width} numbers"

    def fits(self, kind: pa.DataType) -> bool:
        return is_vector(kind)

    def expected(self) -> str:
        return f"lists of {self.width} numbers"

    def read(self, values: pa.Array) -> np.ndarray:
        flat = as_numbers(values.flatten())
        lengths = pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False)
        found = np.full((len(values), self.width), np.nan)
        fitting = np.repeat(lengths == self.width, lengths)
        found[lengths == self.width] = flat[fitting].reshape(-1, self.width)
        return (found - self.center) / self.scale

    def show(self, numbers: Sequence[float]) -> str:
        values = zip(numbers, self.scale, self.center, strict=True)
        return " ".join(f"{number * scale + center:.3g}" for number, scale, center in values)


class CategoryColumn(Column):
    """A category becomes its place in a list of known values, and then a learned vector.

    Missing values, and values that are not in the list, share one vector, which begins at zero. If
    the vectors are as wide as there are values, they begin as unit vectors, so that their mean over
    a set is the frequency of each value; else they begin at random.

    Args:
        name: The name of the column.
        values: The known values, as text. Whole numbers are written in decimal.
        dim: The width of the vectors.

    >>> column = CategoryColumn("country", ["DE", "FR"], dim=3)
    >>> column.read(pa.array(["FR", "DE", "IT", None])).tolist()
    [[2.0], [1.0], [0.0], [0.0]]
    >>> column(torch.tensor([[2.0], [0.0]])).shape
    torch.Size([2, 3])
    """

    takes_missing = True

    def __init__(self, name: str, values: Sequence[str], dim: int = 4) -> None:
        super().__init__()
        check_text(name=name)
        check_sizes(dim=dim)
        is_list = isinstance(values, list | tuple)
        if not is_list or not all(isinstance(value, str) for value in values):
            raise InputError(f"values must be a list of text; got {values!r:.60}.")
        if not values or len({*values}) < len(values):
            raise InputError(
                f"values must be at least one, and differ from each other; got {values!r:.60}."
            )
        if len(values) >= MAX_EXACT:
            raise InputError(f"at most {MAX_EXACT - 1} values are supported; got {len(values)}.")
        self.name = name
        self.values = list(values)
        self.dim = self.dim_out = dim
        self.vectors = nn.Embedding(len(self.values) + 1, dim)
        with torch.no_grad():
            self.vectors.weight[0] = 0  # unknown: no information until it is trained
            if dim == len(self.values):
                self.vectors.weight[1:] = torch.eye(dim)
        self._known: pa.Array | None = None

    def extra_repr(self) -> str:
        return f"{self.name!r}, {len(self.values)} values"

    def fits(self, kind: pa.DataType) -> bool:
        return is_text(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)

    def expected(self) -> str:
        return "text or whole numbers"

    def read(self, values: pa.Array) -> np.ndarray:
        if self._known is None:
            self._known = pa.array(self.values, pa.large_string())
        places = pc.index_in(as_text(values), self._known).fill_null(-1)
        return (places.to_numpy(zero_copy_only=False) + 1.0)[:, None]

    def show(self, numbers: Sequence[float]) -> str:
        place = round(numbers[0])
        return self.values[place - 1] if place else "other"

    def forward(self, numbers: Tensor) -> Tensor:
        places = numbers.squeeze(-1).round()
        known = (places > 0) & (places <= len(self.values))
        return self.vectors(torch.where(known, places, 0).long())


class TimeColumn(Column):
    """A time becomes days since an origin, and then the time of day and the weekday.

    A time is two numbers, whole days and the rest of a day: float32 would lose seconds of days that
    are far from the origin. `forward` returns sine and cosine of the time of day and of the day of
    the week. With `age`, the two numbers come first; `setfold.RelativeLayer` replaces the first by
    the age relative to the last event of the set, for which the set must be read twice.

    Args:
        name: The name of the column.
        origin: Microseconds since 1970-01-01.
        age: Whether to keep the days since the origin.

    >>> from datetime import datetime
    >>> column = TimeColumn("at", origin=0)
    >>> column.read(pa.array([datetime(1970, 1, 2, 6)])).tolist()
    [[1.0, 0.25]]
    >>> column(torch.tensor([[1.0, 0.25]])).round(decimals=2)[0, :2].tolist()  # six in the morning
    [1.0, -0.0]
    """

    def __init__(self, name: str, origin: int = 0, age: bool = False) -> None:
        super().__init__()
        check_text(name=name)
        check_flags(age=age)
        if not isinstance(origin, int) or isinstance(origin, bool) or abs(origin) >= 2**63:
            raise InputError(f"origin must be an integer of 64 bits; got {origin!r}.")
        self.name = name
        self.origin = origin
        self.age = age
        self.width = 2
        self.dim_out = 6 if age else 4

    def extra_repr(self) -> str:
        return f"{self.name!r}, age={self.age}"

    def fits(self, kind: pa.DataType) -> bool:
        return pa.types.is_timestamp(kind) or pa.types.is_date(kind)

    def expected(self) -> str:
        return "timestamps or dates"

    def read(self, values: pa.Array) -> np.ndarray:
        micros = values.cast(pa.timestamp("us", getattr(values.type, "tz", None)), safe=False)
        whole = micros.cast(pa.int64())
        since = whole.fill_null(self.origin).to_numpy(zero_copy_only=False) - self.origin
        days, rest = np.divmod(since, DAY)
        found = np.stack([days, rest / DAY], -1)
        found[np.asarray(whole.is_null())] = np.nan
        return found

    def show(self, numbers: Sequence[float]) -> str:
        micros = self.origin + round(round(numbers[0]) * DAY + numbers[1] * DAY)
        return str(np.datetime64(micros, "us").astype("datetime64[s]"))

    def forward(self, numbers: Tensor) -> Tensor:
        days, rest = numbers.unbind(-1)
        shift = self.origin / DAY % 7
        day, week = (rest + shift) % 1, (days % 7 + rest + (shift - MONDAY)) / 7 % 1
        turns = 2 * math.pi * torch.stack([day, week], -1)
        cycles = torch.cat([turns.sin(), turns.cos()], -1)[..., [0, 2, 1, 3]]
        return torch.cat([numbers, cycles], -1) if self.age else cycles
