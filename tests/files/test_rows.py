"""rows_of, compared with a plain loop over the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from setfold.errors import InputError
from setfold.files.columns import ColumnSpec
from setfold.files.features import Feature
from setfold.files.rows import Rows, rows_of
from setfold.native.library import choice

FLOAT = np.dtype(np.float32)
NUMBERS = st.integers(-1000, 1000)
TYPES = st.sampled_from([pa.float32(), pa.float64(), pa.float16(), pa.int16(), pa.int64()])


def rows(batch: pa.RecordBatch, columns: ColumnSpec, **changes: Any) -> Rows:
    settings = {"first": 0, "dtype": FLOAT, "width": None, "partition": {}} | changes
    return rows_of(batch, columns, **settings)


@pytest.mark.parametrize("ids", [[7, 5, 7, None, 5, 9], ["b", "a", "b", None, "a", "c"]])
def test_rows_of_a_set_may_follow_one_another(ids: list[Any]) -> None:
    batch = pa.record_batch({"event": ids, "x": [0.0, 1, 2, 3, 4, 5], "y": [5, 4, 3, 2, 1, 0]})
    columns = ColumnSpec(None, "event")
    plain, found = (rows(batch, columns, first=10, grouped=grouped) for grouped in (False, True))
    assert found.bad == plain.bad
    assert sorted(found.numbers.tolist()) == plain.numbers.tolist() == [10, 11, 12, 14, 15]
    order = np.argsort(found.numbers)
    np.testing.assert_array_equal(found.elements[order], plain.elements)
    assert plain.sets is not None
    assert found.sets is not None
    assert found.sets.take(pa.array(order)).to_pylist() == plain.sets.to_pylist()
    if isinstance(ids[0], int) and choice.kernels is not None:
        assert found.sets.to_pylist() == [7, 7, 5, 5, 9]
        assert found.numbers.tolist() == [10, 12, 11, 14, 15]


class Expected:
    """The elements, set ids, row numbers and bad rows of a batch, from a plain loop."""

    def __init__(self, batch: pa.RecordBatch, columns: ColumnSpec, width: int | None) -> None:
        self.elements: list[list[float]] = []
        self.sets: list[Any] = []
        self.numbers: list[int] = []
        self.bad: list[int] = []
        model = None
        for number, row in enumerate(batch.to_pylist()):
            key = number if columns.set is None else row[columns.set]
            values = [row[feature.name] for feature in columns.features or ()]
            made = None if key is None else self._made(values, columns)
            shapes = {tuple(np.size(v) for v in element) for element in made or []}
            if made is not None and model is None:
                fits = [s for s in shapes if width is None or sum(s) == width]
                model = fits[0] if len(shapes) == 1 and fits else None
            if made is None or (shapes and shapes != {model}):
                self.bad.append(number)
                continue
            self.elements += [np.hstack(element).tolist() for element in made]
            self.sets += [key] * len(made)
            self.numbers += [number] * len(made)

    @staticmethod
    def _made(values: list[Any], columns: ColumnSpec) -> list[list[np.ndarray]] | None:
        changes = [(feature.offset, feature.factor) for feature in columns.features or ()]
        count = 1
        if columns.explode:
            lengths = {len(value) for value in values if isinstance(value, list)}
            if None in values or len(lengths) != 1:
                return None
            count = lengths.pop()
        made = []
        for place in range(count):
            element = []
            for value, (offset, factor) in zip(values, changes, strict=True):
                is_taken = columns.explode and isinstance(value, list)
                part = value[place] if is_taken else value
                if part is None or (isinstance(part, list) and None in part):
                    return None
                element.append(np.float32((np.float64(part) - offset) * factor))
            made.append(element)
        return made


def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), values, values, values, values)


def plain(length: int) -> st.SearchStrategy[pa.Array]:
    values = st.lists(maybe(NUMBERS), min_size=length, max_size=length)
    return st.builds(lambda v, kind: pa.array(v, pa.float64()).cast(kind), values, TYPES)


def fixed(length: int) -> st.SearchStrategy[pa.Array]:
    row = maybe(st.lists(maybe(NUMBERS), min_size=2, max_size=2))
    rows = st.lists(row, min_size=length, max_size=length)
    return st.builds(lambda v: pa.array(v, pa.list_(pa.float32(), 2)), rows)


def loose(length: int) -> st.SearchStrategy[pa.Array]:
    row = maybe(st.one_of(*(st.lists(maybe(NUMBERS), min_size=n, max_size=n) for n in (2, 2, 1))))
    rows = st.lists(row, min_size=length, max_size=length)
    kinds = st.sampled_from([pa.list_(pa.float32()), pa.large_list(pa.int32())])
    return st.builds(pa.array, rows, kinds)


def nested(length: int) -> st.SearchStrategy[pa.Array]:
    inner = maybe(st.lists(maybe(NUMBERS), min_size=3, max_size=3))
    row = maybe(st.lists(inner, min_size=0, max_size=2))
    rows = st.lists(row, min_size=length, max_size=length)
    kinds = st.sampled_from([pa.list_(pa.list_(pa.float32(), 3)), pa.list_(pa.list_(pa.int64()))])
    return st.builds(pa.array, rows, kinds)


@st.composite
def batches(draw: st.DrawFn, explode: bool) -> tuple[pa.RecordBatch, ColumnSpec]:
    """Draw a slice of a batch with columns of all kinds, factors, and optional set ids."""
    length = draw(st.integers(1, 12))
    kinds = [plain, loose, nested] if explode else [plain, fixed, loose]
    first = draw(st.sampled_from([loose, nested] if explode else kinds))
    makers = [first, *draw(st.lists(st.sampled_from(kinds), max_size=2))]
    arrays = {f"c{i}": draw(maker(length)) for i, maker in enumerate(makers)}
    factors = [draw(st.sampled_from([1.0, 0.01, -3.0])) for _ in makers]
    offsets = [draw(st.sampled_from([0.0, 500.0, -0.1])) for _ in makers]
    features = tuple(map(Feature, arrays, factors, offsets))
    name = draw(st.sampled_from([None, "id"]))
    ids = st.lists(maybe(st.integers(0, 3)), min_size=length, max_size=length)
    arrays["id"] = pa.array(draw(ids), pa.int32()).dictionary_encode()
    start = draw(st.integers(0, length - 1))
    return pa.record_batch(arrays).slice(start), ColumnSpec(features, name, explode)


def check(batch: pa.RecordBatch, columns: ColumnSpec, width: int | None) -> None:
    expected = Expected(batch, columns, width)
    found = rows(batch, columns, width=width, first=100)
    assert found.elements.dtype == FLOAT
    assert found.elements.flags.c_contiguous
    assert found.elements.tolist() == expected.elements
    assert (found.numbers - 100).tolist() == expected.numbers
    assert [bad.row - 100 for bad in found.bad] == expected.bad
    assert found.read == batch.num_rows
    if columns.set is not None:
        assert found.sets.type == pa.int64()
        assert found.sets.to_pylist() == expected.sets
    elif columns.explode:
        assert found.sets.to_pylist() == [100 + number for number in expected.sets]
    else:
        assert found.sets is None


@given(batches(explode=False))
def test_rows_are_elements(given: tuple[pa.RecordBatch, ColumnSpec]) -> None:
    check(*given, None)


@given(batches(explode=True))
def test_rows_are_sets(given: tuple[pa.RecordBatch, ColumnSpec]) -> None:
    check(*given, None)


@given(loose(8), st.sampled_from([1, 2]))
def test_lists_of_a_given_width(array: pa.Array, width: int) -> None:
    check(pa.record_batch({"c": array}), ColumnSpec((Feature("c"),), None), width)


def test_reasons() -> None:
    values = {
        "id": [None, 1, 2, 3, 4],
        "x": [1.0, None, 3.0, 4.0, 5.0],
        "p": [[1, 2], [1, 2], [1, None], [1], [5, 6]],
    }
    batch = pa.record_batch(values)
    found = rows(batch, ColumnSpec(None, "id"), width=3, first=10)
    assert [tuple(bad) for bad in found.bad] == [
        (10, "column 'id' is null"),
        (11, "column 'x' is null"),
        (12, "column 'p' has a null in its list"),
        (13, "the row has 2 numbers; expected 3"),
    ]
    assert found.elements.tolist() == [[5, 5, 6]]
    lists = pa.record_batch({"x": [[1], [1, 2]], "y": [[1], [1]]})
    found = rows(lists, ColumnSpec(None, None, explode=True))
    assert [tuple(b) for b in found.bad] == [
        (1, "the lists of columns 'x' and 'y' differ in length")
    ]


def test_blocks_without_a_copy() -> None:
    block = np.arange(12, dtype=np.float32).reshape(4, 3)
    array = pa.FixedSizeListArray.from_arrays(pa.array(block.reshape(-1)), 3)
    found = rows(pa.record_batch({"p": array}).slice(1, 2), ColumnSpec(None, None), width=3)
    assert np.shares_memory(found.elements, block)
    assert found.elements.tolist() == block[1:3].tolist()


def test_many_rows() -> None:
    """More rows than are copied at a time."""
    columns = {f"c{i}": np.random.default_rng(i).standard_normal(20_000) for i in range(3)}
    found = rows(pa.record_batch(columns), ColumnSpec(None, None), width=3)
    assert np.array_equal(found.elements, np.stack(list(columns.values()), 1).astype(np.float32))


@pytest.mark.parametrize(
    ("ids", "kind", "expected"),
    [
        (["a", "b"], pa.string(), pa.large_string()),
        (["a", "b"], pa.string_view(), pa.large_string()),
        (["a", "b"], pa.dictionary(pa.int8(), pa.string()), pa.large_string()),
        ([b"a", b"b"], pa.binary(), pa.large_binary()),
        ([b"a", b"b"], pa.binary_view(), pa.large_binary()),
        ([b"a", b"b"], pa.binary(1), pa.large_binary()),
        ([1, 2], pa.uint8(), pa.int64()),
        ([1, 1 << 63], pa.uint64(), pa.uint64()),
        ([True, False], pa.bool_(), pa.bool_()),
    ],
)
def test_ids_are_made_alike(ids: list[Any], kind: pa.DataType, expected: pa.DataType) -> None:
    batch = pa.record_batch({"id": pa.array(ids, kind), "x": [1.0, 2.0]})
    columns = ColumnSpec(None if kind != pa.bool_() else (Feature("x"),), "id")
    assert columns.set_type(batch.schema, {}) == expected
    found = rows(batch, columns)
    assert found.sets.type == expected
    assert found.sets.to_pylist() == ids


@pytest.mark.parametrize("value", ["2024", "007", "a b"])
def test_ids_from_folders_are_text(value: str) -> None:
    batch = pa.record_batch({"x": [1.0, None, 3.0]})
    columns = ColumnSpec(None, "year")
    found = rows(batch, columns, partition={"year": value})
    assert found.sets.to_pylist() == [value, value]
    assert found.sets.type == columns.set_type(batch.schema, {"year": value}) == pa.large_string()


def test_needed() -> None:
    schema = pa.schema(
        [
            ("id", pa.int64()),
            ("x", pa.float32()),
            ("name", pa.string()),
            ("p", pa.list_(pa.int8(), 4)),
        ]
    )
    path = Path("events.parquet")
    assert ColumnSpec(None, "id").needed(schema, {}, path) == ["x", "p", "id"]
    assert ColumnSpec(None, "id").width(schema) == 5
    assert ColumnSpec(None, "year").needed(schema, {"year": "1"}, path) == ["id", "x", "p"]
    assert ColumnSpec((Feature("p"),), None, explode=True).width(schema) == 1
    assert ColumnSpec(None, "id").width(pa.schema([("p", pa.list_(pa.int8()))])) is None


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (ColumnSpec((Feature("id"),), "ids"), "has no column 'ids'. Did you mean 'id'?"),
        (ColumnSpec((Feature("intensty"),), None), "Did you mean 'intensity'?"),
        (ColumnSpec((Feature("q"),), None), "It has 'id', 'intensity', 'name', 'twice', 'twice'"),
        (ColumnSpec((Feature("name"),), None), "is string; a feature must be a number"),
        (ColumnSpec((Feature("twice"),), None), "has several columns 'twice'"),
        (ColumnSpec((Feature("intensity"),), None, explode=True), "has no lists to explode"),
        (
            ColumnSpec((Feature("id"),), "intensity"),
            "'intensity' is float; expected integers or text",
        ),
    ],
)
def test_wrong_columns(columns: ColumnSpec, message: str) -> None:
    names = {"id": pa.int64(), "intensity": pa.float32(), "name": pa.string()}
    schema = pa.schema([*names.items(), ("twice", pa.int8()), ("twice", pa.int8())])
    with pytest.raises(InputError, match="events") as caught:
        columns.needed(schema, {}, Path("events.parquet"))
    assert message in str(caught.value)


def test_wrong_width() -> None:
    schema = pa.schema([("x", pa.float32()), ("y", pa.float32())])
    with pytest.raises(
        InputError, match=r"a\.npy has elements of 2 numbers \('x', 'y'\).*expects 3"
    ):
        ColumnSpec(None, None).check_width(schema, 3, Path("a.npy"))
    with pytest.raises(InputError, match="elements have 2 numbers"):
        rows(pa.record_batch({"x": [1.0], "y": [2.0]}), ColumnSpec(None, None), width=3)
