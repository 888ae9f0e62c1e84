"""encode_sets: the same encodings for every memory limit, file layout and output format."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

import setfold
from setfold.files import run
from tests.files.files import assert_encodes, encode, encoder, rows, write


@pytest.mark.parametrize(
    "names", [int, lambda i: f"user {i} é", lambda i: bytes([i]), lambda i: i > 9]
)
@pytest.mark.parametrize("is_tight", [False, True])
def test_encodings_are_those_of_plain_loops(tmp_path, request, names, is_tight):
    if is_tight:
        request.getfixturevalue("tight")
    table, model = rows(names=names), encoder()
    folder = write(tmp_path / "a folder with spaces, ü", table)
    summary = encode(model, folder, tmp_path / "out.parquet")
    assert_encodes(tmp_path / "out.parquet", model, table)
    assert (summary.elements, summary.skipped, summary.report) == (600, 0, None)
    assert summary.sets == len(set(table["event"].to_pylist()))
    assert (summary.spills > 0) == (is_tight and summary.sets > 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder.name, "out.parquet"]


@pytest.mark.parametrize("aggregate", ["sum", "max", ["weighted_mean", "mass", "min"]])
def test_every_aggregate(tmp_path, tight, aggregate):
    table, model = rows(300), encoder(aggregate=aggregate, slots="learned")
    encode(model, write(tmp_path / "in", table), tmp_path / "out.parquet")
    assert_encodes(tmp_path / "out.parquet", model, table)


def test_a_model_with_features_and_a_head(tmp_path, tight):
    model = setfold.Composition(
        encoder=setfold.SlotSetEncoder(8, 4, 6, 5),
        features=torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU()),
        head=torch.nn.Flatten(),
    )
    table = rows(300, 9)
    encode(model, write(tmp_path / "in", table), tmp_path / "out.parquet")
    found = pq.read_table(tmp_path / "out.parquet")
    elements = torch.tensor(np.stack([table[f"f{i}"].to_numpy() for i in range(3)], 1))
    for name, encoding in zip(found["set"].to_pylist(), found["encoding"].to_pylist(), strict=True):
        own = elements[torch.tensor([n == name for n in table["event"].to_pylist()])]
        torch.testing.assert_close(torch.tensor(encoding), model(own.unsqueeze(0))[0])


def test_one_set_per_file(tmp_path):
    table, model = rows(), encoder()
    folder = write(tmp_path / "in", table, files=3)
    encode(model, folder, tmp_path / "out.parquet", set=None, features="f0,f1,f2")
    names = np.repeat([str(folder / f"part-{i}.parquet") for i in range(3)], 200)
    wanted = table.set_column(0, "event", pa.array(names))
    assert_encodes(tmp_path / "out.parquet", model, wanted)


def test_a_model_of_three_numbers_takes_a_position(tmp_path):
    table, model = rows(), encoder()
    scan = table.rename_columns(["intensity", "y", "x", "z"]).select(["x", "y", "z", "intensity"])
    folder = write(tmp_path / "in", scan, files=1)
    encode(model, folder, tmp_path / "out.parquet", set=None)
    wanted = pa.table({f"f{i}": scan[name] for i, name in enumerate("xyz")})
    names = pa.array([str(folder / "part-0.parquet")] * len(table))
    assert_encodes(tmp_path / "out.parquet", model, wanted.add_column(0, "event", names))


def test_features_are_chosen_ordered_and_scaled(tmp_path):
    table, model = rows(300), encoder()
    folder = write(tmp_path / "in", table)
    encode(model, folder, tmp_path / "out.parquet", features=["f2", "f0*0.5", "f1*-1"])
    wanted = pa.table(
        {
            "event": table["event"],
            "f0": table["f2"],
            "f1": pa.array(table["f0"].to_numpy() * np.float32(0.5)),
            "f2": pa.array(-table["f1"].to_numpy()),
        }
    )
    assert_encodes(tmp_path / "out.parquet", model, wanted)


def test_buckets_that_are_split_again(tmp_path, tight, monkeypatch):
    table, model, runs = rows(1200, 500), encoder(), []
    original = run.merge_sorted_runs

    def merge_sorted_runs(parts):
        runs.append(len(parts))
        return original(parts)

    monkeypatch.setattr(run, "merge_sorted_runs", merge_sorted_runs)
    encode(model, write(tmp_path / "in", table), tmp_path / "out.parquet")
    assert_encodes(tmp_path / "out.parquet", model, table)
    assert len(runs) > 1  # buckets that were split again, and all buckets at the end
    assert runs[-1] == 4


def test_files_may_have_their_columns_in_another_order(tmp_path):
    table, model = rows(), encoder()
    folder = write(tmp_path / "in", table[:300], files=1, name="a{}.parquet")
    other = table[300:].select(["f2", "event", "f0", "f1"])
    write(folder, other, files=1, name="b{}.parquet")
    encode(model, folder, tmp_path / "out.parquet")
    assert_encodes(tmp_path / "out.parquet", model, table)
    write(folder, other.rename_columns(["f2", "event", "f0", "g"]), files=1, name="c{}.parquet")
    with pytest.raises(setfold.InputError, match=r"c0\.parquet has no column 'f1'"):
        encode(model, folder, tmp_path / "out.parquet")


def test_rows_without_elements_are_sets(tmp_path):
    lists = {f"f{i}": pa.array([[], [0.5], []], pa.list_(pa.float32())) for i in range(3)}
    pq.write_table(pa.table({"event": [5, 6, 7], **lists}), tmp_path / "in.parquet")
    for name, column, names in (("event", "set", [5, 6, 7]), (None, "row", [0, 1, 2])):
        options = {"explode": True, "set": name, "features": "f0,f1,f2"}
        out = tmp_path / f"{name}.parquet"
        encode(encoder(), tmp_path / "in.parquet", out, **options)
        found = pq.read_table(out)
        assert found[column].to_pylist() == names
        assert found["count"].to_pylist() == [0, 1, 0]
        assert [any(encoding) for encoding in found["encoding"].to_pylist()] == [False, True, False]


def test_rows_that_are_whole_sets(tmp_path):
    model, sizes = encoder(), [4, 1, 7]
    table = rows(12).set_column(0, "event", pa.array(np.repeat([5, 6, 7], sizes)))
    starts = pa.array(np.append(0, np.cumsum(sizes)).astype(np.int32))
    lists = {
        f"f{i}": pa.ListArray.from_arrays(starts, table[f"f{i}"].combine_chunks()) for i in range(3)
    }
    pq.write_table(pa.table({"event": [5, 6, 7], **lists}), tmp_path / "in.parquet")
    encode(model, tmp_path / "in.parquet", tmp_path / "out.parquet", explode=True)
    assert_encodes(tmp_path / "out.parquet", model, table)
    options = {"explode": True, "set": None, "features": "f0,f1,f2"}
    encode(model, tmp_path / "in.parquet", tmp_path / "rows.parquet", **options)
    found = pq.read_table(tmp_path / "rows.parquet")
    assert found["file"].to_pylist() == [f"{tmp_path}/in.parquet"] * 3
    assert found["row"].to_pylist() == [0, 1, 2]


@pytest.mark.parametrize("names", [int, str])
def test_formats_of_the_output_agree(tmp_path, names):
    folder, model = write(tmp_path / "in", rows(200, names=names)), encoder()
    for suffix in ("parquet", "arrow", "npz"):
        encode(model, folder, tmp_path / f"out.{suffix}")
    wanted = pq.read_table(tmp_path / "out.parquet")
    with pa.OSFile(str(tmp_path / "out.arrow")) as file:
        assert pa.ipc.open_file(file).read_all().equals(wanted)
    with np.load(tmp_path / "out.npz") as arrays:
        assert arrays["set"].tolist() == wanted["set"].to_pylist()
        assert arrays["count"].tolist() == wanted["count"].to_pylist()
        assert arrays["encoding"].shape == (len(wanted), 4, 5)
        assert (arrays["encoding"].reshape(len(wanted), -1) == wanted["encoding"].to_pylist()).all()


def test_files_without_rows_give_an_output_without_sets(tmp_path):
    folder = write(tmp_path / "in", rows()[:0], files=2)
    summary = encode(encoder(), folder, tmp_path / "out.parquet", states=tmp_path / "states.arrow")
    found = pq.read_table(tmp_path / "out.parquet")
    assert (len(found), found.column_names) == (0, ["set", "count", "encoding"])
    assert summary.sets == 0
    assert setfold.readout_states(tmp_path / "states.arrow", tmp_path / "again.npz").sets == 0
    with np.load(tmp_path / "again.npz") as arrays:
        shapes = {name: (array.dtype.kind, array.shape) for name, array in arrays.items()}
    assert shapes == {"set": ("i", (0,)), "count": ("i", (0,)), "encoding": ("f", (0, 4, 5))}


@pytest.mark.parametrize(
    "kind",
    [
        pa.uint64(),
        pa.date32(),
        pa.timestamp("ns", "UTC"),
        pa.duration("us"),
        pa.time64("ns"),
        pa.decimal128(30, 2),
        pa.dictionary(pa.int8(), pa.string()),
        pa.binary(3),
    ],
    ids=str,
)
def test_names_of_many_types(tmp_path, tight, kind):
    table, model = rows(), encoder()
    numbers = table["event"].combine_chunks()
    if pa.types.is_fixed_size_binary(kind):
        names = pa.array([b"%03d" % i for i in numbers.to_pylist()], kind)
    elif pa.types.is_dictionary(kind):
        names = numbers.cast(pa.string()).dictionary_encode().cast(kind)
    elif pa.types.is_date32(kind):
        names = numbers.cast(pa.int32()).cast(kind)
    else:
        names = numbers.cast(kind)
    folder = write(tmp_path / "in", table.set_column(0, "event", names))
    summary = encode(model, folder, tmp_path / "out.parquet")
    encode(model, write(tmp_path / "plain", table), tmp_path / "plain.parquet")
    found, plain = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("out", "plain"))
    assert summary.spills > 0
    assert sorted(found["count"].to_pylist()) == sorted(plain["count"].to_pylist())
    assert pc.array_sort_indices(found["set"].combine_chunks()).to_pylist() == list(
        range(len(found))
    )
    if not pa.types.is_dictionary(kind):  # text has another order than numbers
        encodings = (np.array(each["encoding"].to_pylist()) for each in (found, plain))
        np.testing.assert_allclose(*encodings, rtol=1e-4, atol=1e-6)  # spilled at other rows
