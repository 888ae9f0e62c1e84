"""Kernels for columns of tables, compared with NumPy and Arrow."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest

from setfold.native.dispatch import Room
from setfold.native.library import available, using
from setfold.native.tables import KINDS, add_at, can_stack, encode_ids, group_ids, stack_columns


@pytest.fixture(params=available())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that runs here."""
    with using(request.param):
        yield request.param


def _column(dtype: np.dtype, rows: int, seed: int) -> np.ndarray:
    """Random numbers of a dtype, also large ones, with an offset in memory."""
    draw = np.random.default_rng(seed)
    if dtype.kind == "f":
        return draw.standard_normal(rows + 3).astype(dtype)[3:]
    limits = np.iinfo(dtype)
    return draw.integers(limits.min, limits.max, rows + 3, dtype, endpoint=True)[3:]


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 16, 19])
@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 255, 256, 257, 1000])
def test_columns_become_rows(isa: str, rows: int, width: int) -> None:
    kinds = [*KINDS]
    columns = [_column(kinds[(3 * i) % len(kinds)], rows, i) for i in range(width)]
    expected = np.empty((rows, width), np.float32)
    for place, column in enumerate(columns):
        expected[:, place] = column
    assert can_stack(columns)
    np.testing.assert_array_equal(stack_columns(columns, Room()), expected)
    places = np.random.default_rng(0).permutation(rows)
    found = stack_columns(columns, Room(), places)
    np.testing.assert_array_equal(found[places], expected)


def test_doubles_that_are_too_large_become_infinite(isa: str) -> None:
    found = stack_columns([np.array([1e300, -1e300, np.nan])], Room())
    np.testing.assert_array_equal(found[:, 0], [np.inf, -np.inf, np.nan])


def test_other_columns_are_left_to_numpy() -> None:
    plain = np.zeros(6, np.float32)
    for other in (plain.astype(np.float16), plain[::2], plain.reshape(2, 3), plain > 0):
        assert not can_stack([other])
    assert not can_stack([])
    with using(None):
        assert not can_stack([plain])


def test_memory_is_used_again_only_when_nothing_refers_to_it() -> None:
    room, shape = Room(), (5, 16)
    first = room.empty(shape, np.float32)
    view, place = first[1:], first.ctypes.data
    del first
    assert room.empty(shape, np.float32).ctypes.data != place, "a view still refers to it"
    del view
    places = {room.empty(shape, np.float32).ctypes.data for _ in range(3)}
    assert len(places) == 1
    assert all(at % 64 == 0 for at in places)
    assert pickle.loads(pickle.dumps(room))._arrays == []


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
@pytest.mark.parametrize("kinds", [1, 50, 3000, 100_000])
def test_ids_become_codes(isa: str, kinds: int, dtype: type) -> None:
    draw = np.random.default_rng(kinds)
    limits = np.iinfo(dtype)
    names = draw.integers(limits.min, limits.max, kinds, dtype, endpoint=True)
    names[: kinds // 2] = np.arange(kinds // 2) << 40  # regular ids, too
    ids = names[draw.integers(0, kinds, 20_000)]
    expected = pa.array(ids).dictionary_encode()
    found = encode_ids(ids)
    assert found is not None
    np.testing.assert_array_equal(found[0], expected.dictionary.to_numpy())
    np.testing.assert_array_equal(found[1], expected.indices.to_numpy())


def test_each_thread_has_memory_of_its_own() -> None:
    room = Room()
    kept = room.empty((5,), np.float64)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(room.empty, (5,), np.float64).result()
    assert not np.shares_memory(kept, other)
    assert len(room._arrays) == 1


@pytest.mark.parametrize("kinds", [1, 50, 3000])
def test_rows_of_an_id_follow_one_another(isa: str, kinds: int) -> None:
    ids = np.random.default_rng(kinds).integers(0, kinds, 20_000) << 33
    found, codes = group_ids(ids), pa.array(ids).dictionary_encode()
    assert found is not None
    names, index, places = found
    np.testing.assert_array_equal(names, codes.dictionary.to_numpy())
    order = np.argsort(codes.indices.to_numpy(), kind="stable")
    np.testing.assert_array_equal(index, codes.indices.to_numpy()[order])
    np.testing.assert_array_equal(places[order], np.arange(len(ids)))
    assert [len(part) for part in group_ids(ids[:0]) or ()] == [0, 0, 0]
    with using(None):
        assert group_ids(ids) is None


def test_no_ids(isa: str) -> None:
    found = encode_ids(np.empty(0, np.int64))
    assert found is not None
    assert [len(part) for part in found] == [0, 0]
    assert encode_ids(np.zeros(3, np.int32)) is None


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (16, 17)])
def test_rows_are_added_at_their_places(isa: str, shape: tuple[int, ...]) -> None:
    draw = np.random.default_rng(0)
    total, part = draw.standard_normal((9, *shape)), draw.standard_normal((4, *shape))
    places = np.array([8, 0, 3, 3])
    expected = total.copy()
    for place, row in zip(places, part, strict=True):
        expected[place] += row
    assert add_at(total, places, part)
    np.testing.assert_array_equal(total, expected)


def test_other_rows_are_not_added() -> None:
    total, places = np.zeros((3, 2)), np.array([0])
    assert not add_at(total, places, np.ones((1, 3)))
    assert not add_at(total, places, np.ones((1, 2), np.float32))
    assert not add_at(total, places.astype(np.int32), np.ones((1, 2)))
    with using(None):
        assert not add_at(total, places, np.ones((1, 2)))
    assert not total.any()
