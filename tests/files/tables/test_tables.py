"""Tables of states and the store, compared with a dictionary of states and plain loops."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch.testing import assert_close

import setfold
from setfold.files.tables.absorb import absorbed
from setfold.files.tables.sorted_runs import (
    merge_sorted_runs,
    read_sorted_run,
    write_sorted_run,
)
from setfold.files.tables.spill import (
    BUCKETS,
    append,
    bucket_of,
    read_tables,
    split_by_bucket,
    truncate,
)
from setfold.files.tables.store import Store
from setfold.files.tables.table import (
    RowTable,
    StateTable,
    from_arrow,
    merged,
    read_out,
)
from setfold.native.library import available, using
from tests.small import TIGHT, draw, make

ENCODERS = [
    make(aggregate="mean"),
    make(aggregate=["weighted_mean", "max"]),
    make(aggregate="min", slots="learned"),
    setfold.AttentionPool(3, 2, dim_out=6).double().eval(),
    setfold.Moments(3).double().eval(),
]


def rows(names, seed=0):
    return pa.array(names), draw(len(names), 3, seed=seed)


def by_hand(encoder, batches):
    """Return the encoding of each set, computed from all its elements at once."""
    found = {}
    for sets, elements in batches:
        for name, element in zip(sets.to_pylist(), elements, strict=True):
            found.setdefault(name, []).append(element)
    return {name: encoder(torch.stack(each).unsqueeze(0)) for name, each in found.items()}


def assert_by_hand(encoder, tables, batches):
    expected = by_hand(encoder, batches)
    names = [name for table in tables for name in table.sets.to_pylist()]
    assert len(names) == len(set(names))
    assert set(names) == set(expected)
    for table in tables:
        assert table.sets.to_pylist() == sorted(table.sets.to_pylist())
        found = encoder.readout(table.state)
        for number, name in enumerate(table.sets.to_pylist()):
            assert_close(found[number : number + 1], expected[name], **TIGHT)


@pytest.mark.parametrize("encoder", ENCODERS, ids=lambda e: type(e).__name__)
@given(data=st.data())
def test_a_store_holds_what_its_sets_are_made_of(encoder, data, tmp_path_factory):
    names = st.lists(st.integers(0, 30), min_size=1, max_size=12)
    lists = data.draw(st.lists(names, min_size=1, max_size=8))
    batches = [rows(batch, seed) for seed, batch in enumerate(lists)]
    budget = data.draw(st.sampled_from([1, 8, 40, 10_000])) * 4 * encoder.state_nbytes
    store = Store(encoder, tmp_path_factory.mktemp("store"), budget)
    with torch.no_grad():
        for sets, elements in batches:
            store.add(absorbed(encoder, sets, elements))
        tables = list(store.drain())
    assert_by_hand(encoder, tables, batches)
    assert not store.files()


def test_small_sets_are_kept_as_rows_and_large_ones_as_states():
    encoder = make()
    many, few = pa.array(range(50)), pa.array([1] * 50)
    assert isinstance(absorbed(encoder, many, draw(50, 3)), RowTable)
    assert isinstance(absorbed(encoder, few, draw(50, 3)), StateTable)
    large = absorbed(encoder, pa.array(list(range(50)) * 40), draw(2000, 3))
    assert isinstance(large, StateTable)
    assert large.nbytes <= draw(2000, 3).nbytes + large.sets.nbytes


def test_rows_that_are_kept_are_finite():
    elements = draw(50, 3)
    elements[7, 1] = torch.nan
    with pytest.raises(setfold.NonFiniteError):
        absorbed(make(), pa.array(range(50)), elements)


def test_merging_is_the_same_however_many_at_a_time():
    encoder = make(aggregate=["mean", "max"])
    tables = [StateTable.of(encoder, *rows([1, 2, 3, number], number)) for number in range(6)]
    at_once = merged(tables)
    in_turn = tables[0]
    for table in tables[1:]:
        in_turn = merged([in_turn, table])
    assert at_once.sets.equals(in_turn.sets)
    for one, other in zip(
        at_once.state.tensors().values(), in_turn.state.tensors().values(), strict=True
    ):
        assert torch.equal(one, other)


def test_tables_of_other_models_are_refused():
    one, other = (StateTable.of(make(seed), *rows([1, 2])) for seed in (0, 1))
    with pytest.raises(setfold.StateMismatchError, match="weights"):
        merged([one, other])


@pytest.mark.parametrize("encoder", ENCODERS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("names", [[3, 1, 2], ["b", "ä", ""], [b"\x00", b"a", b""]])
def test_arrow_and_back(encoder, names):
    table = StateTable.of(encoder, *rows(names))
    again = from_arrow(table.to_arrow())
    assert again.sets.equals(table.sets)
    assert encoder.readout(again.state).equal(encoder.readout(table.state))
    assert again.nbytes == table.nbytes
    rest = from_arrow(table.to_arrow().slice(1))
    assert encoder.readout(rest.state).equal(encoder.readout(table.state[1:]))


def test_rows_to_arrow_and_back():
    table = RowTable(*rows(["a", "b"]))
    again = from_arrow(table.to_arrow())
    assert again.sets.equals(table.sets)
    assert again.elements.equal(table.elements)


def test_a_table_that_names_sets_several_times():
    encoder = make()
    batches = [rows([1, 2, 1], 0), rows([2, 3], 1), rows([1], 2)]
    arrow = pa.concat_tables([StateTable.of(encoder, *b).to_arrow() for b in batches])
    parts = StateTable.all_from_arrow(arrow)
    assert [part.sets.to_pylist() for part in parts] == [[1, 2, 3], [2, 1]]
    assert_by_hand(encoder, [merged(parts).sorted()], batches)


def test_foreign_tables_are_refused():
    with pytest.raises(setfold.FileError, match="not written by setfold"):
        from_arrow(pa.table({"set": [1]}))


@pytest.mark.parametrize(
    "frame",
    [
        {"slots.0": torch.zeros(2, 4, 6).double()},
        {"slots.0": torch.zeros(1, 4, 6), "count": torch.tensor([7, 7])},
        {"slots.0": torch.zeros(1, 4, 6), "sum.0": torch.zeros(2, 4, 4).double()},
    ],
)
def test_what_all_sets_share_is_slots_and_nothing_else(frame):
    table = StateTable.of(make(), *rows([1, 2])).to_arrow()
    metadata = table.schema.metadata | {b"setfold.frame": save(frame)}
    with pytest.raises(setfold.FileError, match="which all sets share"):
        from_arrow(table.replace_schema_metadata(metadata))


def test_encodings_come_with_set_and_count():
    encoder = make()
    table = StateTable.of(encoder, *rows(["b", "a", "b"]))
    (found,) = read_out(encoder, table)
    assert found["set"].to_pylist() == ["b", "a"]
    assert found["count"].to_pylist() == [2, 1]
    assert np.allclose(
        found["encoding"].to_pylist(), encoder.readout(table.state).detach().flatten(1)
    )


# ---- buckets and files -------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0, 1, 4])
@pytest.mark.parametrize(
    "sets", [pa.array(range(20_000)), pa.array([f"user {i}" for i in range(20_000)])]
)
def test_buckets_are_of_about_one_size_and_independent_of_company(sets, level):
    buckets = bucket_of(sets, level)
    sizes = np.bincount(buckets, minlength=BUCKETS)
    assert len(sizes) == BUCKETS
    assert sizes.min() > 0.5 * sizes.mean()
    assert sizes.max() < 1.5 * sizes.mean()
    assert (bucket_of(sets[777:], level) == buckets[777:]).all()


def test_each_level_splits_a_bucket_again():
    sets = pa.array(range(20_000))
    one = sets.filter(pa.array(bucket_of(sets, 0) == 5))
    assert len(np.unique(bucket_of(one, 1))) > BUCKETS // 2


def test_splitting_loses_nothing():
    table = RowTable(*rows(list(range(300)) * 2))
    parts = list(split_by_bucket(table, 0))
    assert sum(len(part) for _, part in parts) == 600
    for bucket, part in parts:
        assert (bucket_of(part.sets, 0) == bucket).all()
        for name, element in zip(part.sets.to_pylist(), part.elements, strict=True):
            assert any(element.equal(table.elements[place]) for place in (name, name + 300))


def test_files_are_appended_to_and_truncated(tmp_path):
    path = tmp_path / "tables"
    length = append(path, RowTable(*rows([1, 2])))
    both = length + append(path, StateTable.of(make(), *rows([3])))
    assert [len(table) for table in read_tables(path, both)] == [2, 1]
    with path.open("ab") as file:
        file.write(b"left by an interrupted run")
    assert [len(table) for table in read_tables(path, both)] == [2, 1]
    truncate(path, length)
    assert [len(table) for table in read_tables(path, length)] == [2]
    with pytest.raises(setfold.FileError, match="corrupt"):
        truncate(path, length + 1)
    with pytest.raises(setfold.FileError, match="corrupt"):
        list(read_tables(path, both))
    truncate(path, 0)
    with pytest.raises(setfold.FileError, match="corrupt"):
        list(read_tables(path, length))


@pytest.mark.parametrize("budget", [1, 100_000])
def test_a_store_resumes_from_a_checkpoint(tmp_path, budget):
    encoder = make()
    batches = [rows(list(range(seed, seed + 20)) * 2, seed) for seed in range(8)]
    whole = Store(encoder, tmp_path / "whole", budget)
    part = Store(encoder, tmp_path / "part", budget)
    with torch.no_grad():
        for number, batch in enumerate(batches):
            for store in (whole, part):
                store.add(absorbed(encoder, *batch))
            if number == 3:
                lengths = part.save(tmp_path / "memory")
        again = Store(encoder, tmp_path / "part", budget)
        again.restore(tmp_path / "memory", lengths)
        for batch in batches[4:]:
            again.add(absorbed(encoder, *batch))
        expected = {n: t for table in whole.drain() for n, t in encodings(encoder, table)}
        found = {n: t for table in again.drain() for n, t in encodings(encoder, table)}
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in found)  # to the last bit


@pytest.mark.parametrize("native", [None, *available()])
@pytest.mark.parametrize("kind", ["sum", "mean", "max"])
def test_a_store_merges_like_one_call(tmp_path, native, kind):
    """Tables with and without new sets, added in place or not: the same bits as `merged`."""
    encoder = make(aggregate=kind)
    names = [[1, 2, 3] * 9, [3, 2], [1, 1, 2], [4, 1], [2, 4], [3], [1, 2, 3, 4, 5], [5, 1]]
    with using(native), torch.no_grad():
        tables = [StateTable.of(encoder, *rows(some, seed)) for seed, some in enumerate(names)]
        before = [table.state.count.tolist() for table in tables]
        expected = merged(tables).sorted()
        store = Store(encoder, tmp_path, budget=1 << 24)
        for table in tables:
            store.add(table)
        (found,) = store.drain()
    assert before == [table.state.count.tolist() for table in tables], "tables are values"
    assert found.sets.equals(expected.sets)
    assert found.count.equal(expected.count)
    for name, parts in expected.state.statistics.items():
        for mine, other in zip(found.state.statistics[name], parts, strict=True):
            assert mine.equal(other)


def encodings(encoder, table):
    return zip(table.sets.to_pylist(), encoder.readout(table.state), strict=True)


# ---- sorted runs -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [int, str, lambda i: str(i).encode(), lambda i: f"é{i}"])
@given(owners=st.lists(st.integers(0, 3), min_size=1, max_size=60), window=st.integers(1, 9))
def test_runs_are_read_in_order(owners, window, kind, tmp_path_factory):
    folder, encoder = tmp_path_factory.mktemp("runs"), make()
    runs = []
    for owner in set(owners):
        names = [kind(i) for i, o in enumerate(owners) if o == owner]
        path = folder / f"{owner}.arrow"
        write_sorted_run(path, [StateTable.of(encoder, *rows(names)).sorted()], window)
        runs.append(read_sorted_run(path))
    names = [name for table in merge_sorted_runs(runs) for name in table.sets.to_pylist()]
    assert names == sorted(kind(i) for i in range(len(owners)))


def test_no_runs_are_nothing():
    assert list(merge_sorted_runs([])) == []
