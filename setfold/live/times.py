"""Durations such as "7d", and the buckets of time in which the elements of a set are kept."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from setfold.errors import InputError

SECOND = 1_000_000  # times are counted in microseconds since 1970
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
SCALES = {"D": UNITS["d"] * SECOND, "s": SECOND, "ms": 1000, "us": 1}
MAX_TIME = 2**62
ONLY_BUCKET = 0  # of stores without buckets


def parse_duration(text: str) -> int:
    """Return a duration in microseconds.

    Raises:
        InputError: It is not a number and a unit.

    >>> parse_duration("90s") == parse_duration("1.5m") == 90 * SECOND
    True
    """
    match = (
        re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", text.strip())
        if isinstance(text, str)
        else None
    )
    microseconds = round(float(match[1]) * UNITS[match[2]] * SECOND) if match else 0
    if not 0 < microseconds < MAX_TIME:
        raise InputError(
            f"expected a duration such as '90s', '15m', '12h', '7d' or '4w'; got {text!r:.60}."
        )
    return microseconds


def format_duration(microseconds: int) -> str:
    """Return a duration as text.

    >>> format_duration(parse_duration("36h")), format_duration(parse_duration("2w"))
    ('36h', '14d')
    """
    for unit in "dhms":
        if microseconds % (UNITS[unit] * SECOND) == 0:
            return f"{microseconds // (UNITS[unit] * SECOND)}{unit}"
    return f"{microseconds / SECOND:g}s"


def now() -> int:
    """Return the time of the clock."""
    return time.time_ns() // 1000


def bucket_of(microseconds: int, size: int) -> int:
    """Return the number of the bucket that holds a time.

    >>> bucket_of(-1, 10), bucket_of(0, 10), bucket_of(10, 10)
    (-1, 0, 1)
    """
    return microseconds // size


def first_bucket(last: int, size: int, at: int) -> int:
    """Return the first of the buckets that cover the last `last` microseconds.

    Whole buckets are read: the one that holds the time `at`, and those before it.

    Args:
        last: A multiple of the size.
        size: The size of a bucket.
        at: The time.

    Raises:
        InputError: `last` is not a multiple of the size.
    """
    if last % size:
        raise InputError(
            f"the store has buckets of {format_duration(size)}, so `last` must be a multiple of "
            f"that; got {format_duration(last)}."
        )
    return bucket_of(at, size) - last // size + 1


def buckets_of(times: pa.Array, size: int, name: str, first: int) -> pa.Array:
    """Return the bucket of each row, (N,) int64.

    Args:
        times: Timestamps, dates, text such as "2026-07-01T12:00:00Z", or numbers: seconds since
            1970. What has no time zone is in UTC.
        size: The size of a bucket.
        name: The name of the column, for messages.
        first: The number of the first row, for messages.

    Raises:
        InputError: A time is missing, or the column holds something else.

    >>> buckets_of(pa.array([59, 61.5]), parse_duration("1m"), "at", 0).to_pylist()
    [0, 1]
    """
    counted, usable = _microseconds(times, name)
    if not usable.all():
        row = int(np.argmin(usable))
        what = "is not a time" if times[row].is_valid else "is missing"
        raise InputError(f"row {first + row} (counting from 0): the time {name!r} {what}.")
    return pa.array(counted // size)


def usable_times(times: pa.Array, name: str) -> np.ndarray:
    """Return which rows have a time, (N,); the arguments are those of `buckets_of`.

    >>> usable_times(pa.array([59, float("nan"), None]), "at").tolist()
    [True, False, False]
    """
    return _microseconds(times, name)[1]


def _microseconds(times: pa.Array, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return times as microseconds since 1970, (N,) int64, and which of them are times, (N,)."""
    kind = times.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == pa.string_view():
        times = _parsed(times.cast(pa.large_string()))
        kind = times.type
    usable = times.is_valid().to_numpy(zero_copy_only=False)
    if pa.types.is_null(kind):
        return np.zeros(len(times), np.int64), usable
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        # Whole microseconds, rounded down; the time zone does not change the instant.
        plain = times.cast(pa.int32()) if kind == pa.date32() else times
        counted = pc.fill_null(plain.cast(pa.int64()), 0).to_numpy()
        unit = "D" if kind == pa.date32() else getattr(kind, "unit", "ms")
        if unit == "ns":
            return counted // 1000, usable
        scale = SCALES[unit]
        in_range = np.abs(counted.astype(np.float64)) < MAX_TIME / scale
        return np.where(in_range, counted, 0) * scale, usable & in_range
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise InputError(
            f"the time column {name!r} is {kind}; expected timestamps, dates, or numbers of seconds "
            "since 1970. Convert it."
        )
    numbers = pc.fill_null(times, 0).to_numpy()
    usable = usable & (np.abs(numbers.astype(np.float64)) < MAX_TIME / SECOND)  # False for NaN, too
    numbers = np.where(usable, numbers, 0)
    if pa.types.is_integer(kind):
        return numbers.astype(np.int64) * SECOND, usable
    return np.floor(numbers.astype(np.float64) * SECOND).astype(np.int64), usable


def _parsed(texts: pa.Array) -> pa.Array:
    """Return the times that texts describe; null for other texts."""
    for kind in (pa.timestamp("us"), pa.timestamp("us", "UTC")):  # without and with time zones
        try:
            return texts.cast(kind)
        except pa.ArrowInvalid:
            continue
    return pa.array([_parse(text) for text in texts.to_pylist()], pa.timestamp("us", "UTC"))


def _parse(text: str | None) -> datetime | None:
    try:
        found = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
