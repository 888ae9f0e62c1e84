"""All sets of a store: as a stream, as files, as state files, and back."""

from __future__ import annotations

import datetime

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import setfold
from setfold import live
from setfold.core import persist
from setfold.errors import FileError, InputError, NonFiniteError, StateMismatchError
from setfold.live import export
from tests.live.events import NAMES, assert_holds, events, pool, slots
from tests.paused import Paused

FORMATS = ["parquet", "arrow", "npz", "csv"]


@pytest.fixture
def sets(store_url):
    with live.create(store_url, slots()) as found:
        found.update(events(1, 60), set="user", batch=("days", 1))
        yield found


def frame_of(model, rows, **options):
    return setfold.encode_frame(model, rows, set="user", **options)


def assert_encodes(found, expected):
    assert found["set"].tolist() == expected["user"].tolist()
    assert found["count"].tolist() == expected["count"].tolist()
    np.testing.assert_allclose(
        np.stack(found["encoding"]).reshape(-1),
        np.stack(expected["encoding"]).reshape(-1),
        rtol=1e-9,
        atol=1e-12,
    )


def read(path):
    if path.endswith(".npz"):
        arrays = np.load(path)
        return pd.DataFrame({name: list(arrays[name]) for name in ("set", "count", "encoding")})
    if path.endswith(".csv"):
        frame = pd.read_csv(path)
        frame["encoding"] = list(frame.filter(like="encoding_").to_numpy())
        return frame
    return pd.read_parquet(path) if path.endswith(".parquet") else pd.read_feather(path)


def test_reading_all_sets(sets, monkeypatch):
    monkeypatch.setattr("setfold.live.merging.states_at_once", lambda model: 3)
    found = sets.read()
    assert found.schema.names == ["set", "count", "encoding"]
    assert_encodes(found.read_pandas(), frame_of(slots(), events(1, 60)))


def test_what_is_read_is_of_one_moment(sets, monkeypatch):
    monkeypatch.setattr("setfold.live.merging.states_at_once", lambda model: 2)
    stream = sets.read()
    first = stream.read_next_batch()
    sets.update(events(2, 60), set="user", batch=("days", 2))  # by the same thread
    rest = [first, *stream]
    assert sum(batch.num_rows for batch in rest) == len(NAMES)
    assert sum(sum(batch["count"].to_pylist()) for batch in rest) == 60


@pytest.mark.parametrize("suffix", FORMATS)
def test_files_of_encodings(sets, tmp_path, suffix):
    out = tmp_path / f"out.{suffix}"
    assert sets.export(out) == (len(NAMES), 60)
    assert_encodes(read(str(out)), frame_of(slots(), events(1, 60)))
    if suffix != "csv":
        assert setfold.verify(out).startswith("encodings of 7 sets")
    with pytest.raises(InputError, match="exists"):
        sets.export(out)
    sets.update(events(2), set="user", batch=("days", 2))
    assert sets.export(out, overwrite=True) == (len(NAMES), 80)
    assert {path.name for path in tmp_path.iterdir() if ".part" in path.name} == set()


@pytest.mark.parametrize("suffix", FORMATS)
def test_an_empty_store(store_url, tmp_path, suffix):
    with live.create(store_url, slots()) as sets:
        assert sets.export(tmp_path / f"out.{suffix}") == (0, 0)
        assert sets.read().read_all().num_rows == 0


def test_predictions(store_url):
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(20, 2).double(), setfold.Classes("kind", ["no", "yes"])]
    model = setfold.Composition(encoder=slots(), head=nn.Sequential(*layers)).eval()
    with live.create(store_url, model) as sets:
        sets.update(events(1), set="user", batch=("days", 1))
        found = sets.read(head=True).read_pandas()
        expected = frame_of(model, events(1), head=True)
        assert found["prediction"].tolist() == expected["prediction"].tolist()
        assert_encodes(found, expected)


def test_ids_of_several_columns(store_url, tmp_path):
    rows = events(1).assign(year=lambda frame: frame["user"].str.upper())
    with live.create(store_url, slots()) as sets:
        sets.update(rows, set="year,user", batch=("days", 1), features="x,y")
        expected = setfold.encode_frame(slots(), rows, set="year,user", features="x,y")
        found = sets.read().read_pandas()
        assert found.columns.tolist() == ["year", "user", "count", "encoding"]
        assert found[["year", "user", "count"]].equals(expected[["year", "user", "count"]])
        sets.export(tmp_path / "s.arrow", states=True)
        setfold.readout_states(tmp_path / "s.arrow", tmp_path / "r.parquet")
        again = pd.read_parquet(tmp_path / "r.parquet")
        assert again[["year", "user", "count"]].equals(expected[["year", "user", "count"]])
        with pytest.raises(InputError, match="in this order"):
            sets.update(rows, set="user,year", batch=("days", 2), features="x,y")
    with live.create(str(tmp_path / "other.db"), slots()) as other:
        other.import_states(tmp_path / "s.arrow")
        assert other.read().read_pandas().equals(found)


@pytest.mark.parametrize(
    "names", [range(7), [True, False], NAMES, pd.date_range("2026", periods=7)]
)
def test_ids_of_every_type_go_out_and_come_back(store_url, tmp_path, names):
    rows = events(1, names=[*range(len(names))])
    column = [names[number] for number in rows["user"]]
    if isinstance(names, pd.DatetimeIndex):
        column = [day.date() for day in column]
    rows = rows.assign(user=column)
    with live.create(store_url, slots()) as sets:
        sets.update(rows, set="user", batch=("days", 1))
        found = sets.read().read_pandas()
        assert found["set"].tolist() == sorted(set(column))
        assert_holds(sets, slots(), rows, names=sorted(set(column)))
        sets.export(tmp_path / "s.arrow", states=True)
        sets.import_states(tmp_path / "s.arrow")
        assert_holds(sets, slots(), rows, rows, names=sorted(set(column)))


def test_only_recent_elements(store_url, tmp_path, clock):
    rows = events(1, 60, at=clock.time - 3600 * (pd.Series(range(60)) % 4))
    with live.create(store_url, slots(), bucket="1h") as sets:
        sets.update(rows, set="user", batch=("days", 1), time="at")
        recent = rows[rows["at"] > clock.time - 7200][["user", "x", "y"]]
        assert_encodes(sets.read(last="2h").read_pandas(), frame_of(slots(), recent))
        whole = sets.read().read_pandas()
        assert_encodes(whole, frame_of(slots(), rows, features="x,y"))
        sets.export(tmp_path / "s.arrow", states=True, last="2h")
        setfold.readout_states(tmp_path / "s.arrow", tmp_path / "r.parquet")
        assert_encodes(read(str(tmp_path / "r.parquet")), frame_of(slots(), recent))


def test_states_as_merge_and_readout_take_them(sets, tmp_path):
    sets.export(tmp_path / "live.arrow", states=True)
    assert setfold.verify(tmp_path / "live.arrow").startswith("states of 7 sets with 60 elements")
    events(2).to_parquet(tmp_path / "day.parquet")
    setfold.encode_sets(
        slots(),
        tmp_path / "day.parquet",
        tmp_path / "day.npz",
        set="user",
        states=tmp_path / "day.arrow",
    )
    setfold.merge_states([tmp_path / "live.arrow", tmp_path / "day.arrow"], tmp_path / "all.arrow")
    setfold.readout_states(tmp_path / "all.arrow", tmp_path / "all.parquet")
    both = pd.concat([events(1, 60), events(2)])
    assert_encodes(read(str(tmp_path / "all.parquet")), frame_of(slots(), both))
    assert sets.import_states(tmp_path / "day.arrow").rows == 20
    (tmp_path / "day.arrow").rename(tmp_path / "renamed.arrow")
    assert sets.import_states(tmp_path / "renamed.arrow").status == "duplicate"
    assert_holds(sets, slots(), both)


@pytest.mark.parametrize("suffix", [*FORMATS, "states"])
def test_a_file_is_complete_or_not_there(sets, tmp_path, suffix, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(persist, "sync", fail)
    out = tmp_path / ("out.arrow" if suffix == "states" else f"out.{suffix}")
    with pytest.raises(FileError, match="the disk is full"):
        sets.export(out, states=suffix == "states")
    assert {path.suffix for path in tmp_path.iterdir()} <= {".db", ".db-wal", ".db-shm"}


@pytest.mark.parametrize("suffix", FORMATS)
def test_two_exports_to_one_file(sets, tmp_path, suffix):
    """The second one is refused while the first one writes, and the file is complete."""
    out = tmp_path / f"out.{suffix}"
    first = Paused(lambda: sets.export(out), (export, "replace_durably"))
    with pytest.raises(InputError, match="another process exports to"):
        sets.export(out)
    assert first.result() == (len(NAMES), 60)
    assert_encodes(read(str(out)), frame_of(slots(), events(1, 60)))
    sets.export(out, overwrite=True)
    assert not [*tmp_path.glob(".out*")]


def test_paths_that_cannot_be(sets, tmp_path):
    with pytest.raises(InputError, match="unknown suffix"):
        sets.export(tmp_path / "out.txt")
    with pytest.raises(InputError, match=r"must go to an \.arrow file"):
        sets.export(tmp_path / "out.parquet", states=True)
    with pytest.raises(InputError, match="does not exist"):
        sets.export(tmp_path / "nowhere" / "out.parquet")


def test_an_encoding_that_is_not_finite_is_named(store_url, tmp_path):
    model = setfold.Composition(encoder=setfold.Pool(2, "sum"), head=None).eval()
    with live.create(store_url, model) as sets:
        rows = pd.concat([events(1), events(2, 2, names=["large"]).assign(x=3e38)])
        sets.update(rows, set="user", batch=("days", 1))
        with pytest.raises(NonFiniteError, match="the encoding of the set large"):
            sets.export(tmp_path / "out.parquet")
        assert not (tmp_path / "out.parquet").exists()


# ---- state files into a store --------------------------------------------------------------------


@pytest.fixture
def states(tmp_path):
    """The state file of a day, and a function that makes one with another model."""

    def make(model=None, rows=None, name="day"):
        rows = events(5) if rows is None else rows
        rows.to_parquet(tmp_path / f"{name}.parquet")
        out = tmp_path / f"{name}.arrow"
        setfold.encode_sets(
            model or slots(),
            tmp_path / f"{name}.parquet",
            tmp_path / f"{name}.npz",
            set="user",
            states=out,
        )
        return out

    return make


def test_states_of_another_model_are_refused(sets, states):
    with pytest.raises(StateMismatchError, match="another model"):
        sets.import_states(states(slots(seed=1)))
    with pytest.raises(StateMismatchError, match="another model"):
        sets.import_states(states(slots().float(), name="float"))
    assert_holds(sets, slots(), events(1, 60))


def test_states_as_history_of_a_new_model(sets, states):
    new = pool()
    number = sets.add_model(new)
    history = states(new, events(1, 60))
    assert sets.import_states(history).rows == 60
    assert sets.import_states(history).status == "duplicate"
    assert_holds(sets, slots(), events(1, 60))
    with pytest.raises(InputError, match="model 2 would lack"):
        sets.import_states(states(name="other"))
    sets.switch(number)
    assert_holds(sets, new, events(1, 60))


def test_models_that_differ_in_their_head_get_states_together(store_url, states):
    def model(bias):
        head = nn.Linear(5, 1).double()
        nn.init.constant_(head.bias, bias)
        return setfold.Composition(encoder=slots(), head=head).eval()

    with live.create(store_url, model(1.0)) as sets:
        number = sets.add_model(model(2.0))
        sets.import_states(states(model(1.0)))
        sets.switch(number)
        assert sum(sets.count(NAMES)) == 20


def test_other_ids_are_refused(sets, states):
    with pytest.raises(InputError, match="the set ids of this store are large_string"):
        sets.import_states(states(rows=events(5, names=[1, 2])))


def test_damaged_states_change_nothing(sets, states):
    path = states()
    content = bytearray(path.read_bytes())
    for place in (len(content) // 2, len(content) - 100):
        damaged = path.with_name(f"damaged-{place}.arrow")
        damaged.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(FileError):
            sets.import_states(damaged)
    with pytest.raises(FileError, match="does not exist"):
        sets.import_states(path.with_name("nothing.arrow"))
    assert_holds(sets, slots(), events(1, 60))
    assert sets.info().batches == 1


def test_deleted_sets_stay_deleted(sets, states):
    sets.delete([NAMES[0]])
    rows = events(5, 40)
    found = sets.import_states(states(rows=rows))
    kept = rows[rows["user"] != NAMES[0]]
    assert (found.rows, found.deleted) == (len(kept), 40 - len(kept))
    assert sets.count([NAMES[0]]) == [0]


def test_states_need_a_time_if_there_are_buckets(store_url, states, clock):
    path = states()
    at = datetime.datetime.fromtimestamp(clock.time - 3600, datetime.UTC)
    with live.create(store_url, slots(), bucket="1h", window="2h") as sets:
        with pytest.raises(InputError, match="Pass the time"):
            sets.import_states(path)
        assert sets.import_states(path, at=at).rows == 20
        assert_holds(sets, slots(), events(5))
        assert_holds(sets, slots(), last="1h")
        clock.time += 24 * 3600
        sets.expire()
        with pytest.raises(InputError, match="before the window"):
            sets.import_states(states(rows=events(6), name="late"), at=at)


def test_a_time_without_buckets_has_no_use(sets, states):
    with pytest.raises(InputError, match="no buckets"):
        sets.import_states(states(), at=datetime.datetime.now(datetime.UTC))
