"""Files in, vectors out: the answer, whatever the memory, the cut and the accidents."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import setfold
from setfold.engines import local
from setfold.jobs import plan, run, work
from setfold.jobs.memory import Division
from setfold.tables import spill, store
from tests.jobs.files import assert_encodes, encoder, fork, rows, write


@pytest.fixture
def tight(monkeypatch):
    """Very little memory, small batches and small pieces, so that everything happens."""
    monkeypatch.setattr(plan, "divide", lambda *_: Division(rows=64, budget=20_000))
    monkeypatch.setattr(plan, "PIECE_ROWS", 300)
    monkeypatch.setattr(spill, "BUCKETS", 4)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a disk's time, many times over


def encode(model, folder, out, **options):
    return setfold.encode_sets(model, folder, out, save_every=0, **{"set": "event", **options})


# ---- the answer --------------------------------------------------------------------------------


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


def test_rows_without_elements_are_sets(tmp_path):
    lists = {f"f{i}": pa.array([[], [0.5], []], pa.list_(pa.float32())) for i in range(3)}
    pq.write_table(pa.table({"event": [5, 6, 7], **lists}), tmp_path / "in.parquet")
    for name, names in (
        ("event", [5, 6, 7]),
        (None, [f"{tmp_path}/in.parquet:{i}" for i in range(3)]),
    ):
        options = {"explode": True, "set": name, "features": "f0,f1,f2"}
        encode(encoder(), tmp_path / "in.parquet", tmp_path / "out.parquet", **options)
        found = pq.read_table(tmp_path / "out.parquet")
        assert found["set"].to_pylist() == names
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
    encode(model, tmp_path / "in.parquet", tmp_path / "out.parquet", **options)
    names = pq.read_table(tmp_path / "out.parquet")["set"].to_pylist()
    assert names == [f"{tmp_path}/in.parquet:{row}" for row in range(3)]


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
    assert pa.compute.array_sort_indices(found["set"].combine_chunks()).to_pylist() == list(
        range(len(found))
    )
    if not pa.types.is_dictionary(kind):  # text is sorted in another way than numbers are
        encodings = (np.array(each["encoding"].to_pylist()) for each in (found, plain))
        np.testing.assert_allclose(*encodings, rtol=1e-4, atol=1e-6)  # spilled in other places


# ---- states ------------------------------------------------------------------------------------


def test_states_are_updated_merged_and_read_out(tmp_path, tight):
    table, model = rows(), encoder()
    days = [write(tmp_path / f"day {i}", table[i * 200 :][:200]) for i in range(3)]
    states = [tmp_path / f"{i}.arrow" for i in range(3)]
    for day, path in zip(days, states, strict=True):
        encode(model, day, tmp_path / "day.parquet", states=path)
    setfold.update_states(states[0], days[1], set="event")
    setfold.merge_states([states[0], states[2]], tmp_path / "all.arrow")
    setfold.readout_states(tmp_path / "all.arrow", tmp_path / "out.parquet")
    assert_encodes(tmp_path / "out.parquet", model, table)
    setfold.update_states(states[1], [days[0], days[2]], out=tmp_path / "other.arrow", set="event")
    setfold.readout_states(tmp_path / "other.arrow", tmp_path / "other.parquet", model=model)
    assert_encodes(tmp_path / "other.parquet", model, table)


def test_nothing_is_counted_twice_by_mistake(tmp_path):
    folder, states = write(tmp_path / "in", rows()), tmp_path / "states.arrow"
    encode(encoder(), folder, tmp_path / "out.parquet", states=states)
    with pytest.raises(setfold.InputError, match=r"part-0.* already.*count twice \(4 such files\)"):
        setfold.update_states(states, folder, set="event")
    with pytest.raises(setfold.InputError, match="count twice"):
        setfold.merge_states([states, states], tmp_path / "both.arrow")
    assert (
        setfold.merge_states([states, states], tmp_path / "both.arrow", again=True).elements == 1200
    )
    assert setfold.update_states(states, folder, set="event", again=True).elements == 1200


def test_states_of_another_model_are_refused(tmp_path):
    folder = write(tmp_path / "in", rows())
    for number, model in enumerate([encoder(), encoder(aggregate="max")]):
        out, states = tmp_path / f"{number}.parquet", tmp_path / f"{number}.arrow"
        encode(model, folder, out, states=states)
    with pytest.raises(setfold.StateMismatchError, match="aggregate"):
        setfold.merge_states(
            [tmp_path / "0.arrow", tmp_path / "1.arrow"], tmp_path / "2.arrow", again=True
        )
    assert not (tmp_path / "2.arrow").exists()


def test_a_file_that_holds_no_states_is_refused(tmp_path):
    encode(encoder(), write(tmp_path / "in", rows()), tmp_path / "out.arrow")
    with pytest.raises(setfold.FileError, match="no states"):
        setfold.readout_states(tmp_path / "out.arrow", tmp_path / "again.parquet")
    (tmp_path / "text.arrow").write_text("nothing of the kind")
    with pytest.raises(setfold.FileError, match="no Arrow file"):
        setfold.readout_states(tmp_path / "text.arrow", tmp_path / "again.parquet")


# ---- accidents ---------------------------------------------------------------------------------


@pytest.mark.parametrize("states", [False, True])
def test_killed_at_any_moment_it_ends_with_the_same_bytes(tmp_path, tight, monkeypatch, states):
    monkeypatch.setattr(work, "SAVE_SHARE", 1.0)
    folder, model = write(tmp_path / "in", rows(1500, 200)), encoder()

    def job(out, **options):
        kept = {"states": tmp_path / out / "s.arrow"} if states else {}
        return encode(model, folder, tmp_path / out / "o.parquet", **kept, **options)

    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    job("whole")
    kills, generator = 0, random.Random(0)
    for _ in range(12):
        process = fork(lambda: job("parts", resume=True))
        process.join(generator.uniform(0.02, 0.35))
        if process.exitcode is not None:
            break
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += 1
        assert not (tmp_path / "parts" / "o.parquet").exists() or states
    assert kills > 0
    job("parts", resume=True)
    for name in ("o.parquet", "s.arrow")[: 2 if states else 1]:
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not list((tmp_path / "parts").glob("*.work"))


@pytest.mark.parametrize("place", ["add", "save", "close", "drain_bucket", "drop_bucket", "files"])
def test_stopped_anywhere_it_ends_with_the_same_bytes(tmp_path, tight, monkeypatch, place):
    monkeypatch.setattr(work, "SAVE_SHARE", 1.0)
    folder, model = write(tmp_path / "in", rows(600, 100)), encoder()
    encode(model, folder, tmp_path / "whole.parquet")
    original = getattr(store.Store, place)
    for stop in (1, 4, 15):
        calls = count(1)

        def stopping(self, *arguments, calls=calls, stop=stop):
            if next(calls) == stop:
                raise KeyboardInterrupt
            return original(self, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(store.Store, place, stopping)
            try:
                encode(model, folder, tmp_path / "parts.parquet", resume=True)
            except KeyboardInterrupt:
                assert not (tmp_path / "parts.parquet").exists()
    encode(model, folder, tmp_path / "parts.parquet", resume=True)
    assert (tmp_path / "parts.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()


@pytest.mark.parametrize("place", ["publish", "report"])
def test_stopped_at_the_very_end_it_is_done(tmp_path, tight, monkeypatch, place):
    table, model, states = rows(), encoder(), tmp_path / "states.arrow"
    days = [write(tmp_path / f"day {i}", table[i * 300 :][:300]) for i in range(2)]
    encode(model, days[0], tmp_path / "day.npz", states=states)

    def stop(self):
        original(self)
        raise KeyboardInterrupt

    original = getattr(work.Work, place)
    with monkeypatch.context() as patch:
        patch.setattr(work.Work, place, stop)
        with pytest.raises(KeyboardInterrupt):
            setfold.update_states(states, days[1], set="event")
    assert setfold.update_states(states, days[1], set="event", resume=True).elements == 600
    setfold.readout_states(states, tmp_path / "out.parquet")
    assert_encodes(tmp_path / "out.parquet", model, table)
    assert not list(tmp_path.glob("*.work"))


def interrupted(monkeypatch, model, folder, out, after=5, **options):
    """A run that ended before its time, after some steps."""
    monkeypatch.setattr(work, "SAVE_SHARE", 1.0)
    original = local.steps

    def steps(*arguments):
        for number, step in enumerate(original(*arguments)):
            if number == after:
                raise KeyboardInterrupt
            yield step

    with monkeypatch.context() as patch:
        patch.setattr(local, "steps", steps)
        with pytest.raises(KeyboardInterrupt):
            encode(model, folder, out, **options)


def test_what_is_left_is_neither_ignored_nor_dropped_silently(tmp_path, tight, monkeypatch):
    folder, model, out = write(tmp_path / "in", rows()), encoder(), tmp_path / "out.parquet"
    interrupted(monkeypatch, model, folder, out)
    with pytest.raises(setfold.InputError, match=r"did not end.*--resume.*--restart"):
        encode(model, folder, out)
    with pytest.raises(setfold.InputError, match="not both"):
        encode(model, folder, out, resume=True, restart=True)
    encode(model, folder, out, restart=True)
    assert_encodes(out, model, rows())


def test_inputs_that_changed_are_noticed(tmp_path, tight, monkeypatch):
    folder, model, out = write(tmp_path / "in", rows()), encoder(), tmp_path / "out.parquet"
    interrupted(monkeypatch, model, folder, out)
    os.utime(folder / "part-0.parquet", ns=(0, 0))
    with pytest.raises(setfold.FileError, match=r"part-0\.parquet has changed"):
        encode(model, folder, out, resume=True)
    (folder / "part-0.parquet").unlink()
    with pytest.raises(setfold.InputError, match=r"other inputs.*part-0\.parquet"):
        encode(model, folder, out, resume=True)


def test_inputs_that_change_while_they_are_read_are_noticed(tmp_path, tight, monkeypatch):
    folder, out = write(tmp_path / "in", rows()), tmp_path / "out.parquet"
    original = run.Run._tell

    def tell(self, *arguments):
        os.utime(folder / "part-3.parquet", ns=(0, 0))
        original(self, *arguments)

    monkeypatch.setattr(run.Run, "_tell", tell)
    with pytest.raises(setfold.FileError, match=r"part-3\.parquet has changed"):
        encode(encoder(), folder, out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "word"),
    [({"features": "f2,f1,f0"}, "features"), ({"skip_errors": True}, "on_error")],
)
def test_another_job_cannot_go_on_with_it(tmp_path, tight, monkeypatch, change, word):
    folder, model, out = write(tmp_path / "in", rows()), encoder(), tmp_path / "out.parquet"
    interrupted(monkeypatch, model, folder, out)
    with pytest.raises(setfold.InputError, match=f"another one: {word}"):
        encode(model, folder, out, resume=True, **change)
    with pytest.raises(setfold.InputError, match="another one: model"):
        encode(encoder(aggregate="max"), folder, out, resume=True)


def test_damaged_journals_are_refused(tmp_path, tight, monkeypatch):
    folder, model, out = write(tmp_path / "in", rows()), encoder(), tmp_path / "out.parquet"
    interrupted(monkeypatch, model, folder, out)
    (tmp_path / "out.parquet.work" / "journal").write_text("{")
    with pytest.raises(setfold.FileError, match="--restart"):
        encode(model, folder, out, resume=True)


def test_two_runs_for_one_output_keep_out_of_each_others_way(tmp_path, monkeypatch):
    folder, model, out = write(tmp_path / "in", rows()), encoder(), tmp_path / "out.parquet"

    def tell(_):
        with pytest.raises(setfold.FileError, match="another process is writing"):
            encode(model, folder, out)

    encode(model, folder, out, progress=tell)
    assert_encodes(out, model, rows())


@pytest.mark.parametrize("after", [0, 1, 12, 25])
def test_a_full_disk_loses_nothing(tmp_path, tight, monkeypatch, after):
    monkeypatch.setattr(work, "SAVE_SHARE", 1.0)
    folder, model, out = write(tmp_path / "in", rows(600, 100)), encoder(), tmp_path / "out.parquet"
    encode(model, folder, tmp_path / "whole.parquet")
    calls, original = count(), store.append

    def full(path, table):
        if next(calls) >= after:
            with path.open("ab") as file:
                file.write(b"half a table")
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(path, table)

    with monkeypatch.context() as patch:
        patch.setattr(store, "append", full)
        with pytest.raises(setfold.FileError, match=r"disk of .* is full.*--resume"):
            encode(model, folder, out)
    encode(model, folder, out, resume=True)
    assert out.read_bytes() == (tmp_path / "whole.parquet").read_bytes()


# ---- what cannot be used -----------------------------------------------------------------------


def spoilt(tmp_path):
    """Five files, in which something is wrong with four."""
    table = rows(500)
    folder = write(tmp_path / "in", table, files=5)
    column = table["f1"].to_pylist()[:100]
    column[7] = None
    pq.write_table(
        table[:100].set_column(2, "f1", pa.array(column, pa.float32())), folder / "part-0.parquet"
    )
    column = table["f1"].to_numpy()[100:200].copy()
    column[[3, 50]] = np.nan, np.inf
    pq.write_table(table[100:200].set_column(2, "f1", pa.array(column)), folder / "part-1.parquet")
    whole = (folder / "part-2.parquet").read_bytes()
    (folder / "part-2.parquet").write_bytes(whole[: len(whole) // 2])
    pq.write_table(table[300:400].drop_columns("f2"), folder / "part-3.parquet")
    good = np.delete(np.arange(500), [7, 103, 150, *range(200, 400)])
    return folder, table.take(good)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (0, r"part-0\.parquet, row 7 .*column 'f1' is null"),
        (1, r"part-1\.parquet, row 3 .*NaN or infinite"),
        (2, r"part-2\.parquet cannot be opened"),
        (3, r"part-3\.parquet has elements of 2 numbers \('f0', 'f1'\); the model expects 3"),
    ],
)
def test_what_cannot_be_used_ends_the_run(tmp_path, number, message):
    folder, _ = spoilt(tmp_path)
    with pytest.raises(setfold.SetfoldError, match=message):
        encode(encoder(), folder / f"part-{number}.parquet", tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize("is_tight", [False, True])
def test_what_cannot_be_used_is_left_out_and_listed(tmp_path, request, is_tight):
    if is_tight:
        request.getfixturevalue("tight")
    (folder, good), model, out = spoilt(tmp_path), encoder(), tmp_path / "out.parquet"
    summary = encode(model, folder, out, skip_errors=True)
    assert_encodes(out, model, good)
    lines = [json.loads(line) for line in Path(summary.report).read_text().splitlines()]
    found = {(line["file"].rpartition("/")[2], line["row"]) for line in lines}
    whole = {("part-2.parquet", None), ("part-3.parquet", None)}
    assert found == {("part-0.parquet", 7), ("part-1.parquet", 3), ("part-1.parquet", 50), *whole}
    assert summary.skipped == len(lines) == 5
    assert summary.report == f"{out}.skipped.jsonl"
    encode(model, folder / "part-4.parquet", out)
    assert not (tmp_path / "out.parquet.skipped.jsonl").exists()


def test_the_list_is_the_same_after_an_accident(tmp_path, tight, monkeypatch):
    (folder, good), model = spoilt(tmp_path), encoder()
    encode(model, folder, tmp_path / "whole.parquet", skip_errors=True)
    out = tmp_path / "parts.parquet"
    interrupted(monkeypatch, model, folder, out, after=3, skip_errors=True)
    summary = encode(model, folder, out, skip_errors=True, resume=True)
    wanted = (tmp_path / "whole.parquet.skipped.jsonl").read_text()
    assert (tmp_path / "parts.parquet.skipped.jsonl").read_text() == wanted
    assert summary.skipped == 5
    assert_encodes(out, model, good)


def test_numbers_that_are_too_large_are_told_with_their_place(tmp_path):
    table = rows(100, sets=2).set_column(1, "f0", pa.array(np.full(100, 1e38, np.float32)))
    folder = write(tmp_path / "in", table, files=1)
    with pytest.raises(setfold.NonFiniteError, match=r"part-0\.parquet, rows 0 to 99: .*too large"):
        encode(encoder(aggregate="sum"), folder, tmp_path / "out.parquet", skip_errors=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"set": "evnt"}, "evnt"),
        ({"features": "f0,f1"}, "expects 3"),
        ({"features": "f0,f1,nothing"}, "nothing"),
        ({"memory": "10MB"}, "too little.*Give at least --memory"),
        ({"memory": "much"}, "cannot read the size"),
        ({"engine": "steam"}, "'local' or 'ray'"),
        ({"address": "auto"}, "for --engine ray"),
        ({"states": "s.parquet"}, "arrow"),
    ],
)
def test_mistakes_are_told_before_anything_is_done(tmp_path, change, message):
    folder = write(tmp_path / "in", rows())
    with pytest.raises(setfold.InputError, match=message):
        encode(encoder(), folder, tmp_path / "out.parquet", **change)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    ("out", "message"),
    [("out.txt", "suffix"), ("no/out.parquet", "make it first"), ("in.parquet", "it is a folder")],
)
def test_outputs_that_cannot_be_are_refused(tmp_path, out, message):
    write(tmp_path / "in.parquet", rows())
    with pytest.raises(setfold.InputError, match=message):
        encode(encoder(), tmp_path / "in.parquet", tmp_path / out)


def test_inputs_are_not_overwritten(tmp_path):
    folder = write(tmp_path / "in", rows())
    before = (folder / "part-0.parquet").read_bytes()
    with pytest.raises(setfold.InputError, match="is an input"):
        encode(encoder(), folder, folder / "part-0.parquet")
    assert (folder / "part-0.parquet").read_bytes() == before
    assert not list(folder.glob("*.work"))


def test_an_output_among_its_inputs_is_no_input_of_the_same_run(tmp_path, tight, monkeypatch):
    folder, model = write(tmp_path / "in", rows()), encoder()
    interrupted(monkeypatch, model, folder, folder / "out.parquet")
    encode(model, folder, folder / "out.parquet", resume=True)
    assert_encodes(folder / "out.parquet", model, rows())


def test_models_that_do_not_fold_in_one_pass_are_refused(tmp_path):
    folder = write(tmp_path / "in", rows())
    for model, message in (
        (setfold.SetTransformer(3, 8), "needs 3 passes"),
        (torch.nn.Linear(3, 4), "cannot be folded"),
    ):
        with pytest.raises(setfold.InputError, match=message):
            encode(model, folder, tmp_path / "out.parquet")


def test_names_of_different_types_are_refused(tmp_path):
    write(tmp_path / "in", rows(), name="a{}.parquet")
    write(tmp_path / "in", rows(names=str), name="b{}.parquet")
    with pytest.raises(setfold.InputError, match=r"b0\.parquet are named by large_string.*int64"):
        encode(encoder(), tmp_path / "in", tmp_path / "out.parquet")


def test_progress_is_told(tmp_path, tight):
    told = []
    folder = write(tmp_path / "in", rows(600, 100))
    encode(encoder(), folder, tmp_path / "out.parquet", progress=told.append)
    assert {progress.doing for progress in told} == {"reading", "merging", "writing"}
    reading = [progress for progress in told if progress.doing == "reading"]
    done = [progress.done for progress in reading]
    assert done == sorted(done)
    assert done[-1] == pytest.approx(reading[-1].total)
    assert reading[-1].elements == 600
    assert all(progress.memory > 0 for progress in told)
