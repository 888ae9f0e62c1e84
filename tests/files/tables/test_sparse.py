"""Tables of states whose slots are mostly empty."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import setfold
from setfold.core.statistic import Field, Max, Min, Softmax, Sum
from setfold.files.states import read_states
from setfold.files.tables import sparse
from setfold.files.tables.absorb import MARK, find_marks, mark_overflows
from setfold.files.tables.store import Store
from setfold.files.tables.table import StateTable, from_arrow, merged, read_out
from tests.small import draw

AGGREGATES = [["density", "weighted_mean"], ["max", "min"], ["variance", "mass"]]


def places(aggregate=("density", "weighted_mean"), shape=(40, 40)):
    """An encoder with many slots, of which an element touches a few."""
    grid = setfold.Grid((-2, -2), (2, 2), shape)
    return setfold.PlacedSlotEncoder(3, grid, aggregate=[*aggregate]).double().eval()


def table_of(encoder, names, seed=0):
    return StateTable.of(encoder, pa.array(names), draw(len(names), 3, seed=seed))


def both(monkeypatch, make):
    """The tables that a function makes, with touched slots only and with all slots: their states."""
    found = [contents(make())]
    with monkeypatch.context() as patch:
        patch.setattr(sparse, "MANY_SLOTS", 10**9)
        found.append(contents(make()))
    return found


def contents(tables):
    """Sets, states and sizes of some tables."""
    return [(table.sets.to_pylist(), table.state.tensors(), table.nbytes) for table in tables]


def assert_same(one, other):
    for (sets, mine, _), (names, theirs, _) in zip(one, other, strict=True):
        assert sets == names
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert torch.equal(mine[name], tensor), name


# ---- the same states as without --------------------------------------------------------------


@pytest.mark.parametrize("aggregate", AGGREGATES, ids=str)
def test_tables_are_merged_taken_and_written_as_if_all_slots_were_kept(monkeypatch, aggregate):
    def results():
        encoder = places(aggregate)
        tables = [table_of(encoder, [seed, 1, 2, 1, 7], seed) for seed in range(4)]
        whole = merged(tables)
        taken = whole.take(np.array([3, 0, 0, 4]))
        again = [from_arrow(part) for part in whole.sorted().parts()]
        return whole, taken, *again, StateTable.from_arrow(whole.to_arrow().slice(1, 3))

    touched, every = both(monkeypatch, results)
    assert_same(touched, every)
    assert touched[0][2] < 0.1 * every[0][2]


def test_the_order_of_tables_decides_ties_and_rounding_as_before(monkeypatch):
    def result():
        encoder = places(["sum", "max"])
        tables = [table_of(encoder, [1, 2, 3], seed) for seed in range(6)]
        in_turn = tables[0]
        for table in tables[1:]:
            in_turn = merged([in_turn, table])
        assert_same(contents([merged(tables)]), contents([in_turn]))
        return [in_turn]

    assert_same(*both(monkeypatch, result))


@pytest.mark.parametrize("aggregate", AGGREGATES, ids=str)
def test_readouts_are_those_of_whole_sets(aggregate):
    encoder, names = places(aggregate), [1, 2, 1, 3, 1]
    (found,) = read_out(encoder, table_of(encoder, names).sorted())
    for number, name in enumerate([1, 2, 3]):
        chosen = draw(5, 3)[[place for place, other in enumerate(names) if other == name]]
        expected = encoder(chosen.unsqueeze(0)).flatten()
        np.testing.assert_allclose(found["encoding"][number].as_py(), expected, atol=1e-12)


def test_a_store_that_spills(tmp_path, monkeypatch):
    def drained():
        encoder = places()
        store = Store(encoder, tmp_path / "store", budget=2 * encoder.state_nbytes)
        for seed in range(8):
            store.add(table_of(encoder, [seed, 1, 20], seed))
        return [merged(list(store.drain())).sorted()]

    assert_same(*both(monkeypatch, drained))


def test_softmax_and_empty_sets():
    field = Field(Softmax(), (2000, 3))
    parts = field.identity(3, torch.device("cpu"))
    parts[0][1, 1999], parts[1][1, 1999] = 2.0, torch.tensor([3.0, 4.0, 1.0]).double()
    rows = sparse.rows_of(field, parts)
    assert rows.places.tolist() == [2000 + 1999]
    for start, stop in ((0, 3), (1, 2), (2, 3), (3, 3)):
        for found, part in zip(sparse.parts_of(field, rows, start, stop), parts, strict=True):
            assert torch.equal(found, part[start:stop])


@pytest.mark.parametrize("aggregate", AGGREGATES, ids=str)
def test_tables_without_sets(aggregate):
    encoder = places(aggregate)
    empty = StateTable.of_state(pa.array([], pa.int64()), encoder.initial_state(0))
    again = from_arrow(empty.to_arrow())
    assert len(again) == 0
    assert again.state.batch_size == 0
    (found,) = read_out(encoder, again)
    assert len(found) == 0
    table = table_of(encoder, [3, 4])
    assert_same(contents([merged([again, table, empty])]), contents([table]))


def test_statistics_that_may_mix_slots_are_kept_whole():
    class Mixing(Sum):
        def join(self, left, right):
            return (left[0] + right[0].flip(1),)

    assert sparse.num_slots(Field(Sum(), (2000, 2))) == 2000
    for field in (Field(Mixing(), (2000, 2)), Field(Max(), (2000,)), Field(Min(), (10, 2000))):
        assert sparse.num_slots(field) is None


def test_sets_that_overflow_are_marked_and_leave_the_others_alone():
    encoder = places(["sum", "max"])
    table = table_of(encoder, [1, 2, 3])
    rows = table.rows["sum"]
    wrong = rows.places // 1600 == 1
    rows.parts[0][wrong] = torch.inf
    marked = mark_overflows(table)
    assert find_marks(marked).tolist() == [False, True, False]
    assert marked.count.tolist() == [1, 1 + MARK, 1]
    expected = table_of(encoder, [1, 2, 3])
    assert_same(contents([marked.take(np.array([0]))]), contents([expected.take(np.array([0]))]))
    assert not marked.state_of(1, 2).statistics["sum"][0].any()
    assert bool((marked.state_of(1, 2).statistics["max"][0] == -torch.inf).all())


# ---- files ---------------------------------------------------------------------------------------


def test_files_and_merges_do_not_grow_with_the_slots(tmp_path):
    rows = tmp_path / "rows.parquet"
    values = draw(60, 3).float().numpy()
    columns = {"event": np.repeat(np.arange(20), 3), **dict(zip("xyz", values.T, strict=True))}
    pq.write_table(pa.table(columns), rows)
    sizes = []
    for shape in ((40, 40), (200, 200)):
        states = tmp_path / f"{shape[0]}.arrow"
        encoder = places(shape=shape).float()
        out = tmp_path / f"{shape[0]}.parquet"
        setfold.encode_sets(encoder, rows, out, set="event", states=states)
        sizes.append(states.stat().st_size)
        again = tmp_path / f"again-{shape[0]}.parquet"
        setfold.readout_states(states, again)
        assert pq.read_table(again).equals(pq.read_table(out))
        assert sum(map(len, read_states(states))) == 20
    assert max(sizes) < 1.1 * min(sizes) < 20 * 40 * 40 * 8


def test_packed_states_are_those_of_touched_slots():
    encoder = places()
    table = table_of(encoder, [1, 2, 1, 9]).to_arrow()
    packed = setfold.pack_partials(table)
    assert packed["state"].nbytes < 0.1 * len(table) * encoder.state_nbytes
    assert setfold.unpack_partials(encoder, packed).equals(table, check_metadata=True)
    assert setfold.unpack_partials(encoder, packed[1:]).equals(table[1:])
    state = packed["state"][0].as_py()
    for wrong in (state[:-1], state + b"0", state[:40], state[:32] + b"\xff" * 8 + state[40:]):
        states = pa.array([wrong, *packed["state"].to_pylist()[1:]], pa.binary())
        with pytest.raises(setfold.StateMismatchError, match="corrupt"):
            setfold.unpack_partials(encoder, packed.set_column(1, "state", states))


# ---- tables from anywhere ------------------------------------------------------------------------


def with_slots(table, values):
    return with_column(table, "sum.slots", values, pa.large_list(pa.int32()))


def with_column(table, name, values, kind):
    return table.set_column(table.schema.get_field_index(name), name, pa.array(values, kind))


def with_shape(table, shape):
    header = json.loads(table.schema.metadata[b"setfold"])
    header["fields"]["sum"][1] = shape
    return table.replace_schema_metadata(
        table.schema.metadata | {b"setfold": json.dumps(header).encode()}
    )


LISTS = pa.large_list(pa.float64())
DAMAGE = {
    "not sorted": lambda t, s, v: with_slots(t, [s[0][::-1], s[1]]),
    "twice": lambda t, s, v: with_slots(t, [[s[0][0], *s[0][:-1]], s[1]]),
    "negative": lambda t, s, v: with_slots(t, [[-1, *s[0][1:]], s[1]]),
    "out of range": lambda t, s, v: with_slots(t, [[*s[0][:-1], 1600], s[1]]),
    "one less": lambda t, s, v: with_slots(t, [s[0][:-1], s[1]]),
    "of another set": lambda t, s, v: with_slots(t, [s[0][:-1], sorted({*s[1], 1599, 0})]),
    "null": lambda t, s, v: with_slots(t, [None, s[1]]),
    "null inside": lambda t, s, v: with_slots(t, [[None, *s[0][1:]], s[1]]),
    "short lists": lambda t, s, v: with_column(t, "sum.slots", s, pa.list_(pa.int32())),
    "long slots": lambda t, s, v: with_column(t, "sum.slots", s, pa.large_list(pa.int64())),
    "fewer numbers": lambda t, s, v: with_column(t, "sum.0", [v[0][:-1], v[1]], LISTS),
    "numbers of another set": lambda t, s, v: with_column(
        t, "sum.0", [v[0][:-1], [v[0][-1], *v[1]]], LISTS
    ),
    "NaN": lambda t, s, v: with_column(t, "sum.0", [[np.nan, *v[0][1:]], v[1]], LISTS),
    "infinity": lambda t, s, v: with_column(t, "sum.0", [[np.inf, *v[0][1:]], v[1]], LISTS),
    "null number": lambda t, s, v: with_column(t, "sum.0", [[None, *v[0][1:]], v[1]], LISTS),
    "integers": lambda t, s, v: with_column(
        t, "sum.0", [[0] * len(x) for x in v], pa.large_list(pa.int64())
    ),
    "no slots": lambda t, s, v: t.drop_columns(["sum.slots"]),
    "other shape": lambda t, s, v: with_shape(t, [1600, 3]),
    "few slots": lambda t, s, v: with_shape(t, [16, 2]),
    "far more slots": lambda t, s, v: with_shape(t, [2**40, 2]),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_columns_are_refused(name):
    table = table_of(places(), [1, 2]).to_arrow()
    slots, values = table["sum.slots"].to_pylist(), table["sum.0"].to_pylist()
    assert len(from_arrow(with_slots(table, slots))) == 2  # the undamaged table is read
    with pytest.raises(setfold.FileError):
        from_arrow(DAMAGE[name](table, slots, values))
