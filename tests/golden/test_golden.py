"""Files that earlier versions of setfold wrote are read, and give the same encodings."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import setfold
from setfold.files.journal import read_journal
from setfold.files.states import read_provenance
from setfold.files.tables.sorted_runs import merge_sorted_runs, read_sorted_run
from setfold.files.tables.store import Store
from tests.golden.write import FOLDER, OUTPUTS

FOLDERS = sorted(path for path in FOLDER.iterdir() if (path / "expected.json").exists())


@pytest.fixture(params=FOLDERS, ids=lambda path: path.name)
def folder(request, tmp_path):
    """A copy, which a test may change."""
    return shutil.copytree(request.param, tmp_path / "golden")


def expected(folder):
    """Set ids, counts and encodings."""
    found = json.loads((folder / "expected.json").read_text())
    counts, encodings = zip(*found.values(), strict=True)
    return list(found), list(counts), np.array(encodings)


def assert_expected(folder, sets, counts, encodings):
    names, wanted_counts, wanted = expected(folder)
    assert (list(sets), list(counts)) == (names, wanted_counts)
    assert_close(np.reshape(encodings, wanted.shape), wanted)


def assert_close(found, wanted):
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-5, atol=1e-6)


def test_there_are_some():
    assert FOLDERS


def test_every_file_is_intact(folder):
    names = ["model.safetensors", "state.safetensors", "states.arrow", *OUTPUTS]
    for name in [*names, "reading.parquet.work", "merging.parquet.work"]:
        assert setfold.verify(folder / name)


def test_a_model(folder):
    table = pq.read_table(folder / "rows.parquet")
    rows = torch.tensor(np.stack([table["x"], table["y"]], 1))
    codes = table["user"].combine_chunks().dictionary_encode()
    index = torch.tensor(codes.indices.to_numpy()).long()
    found = setfold.load(folder / "model.safetensors")(
        rows, index=index, batch_size=len(codes.dictionary)
    )
    names, _, wanted = expected(folder)
    order = [codes.dictionary.to_pylist().index(name) for name in names]
    assert_close(found.detach()[order], wanted)


def test_a_state(folder):
    model = setfold.load(folder / "model.safetensors")
    state = setfold.SetState.load(folder / "state.safetensors")
    _, counts, wanted = expected(folder)
    assert state.count.tolist() == counts[:1]
    assert_close(model.readout(state).detach(), wanted[:1])


def test_a_state_file(folder):
    setfold.readout_states(folder / "states.arrow", folder / "again.arrow")
    table = pa.ipc.open_file(str(folder / "again.arrow")).read_all().to_pydict()
    assert_expected(folder, *table.values())
    _, sets, provenance = read_provenance(folder / "states.arrow")
    assert (sets, provenance.dtype) == (len(table["set"]), "float32")
    size = (folder / "rows.parquet").stat().st_size
    assert [stamp[0] for stamp in provenance.inputs.values()] == [size]
    assert (provenance.columns.named, provenance.columns.set) == (["x", "y"], "user")


def test_a_state_file_of_touched_slots(folder):
    states = folder / "places.arrow"
    assert setfold.verify(states)
    setfold.readout_states(states, folder / "again.arrow")
    table = pa.ipc.open_file(str(folder / "again.arrow")).read_all()
    wanted = json.loads((folder / "places.json").read_text())
    assert table["set"].to_pylist() == [*wanted]
    for found, slots in zip(table["encoding"].to_pylist(), wanted.values(), strict=True):
        encoding = np.zeros((2000, 3))
        for slot, values in slots.items():
            encoding[int(slot)] = values
        found = np.reshape(found, encoding.shape)
        np.testing.assert_allclose(found, encoding, atol=1e-3)  # of float32, in 2000 cells


@pytest.mark.parametrize("name", OUTPUTS)
def test_encodings(folder, name):
    path = folder / name
    if name.endswith(".npz"):
        found = dict(np.load(path))
        assert_expected(folder, found["set"], found["count"], found["encoding"])
        return
    is_parquet = name.endswith(".parquet")
    table = pq.read_table(path) if is_parquet else pa.ipc.open_file(str(path)).read_all()
    assert table.column_names == ["set", "count", "encoding"]
    assert_expected(folder, *table.to_pydict().values())


def open_run(folder, phase):
    """The work folder of an interrupted run, its journal, and a store for what it has spilled."""
    work = folder / f"{phase}.parquet.work"
    model = setfold.load(folder / "model.safetensors")
    return work, read_journal(work), Store(model, work / "spill", budget=1 << 20)


@torch.no_grad()
def test_a_run_that_was_interrupted_while_it_read(folder):
    work, journal, store = open_run(folder, "reading")
    assert (journal.request["command"], journal.buckets) == ("encode", None)
    store.restore(work / journal.snapshot, journal.lengths)
    rows = pq.read_table(folder / "rows.parquet")["user"].to_pylist()
    seen = rows[: journal.elements]
    counts = {}
    for table in store.drain():
        counts |= dict(zip(table.sets.to_pylist(), table.state.count.tolist(), strict=True))
    assert counts == {name: seen.count(name) for name in set(seen)}


@torch.no_grad()
def test_a_run_that_was_interrupted_while_it_merged(folder):
    work, journal, store = open_run(folder, "merging")
    runs = [read_sorted_run(work / "runs" / name) for name in journal.sorted_runs]
    for bucket in journal.buckets:
        tables = store.drain_bucket(bucket, journal.lengths)
        runs.append(iter([table.to_arrow() for table in tables]))
    assert len(runs) > 1
    sets, counts, encodings = [], [], []
    for table in merge_sorted_runs(runs):
        sets += table.sets.to_pylist()
        counts += table.state.count.tolist()
        encodings += store.encoder.readout(table.state).tolist()
    assert_expected(folder, sets, counts, encodings)
