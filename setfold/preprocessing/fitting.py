"""Find the constants of columns in one pass over the rows of a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from setfold.errors import InputError
from setfold.preprocessing.columns import (
    Column,
    Columns,
    as_numbers,
    as_text,
    decoded,
    is_text,
    is_vector,
)
from setfold.preprocessing.kinds import CategoryColumn, NumberColumn, TimeColumn, VectorColumn

SAMPLE = 1 << 16  # rows from which quantiles are estimated
MAX_DISTINCT = 1 << 20  # values of a category that are counted
MAX_VALUES = 10_000  # values of a category that get a vector of their own
MAX_DIM = 16
NORMAL_IQR = 1.349  # the interquartile range of a standard normal distribution
LARGE_COUNT = 100  # counts that exceed this, and vary by more than their mean, are many magnitudes


@dataclass(frozen=True)
class Fitted:
    """The result of a fit.

    Args:
        columns: The columns, in the order of the table.
        left_out: The names of columns that carry no information, and why.
    """

    columns: Columns
    left_out: dict[str, str]


class ColumnFitter:
    """Collects what the constants of some columns follow from.

    Args:
        kinds: The type of each column.
        robust: Whether to center by the median and to scale by the interquartile range.
        categories: Columns of whole numbers that are categories.
        log: Columns of numbers to take the logarithm of.
        age: Whether times are kept, to become ages.
        seed: Of the vectors of categories, and of the sample from which quantiles are estimated.

    >>> fitter = ColumnFitter({"x": pa.float64(), "kind": pa.string()})
    >>> fitter.add({"x": pa.array([0.0, 2.0] * 4), "kind": pa.array(["a", "b"] * 4)})
    >>> fitter.finish().columns
    Columns(
      (columns): ModuleList(
        (0): NumberColumn('x', center=1, scale=1)
        (1): CategoryColumn(
          'kind', 2 values
          (vectors): Embedding(3, 2)
        )
      )
    )
    """

    def __init__(
        self,
        kinds: Mapping[str, pa.DataType],
        *,
        robust: bool = False,
        categories: Iterable[str] = (),
        log: Iterable[str] = (),
        age: bool = False,
        seed: int = 0,
    ) -> None:
        forced, logs = {*categories}, {*log}
        for name in sorted(forced | logs):
            if name not in kinds:
                raise InputError(f"there is no column {name!r} among the features {[*kinds]}.")
        self._fits = {
            name: _fit_of(name, kind, robust, name in forced, name in logs, age, seed)
            for name, kind in kinds.items()
        }

    def add(self, table: Mapping[str, pa.Array]) -> None:
        """Take some more rows."""
        for name, fit in self._fits.items():
            fit.add(decoded(table[name]))

    def see_missing(self, table: Mapping[str, pa.Array]) -> None:
        """Note in which columns values are missing, also in rows that are not fitted."""
        for name, fit in self._fits.items():
            if isinstance(fit, _NumberFit) and not fit.missing:
                fit.missing = int(np.isnan(as_numbers(decoded(table[name]))).any())

    def finish(self) -> Fitted:
        """Return the columns.

        Raises:
            InputError: No column carries information.
        """
        found, left_out = list[Column](), dict[str, str]()
        for name, fit in self._fits.items():
            column = fit.finish()
            if isinstance(column, Column):
                found.append(column)
            else:
                left_out[name] = column
        if not found:
            raise InputError(
                "no column can be used as a feature: "
                + ", ".join(f"{name} ({why})" for name, why in left_out.items())
            )
        return Fitted(Columns(found), left_out)


def can_be_fitted(kind: pa.DataType) -> bool:
    """Whether a column of this type can be a feature."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    is_number = NumberColumn("x").fits(kind) and not pa.types.is_null(kind)
    return is_number or is_text(kind) or is_vector(kind) or TimeColumn("x").fits(kind)


class _Moments:
    """Mean and variance of columns `(n, d)`, ignoring NaN; joined without cancellation."""

    def __init__(self) -> None:
        self.count: np.ndarray | float = 0.0
        self.mean: np.ndarray | float = 0.0
        self.squares: np.ndarray | float = 0.0

    def add(self, numbers: np.ndarray) -> None:
        present = ~np.isnan(numbers)
        count = present.sum(0).astype(float)
        some = np.maximum(count, 1)
        mean = np.where(present, numbers, 0).sum(0) / some
        squares = np.where(present, (numbers - mean) ** 2, 0).sum(0)
        total = self.count + count
        share = count / np.maximum(total, 1)
        distance = mean - self.mean
        self.squares = self.squares + squares + distance**2 * self.count * share
        self.mean = self.mean + distance * share
        self.count = total

    @property
    def deviation(self) -> np.ndarray:
        return np.sqrt(np.asarray(self.squares) / np.maximum(self.count, 1))


class _Sample:
    """A uniform sample of rows `(n, d)`: those with the smallest random keys."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.keys = np.empty(0)
        self.rows: np.ndarray | None = None

    def add(self, rows: np.ndarray) -> None:
        keys = self.random.random(len(rows))
        if self.rows is not None:
            rows, keys = np.concatenate([self.rows, rows]), np.concatenate([self.keys, keys])
        if len(rows) > SAMPLE:
            kept = np.sort(np.argpartition(keys, SAMPLE)[:SAMPLE])
            rows, keys = rows[kept], keys[kept]
        self.rows, self.keys = rows, keys

    def quantiles(self) -> np.ndarray:
        """The quartiles (3, d), ignoring NaN."""
        assert self.rows is not None
        return np.nanquantile(self.rows, [0.25, 0.5, 0.75], axis=0)


class _NumberFit:
    def __init__(self, name: str, robust: bool, log: bool, whole: bool, seed: int) -> None:
        self.name, self.robust, self.log, self.whole = name, robust, log, whole
        self.plain, self.logs = _Moments(), _Moments()
        self.sample = _Sample(seed)
        self.least, self.largest, self.missing = np.inf, -np.inf, 0

    def add(self, values: pa.Array) -> None:
        numbers = as_numbers(values)
        finite = np.where(np.isfinite(numbers), numbers, np.nan)  # infinity is a bad row later
        self.missing += int(np.isnan(numbers).sum())
        if not np.isnan(finite).all():
            self.least = min(self.least, float(np.nanmin(finite)))
            self.largest = max(self.largest, float(np.nanmax(finite)))
        logs = np.sign(finite) * np.log1p(np.abs(finite))
        self.plain.add(finite[:, None])
        self.logs.add(logs[:, None])
        if self.robust:
            self.sample.add(np.stack([finite, logs], 1))

    def finish(self) -> Column | str:
        if not np.any(self.plain.count):
            return "all values are missing"
        if self.least == self.largest:
            return "all values are equal"
        log = self.log or (
            self.whole
            and self.least >= 0
            and self.largest > LARGE_COUNT
            and float(self.plain.deviation[0]) > float(np.asarray(self.plain.mean)[0])
        )
        moments = self.logs if log else self.plain
        center, scale = float(np.asarray(moments.mean)[0]), float(moments.deviation[0])
        if self.robust:
            low, median, high = self.sample.quantiles()[:, int(log)].tolist()
            center, scale = median, (high - low) / NORMAL_IQR or scale
        return NumberColumn(self.name, center, scale or 1.0, log, self.missing > 0)


class _VectorFit:
    def __init__(self, name: str, robust: bool, seed: int) -> None:
        self.name, self.robust = name, robust
        self.moments, self.sample = _Moments(), _Sample(seed)
        self.width: int | None = None

    def add(self, values: pa.Array) -> None:
        lengths = pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False)
        if self.width is None and lengths.any():
            self.width = int(lengths[lengths > 0][0])
        fitting = lengths == (self.width or -1)  # others are bad rows later
        flat = as_numbers(values.flatten())[np.repeat(fitting, lengths)]
        if len(flat):
            rows = flat.reshape(-1, self.width or 1)
            rows = np.where(np.isfinite(rows), rows, np.nan)
            self.moments.add(rows)
            if self.robust:
                self.sample.add(rows)

    def finish(self) -> Column | str:
        if self.width is None or not np.any(self.moments.count):
            return "all lists are empty"
        center, scale = np.asarray(self.moments.mean), self.moments.deviation
        if self.robust:
            low, center, high = self.sample.quantiles()
            scale = np.where(high > low, (high - low) / NORMAL_IQR, scale)
        scale = np.where(scale > 0, scale, 1.0)
        return VectorColumn(self.name, center.tolist(), scale.tolist())


class _CategoryFit:
    def __init__(self, name: str, seed: int) -> None:
        self.name, self.seed = name, seed
        self.counts: Counter[str] = Counter()
        self.rows = 0

    def add(self, values: pa.Array) -> None:
        self.rows += len(values)
        if len(self.counts) > MAX_DISTINCT:
            return
        for entry in as_text(values).drop_null().value_counts():
            self.counts[entry["values"].as_py()] += entry["counts"].as_py()

    def finish(self) -> Column | str:
        if len(self.counts) < 2:
            return "all values are equal"
        repeated = {value: times for value, times in self.counts.items() if times > 1}
        if len(self.counts) > MAX_DISTINCT or len(repeated) < 2:
            return "nearly every value occurs once"
        known = sorted(repeated, key=lambda value: (-repeated[value], value))[:MAX_VALUES]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return CategoryColumn(self.name, sorted(known), min(MAX_DIM, len(known)))


class _TimeFit:
    def __init__(self, name: str, age: bool) -> None:
        self.name, self.age = name, age
        self.latest: int | None = None

    def add(self, values: pa.Array) -> None:
        micros = values.cast(pa.timestamp("us", getattr(values.type, "tz", None)), safe=False)
        latest = pc.max(micros.cast(pa.int64())).as_py()
        if latest is not None:
            self.latest = latest if self.latest is None else max(self.latest, latest)

    def finish(self) -> Column | str:
        if self.latest is None:
            return "all values are missing"
        return TimeColumn(self.name, self.latest, self.age)


_Fit = _NumberFit | _VectorFit | _CategoryFit | _TimeFit


def _fit_of(
    name: str, kind: pa.DataType, robust: bool, category: bool, log: bool, age: bool, seed: int
) -> _Fit:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if log and (category or not NumberColumn(name).fits(kind)):
        what = "a category" if category else str(kind)
        raise InputError(f"column {name!r} is {what}, so it has no logarithm. Omit it from --log.")
    if category or is_text(kind):
        if not CategoryColumn(name, ["a"]).fits(kind):
            raise InputError(f"column {name!r} is {kind}; a category must be text or an integer.")
        return _CategoryFit(name, seed)
    if TimeColumn(name).fits(kind):
        return _TimeFit(name, age)
    if is_vector(kind):
        return _VectorFit(name, robust, seed)
    if not can_be_fitted(kind):
        raise InputError(f"column {name!r} is {kind}, which cannot be a feature. Leave it out.")
    return _NumberFit(name, robust, log, pa.types.is_integer(kind), seed)
