"""State files that are damaged, or that somebody made: the right states or a FileError."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load, save

import setfold
from setfold.files import sealed
from setfold.files.sealed import SealedWriter
from setfold.files.states import Provenance, model_to_bytes, read_provenance, read_states
from setfold.files.tables.table import StateTable
from tests.files.files import assert_encodes, encode, encoder, rows, write

HEADER, FRAME = b"setfold", b"setfold.frame"
COLUMNS = b'{"features": [["x", 1.0]], "set": "event", "explode": false, "root": null}'
DEEP = b"[" * 100_000 + b"]" * 100_000


def make(names=("a", "b", "c"), **options):
    """A table of states as Arrow: the fields sum and max, and slots."""
    torch.manual_seed(0)
    model = setfold.SlotSetEncoder(3, 2, 2, 2, aggregate=["mean", "max"], **options).eval()
    table = StateTable.of(model, pa.array(names, pa.large_string()), torch.randn(len(names), 3))
    entries = Provenance(model_to_bytes(model), {"/in": [1, 2]}).metadata()
    arrow = table.to_arrow()
    entries[b"setfold.result"] = b"0" * 32
    return arrow.replace_schema_metadata(arrow.schema.metadata | entries)


def store(path, *tables, rows=None, options=None):
    """Write tables as a state file whose seal matches its content."""
    file = SealedWriter(path)
    with pa.ipc.new_file(file, tables[0].schema, options=options) as writer:
        for table in tables:
            writer.write_table(table)
    file.seal(sum(map(len, tables)) if rows is None else rows)
    return path


def seal_of(path):
    with sealed.SealedFile(path) as file:
        return file.seal


def read(path):
    """All that is in a state file."""
    set_type, sets, provenance = read_provenance(path)
    tables = list(read_states(path))
    assert sum(map(len, tables)) == sets
    return set_type, provenance, tables


def with_metadata(table, **changes):
    """The table with other entries in its metadata; None removes one."""
    entries = dict(table.schema.metadata)
    for name, value in changes.items():
        entries[name.replace("__", ".").encode()] = value
    return table.replace_schema_metadata({k: v for k, v in entries.items() if v is not None})


def with_header(table, **changes):
    header = json.loads(table.schema.metadata[HEADER])
    header |= changes
    return with_metadata(table, setfold=json.dumps({k: v for k, v in header.items() if v != ...}))


def with_column(table, name, values, kind=None):
    place = table.schema.get_field_index(name)
    return table.set_column(place, name, pa.array(values, kind))


def with_value(table, name, value):
    """The table with another first number in a column of lists."""
    values = [list(each) for each in table[name].to_pylist()]
    values[0][0] = value
    return with_column(table, name, values, table.schema.field(name).type)


def with_slots(table, **changes):
    tensors = load(table.schema.metadata[FRAME]) | changes
    return with_metadata(table, setfold__frame=save({k: v for k, v in tensors.items() if v != ...}))


# ---- damage ------------------------------------------------------------------------------------


def test_a_flipped_bit_anywhere_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(sealed, "CHUNK", 1 << 10)
    path = store(tmp_path / "s.arrow", make())
    content, data = path.read_bytes(), seal_of(path).data
    read(path)
    for place in (*range(0, data, 61), *range(data, len(content), 7)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(setfold.FileError):
            read(path)


def test_other_damage_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(sealed, "CHUNK", 512)
    path = store(tmp_path / "s.arrow", make())
    content = path.read_bytes()
    assert len(content) > 10 * 512
    damaged = [content[:length] for length in range(0, len(content), 97)]
    damaged += [content + bytes(1), bytes(8) + content, content[8:], content + content]
    for one, other in ((0, 1), (2, 5), (4, 7)):  # chunks of a file are not interchangeable
        blocks = [content[start : start + 512] for start in range(0, len(content), 512)]
        blocks[one], blocks[other] = blocks[other], blocks[one]
        damaged += [b"".join(blocks), b"".join(blocks[:one] + blocks[other:])]
    damaged += [content[:start] + bytes(64) + content[start + 64 :] for start in (600, 3000)]
    for changed in damaged:
        path.write_bytes(changed)
        with pytest.raises(setfold.FileError):
            read(path)


def test_damage_in_the_middle_is_noticed_before_arrow_parses_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sealed, "CHUNK", 1 << 12)
    names = [[f"{half}{number:03}" for number in range(200)] for half in "ab"]
    path = store(tmp_path / "s.arrow", *map(make, names))
    content = bytearray(path.read_bytes())
    place = seal_of(path).data - 100
    content[place] ^= 1
    path.write_bytes(content)
    assert read_provenance(path)[1] == 400  # what it needs is intact
    states = read_states(path)
    assert len(next(states)) == 200
    first = place // 4096 * 4096
    with pytest.raises(setfold.FileError, match=rf"bytes {first:,} to {place + 100:,} have"):
        next(states)


def test_a_run_that_meets_damage_writes_nothing(tmp_path):
    folder, states = write(tmp_path / "in", rows()), tmp_path / "states.arrow"
    encode(encoder(), folder, tmp_path / "out.parquet", states=states)
    setfold.readout_states(states, tmp_path / "again.parquet")
    assert_encodes(tmp_path / "again.parquet", encoder(), rows())
    content = bytearray(states.read_bytes())
    content[len(content) // 2] ^= 4
    states.write_bytes(content)
    (tmp_path / "again.parquet").unlink()
    for run in (
        lambda: setfold.readout_states(states, tmp_path / "again.parquet"),
        lambda: setfold.merge_states([states], tmp_path / "again.arrow"),
    ):
        with pytest.raises(setfold.FileError, match="corrupt"):
            run()
    assert states.read_bytes() == content
    assert not list(tmp_path.glob("again.*"))


def test_a_sealed_file_is_an_ordinary_arrow_file(tmp_path):
    table = make()
    path = store(tmp_path / "s.arrow", table)
    assert pa.ipc.open_file(str(path)).read_all().equals(table, check_metadata=True)
    with path.open("rb") as file:
        file.seek(8)
        assert pa.ipc.open_stream(file).read_all().equals(table)
    polars = pytest.importorskip("polars")
    assert polars.read_ipc(path, use_pyarrow=False)["set"].to_list() == ["a", "b", "c"]


def test_a_file_without_a_seal_is_refused(tmp_path):
    table = make()
    with pa.ipc.new_file(str(tmp_path / "s.arrow"), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(setfold.FileError, match="has no seal"):
        read(tmp_path / "s.arrow")


@pytest.mark.parametrize("chunk", [1 << 6, 100, 1 << 20])
def test_what_is_read_is_what_was_written(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(sealed, "CHUNK", chunk)
    path, generator = store(tmp_path / "s.arrow", make()), np.random.default_rng(0)
    content = path.read_bytes()
    with sealed.SealedFile(path) as file:
        assert file.read() == content
        for _ in range(200):
            start, size = generator.integers(0, len(content) + 9, 2).tolist()
            assert file.seek(start) == start
            assert file.read(size) == content[start : start + size]
            assert file.tell() == max(start, min(start + size, len(content)))


# ---- files with a seal that matches, made by somebody else ---------------------------------------


def test_what_setfold_writes_is_accepted(tmp_path):
    table = with_metadata(make(), setfold__columns=COLUMNS)
    set_type, provenance, tables = read(store(tmp_path / "s.arrow", table[:2], table[2:]))
    assert set_type == pa.large_string()
    assert provenance.inputs == {"/in": [1, 2]}
    assert provenance.columns.features[0] == ("x", 1.0, 0.0)
    assert [name for each in tables for name in each.sets.to_pylist()] == ["a", "b", "c"]
    infinite = with_value(make(), "max.0", -np.inf)  # as in an empty set
    assert len(read(store(tmp_path / "s.arrow", infinite))[2]) == 1
    assert read(store(tmp_path / "s.arrow", make()[:0]))[2] == []


FIELDS = {"sum": ["Sum", [2, 4]], "max": ["Max", [2, 2]]}
TAMPERED = {
    "set is null": lambda t: with_column(t, "set", ["a", None, "c"], pa.large_string()),
    "set twice": lambda t: with_column(t, "set", ["a", "a", "c"], pa.large_string()),
    "not sorted": lambda t: with_column(t, "set", ["b", "a", "c"], pa.large_string()),
    "set is a float": lambda t: with_column(t, "set", [1.0, 2.0, 3.0]),
    "set is a list": lambda t: with_column(t, "set", [["a"], ["b"], ["c"]]),
    "set is a dictionary": lambda t: with_column(
        t, "set", pa.array(["a", "b", "c"]).dictionary_encode()
    ),
    "negative count": lambda t: with_column(t, "count", [1, -1, 1]),
    "count is null": lambda t: with_column(t, "count", [1, None, 1], pa.int64()),
    "count is a float": lambda t: with_column(t, "count", [1.0, 1.5, 1.0]),
    "count is unsigned": lambda t: with_column(t, "count", [1, 1, 1], pa.uint64()),
    "counts overflow": lambda t: with_column(t, "count", [1 << 62, 1 << 62, 1]),
    "column missing": lambda t: t.drop_columns("max.0"),
    "count missing": lambda t: t.drop_columns("count"),
    "set missing": lambda t: t.drop_columns("set"),
    "one column more": lambda t: t.append_column("more", pa.array([1, 2, 3])),
    "column twice": lambda t: t.append_column("count", pa.array([1, 2, 3])),
    "other order": lambda t: t.select(["set", "max.0", "sum.0", "count"]),
    "no columns": lambda t: t.select([]),
    "other width": lambda t: with_column(t, "max.0", [[0.0] * 3] * 3, pa.list_(pa.float64(), 3)),
    "other type": lambda t: with_column(t, "max.0", [[1] * 4] * 3, pa.list_(pa.int64(), 4)),
    "half precision": lambda t: with_column(
        t, "max.0", [[np.float16(0)] * 4] * 3, pa.list_(pa.float16(), 4)
    ),
    "no lists": lambda t: with_column(t, "max.0", [1.0, 2.0, 3.0]),
    "lists of any length": lambda t: with_column(t, "max.0", [[0.0] * 4] * 3),
    "list is null": lambda t: with_column(
        t, "max.0", [[0.0] * 4, None, [0.0] * 4], pa.list_(pa.float64(), 4)
    ),
    "number is null": lambda t: with_value(t, "sum.0", None),
    "NaN": lambda t: with_value(t, "sum.0", np.nan),
    "infinite sum": lambda t: with_value(t, "sum.0", np.inf),
    "infinite maximum": lambda t: with_value(t, "max.0", np.inf),
    "NaN slots": lambda t: with_slots(t, **{"slots.0": torch.full((1, 2, 2), torch.nan)}),
    "own slots": lambda t: with_slots(t, **{"slots.0": torch.zeros(3, 2, 2)}),
    "flat slots": lambda t: with_slots(t, **{"slots.0": torch.zeros(1, 2)}),
    "integer slots": lambda t: with_slots(t, **{"slots.0": torch.zeros(1, 2, 2).int()}),
    "slots with a gap": lambda t: with_slots(t, **{"slots.2": torch.zeros(1, 2, 2)}),
    "slots as statistics": lambda t: with_slots(t, **{"sum.0": torch.zeros(1, 2, 2)}),
    "slots as count": lambda t: with_slots(t, count=torch.ones(1, dtype=torch.long)),
    "no frame": lambda t: with_metadata(t, setfold__frame=None),
    "damaged frame": lambda t: with_metadata(t, setfold__frame=b"\xff" * 20),
    "no header": lambda t: with_metadata(t, setfold=None),
    "header is no object": lambda t: with_metadata(t, setfold=b"[]"),
    "header is no text": lambda t: with_metadata(t, setfold=b"\xff\xfe"),
    "deep header": lambda t: with_metadata(t, setfold=DEEP),
    "other version": lambda t: with_header(t, version=99),
    "version is true": lambda t: with_header(t, version=True),
    "version is text": lambda t: with_header(t, version="3"),
    "version is a float": lambda t: with_header(t, version=3.0),
    "no version": lambda t: with_header(t, version=...),
    "other kind": lambda t: with_header(t, kind="rows"),
    "kind is a list": lambda t: with_header(t, kind=["states"]),
    "no fields": lambda t: with_header(t, fields=...),
    "fields are a list": lambda t: with_header(t, fields=[]),
    "a field is text": lambda t: with_header(t, fields={**FIELDS, "max": "Max"}),
    "a field is too long": lambda t: with_header(t, fields={**FIELDS, "max": ["Max", [2, 2], 1]}),
    "unknown statistic": lambda t: with_header(t, fields={**FIELDS, "max": ["Median", [2, 2]]}),
    "abstract statistic": lambda t: with_header(t, fields={**FIELDS, "max": ["Reduction", [4]]}),
    "statistic is a list": lambda t: with_header(t, fields={**FIELDS, "max": [["Max"], [4]]}),
    "shape is a number": lambda t: with_header(t, fields={**FIELDS, "max": ["Max", 4]}),
    "shape is true": lambda t: with_header(t, fields={**FIELDS, "max": ["Max", [True, 4]]}),
    "shape is negative": lambda t: with_header(t, fields={**FIELDS, "max": ["Max", [-2, -2]]}),
    "huge shape": lambda t: with_header(t, fields={**FIELDS, "max": ["Max", [2**40, 2**40]]}),
    "reserved name": lambda t: with_header(t, fields={"slots": ["Sum", [2, 4]]}),
    "no digest": lambda t: with_header(t, digest=...),
    "digest is a number": lambda t: with_header(t, digest=7),
    "short digest": lambda t: with_header(t, digest="00"),
    "one entry more": lambda t: with_metadata(t, more=b"1"),
    "no result": lambda t: with_metadata(t, setfold__result=None),
    "result is no digest": lambda t: with_metadata(t, setfold__result=b"0" * 31 + b"g"),
    "no inputs": lambda t: with_metadata(t, setfold__inputs=None),
    "inputs are a list": lambda t: with_metadata(t, setfold__inputs=b"[]"),
    "stamps are text": lambda t: with_metadata(t, setfold__inputs=b'{"/in": ["1", "2"]}'),
    "stamp is too short": lambda t: with_metadata(t, setfold__inputs=b'{"/in": [1]}'),
    "deep inputs": lambda t: with_metadata(t, setfold__inputs=DEEP),
    "unknown dtype": lambda t: with_metadata(t, setfold__dtype=b"float7"),
    "dtype is no text": lambda t: with_metadata(t, setfold__dtype=b"\xff"),
    "no columns entry": lambda t: with_metadata(t, setfold__columns=None),
    "columns are a list": lambda t: with_metadata(t, setfold__columns=b"[1]"),
    "columns are empty": lambda t: with_metadata(t, setfold__columns=b"{}"),
    "explode is a number": lambda t: with_metadata(t, setfold__columns=COLUMNS.replace(b"false", b"3")),
    "root is a number": lambda t: with_metadata(t, setfold__columns=COLUMNS.replace(b"null", b"3")),
    "set is a number": lambda t: with_metadata(t, setfold__columns=COLUMNS.replace(b'"event"', b"3")),
    "factor is text": lambda t: with_metadata(t, setfold__columns=COLUMNS.replace(b"1.0", b'"x"')),
    "factor is NaN": lambda t: with_metadata(t, setfold__columns=COLUMNS.replace(b"1.0", b"NaN")),
    "feature is a number": lambda t: with_metadata(t, setfold__columns=COLUMNS.replace(b'"x"', b"3")),
}  # fmt: skip


@pytest.mark.parametrize("name", TAMPERED)
def test_a_file_that_setfold_would_not_write_is_refused(tmp_path, name):
    path = store(tmp_path / "s.arrow", TAMPERED[name](make()))
    with pytest.raises(setfold.FileError):
        read(path)
    with pytest.raises(setfold.FileError):
        setfold.verify(path)


def test_sets_must_be_sorted_across_batches(tmp_path):
    one, other = make(), make(["c", "d"])
    for tables in ((one, other), (other, one)):
        with pytest.raises(setfold.FileError, match="not sorted"):
            read(store(tmp_path / "s.arrow", *tables))


def test_counts_must_not_overflow_across_batches(tmp_path):
    tables = [with_column(make([name]), "count", [1 << 62]) for name in "ab"]
    assert len(read(store(tmp_path / "s.arrow", *tables[:1]))[2]) == 1
    with pytest.raises(setfold.FileError, match="sum of the counts"):
        read(store(tmp_path / "s.arrow", *tables))


def test_counts_must_not_overflow_when_files_are_merged(tmp_path):
    tables = [with_column(make(["a"]), "count", [1 << 62]) for _ in range(2)]
    paths = [store(tmp_path / f"{number}.arrow", each) for number, each in enumerate(tables)]
    with pytest.raises(setfold.StateMismatchError, match=r"2\*\*63 elements"):
        setfold.merge_states(paths, tmp_path / "both.arrow", again=True)


@pytest.mark.parametrize("rows", [0, 2, 4, (1 << 64) - 1])
def test_the_number_of_rows_must_be_right(tmp_path, rows):
    path = store(tmp_path / "s.arrow", make(), rows=rows)
    with pytest.raises(setfold.FileError, match="expected"):
        read_provenance(path) if rows == 0 else list(read_states(path))


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_compressed_data_is_not_decompressed(tmp_path, compression):
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pytest.raises(setfold.FileError, match="compressed"):
        read(store(tmp_path / "s.arrow", make(), options=options))


def test_extension_types_are_not_parsed(tmp_path):
    table = make()
    metadata = {"ARROW:extension:name": "arrow.fixed_shape_tensor"}
    metadata["ARROW:extension:metadata"] = b"[" * 300_000
    field = pa.field("sum.0", table.schema.field("sum.0").type, metadata=metadata)
    schema = table.schema.set(table.schema.get_field_index("sum.0"), field)
    columns = [table[name].combine_chunks() for name in table.column_names]
    path = store(tmp_path / "s.arrow", pa.Table.from_arrays(columns, schema=schema))
    with pytest.raises(setfold.FileError, match="a column has an extension type"):
        read(path)


def test_wrong_offsets_are_noticed(tmp_path):
    table = make(["a", "b"])
    offsets = pa.py_buffer(np.array([0, 1 << 40, 2], np.int64))
    ids = pa.Array.from_buffers(pa.large_string(), 2, [None, offsets, pa.py_buffer(b"ab")])
    path = store(tmp_path / "s.arrow", table)
    content = path.read_bytes()
    good = np.array([0, 1, 2], np.int64).tobytes()
    assert content.count(good) == 1
    data, seal = content.replace(good, ids.buffers()[1].to_pybytes()), seal_of(path)
    chunks = sealed.digest(data[: seal.data])
    footer = data[seal.data + seal.size :]
    path.write_bytes(data[: seal.data] + seal.pack(chunks) + footer)
    with pytest.raises(setfold.FileError, match="corrupt"):
        read(path)


def test_a_damaged_model_inside_is_noticed(tmp_path):
    table = make()
    content = bytearray(table.schema.metadata[b"setfold.model"])
    content[-3] ^= 1
    path = store(tmp_path / "s.arrow", with_metadata(table, setfold__model=bytes(content)))
    read(path)  # does not need it
    for function in (
        lambda: setfold.readout_states(path, tmp_path / "o.npz"),
        lambda: setfold.verify(path),
    ):
        with pytest.raises(setfold.FileError, match="checksum"):
            function()


def test_slots_of_another_size_do_not_reach_the_model(tmp_path):
    for slots in (torch.zeros(1, 2, 9), torch.zeros(1, 2, 2).double()):
        path = store(tmp_path / "s.arrow", with_slots(make(), **{"slots.0": slots}))
        with pytest.raises(setfold.StateMismatchError):
            setfold.readout_states(path, tmp_path / "o.npz")


def test_a_parquet_file_is_not_a_state_file(tmp_path):
    encode(encoder(), write(tmp_path / "in", rows()), tmp_path / "out.parquet")
    with pytest.raises(setfold.FileError, match="not an Arrow file"):
        setfold.readout_states(tmp_path / "out.parquet", tmp_path / "again.parquet")
