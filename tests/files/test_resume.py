"""Interrupted runs, full disks, changed inputs and concurrent runs."""

from __future__ import annotations

import errno
import os
import random
import signal
from functools import partial
from itertools import count
from pathlib import Path

import pytest

import setfold
from setfold.files import plan, run
from setfold.files.budget import Budget
from setfold.files.columns import ColumnSpec
from setfold.files.tables import store
from tests.files.files import (
    assert_encodes,
    encode,
    encoder,
    fork,
    interrupt,
    rows,
    stopping,
    write,
)
from tests.killed import calls_of, die_at


@pytest.mark.parametrize("states", [False, True])
def test_killed_at_any_moment_it_ends_with_the_same_bytes(tmp_path, tight, monkeypatch, states):
    folder, model = write(tmp_path / "in", rows(600, 100)), encoder()

    def run_encode(out, **options):
        kept = {"states": tmp_path / out / "s.arrow"} if states else {}
        return encode(model, folder, tmp_path / out / "o.parquet", **kept, **options)

    def run_until(call):
        die_at(call)
        run_encode("parts", resume=True)

    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    run_encode("whole")  # imports everything, which calls many functions
    calls, generator = calls_of(lambda: run_encode("whole", overwrite=True)), random.Random(0)
    whole, parts = (tmp_path / out / "o.parquet" for out in ("whole", "parts"))
    codes = []
    while len(codes) < 6 and 0 not in codes:
        process = fork(partial(run_until, generator.randrange(calls // 2)))
        process.join()
        codes.append(process.exitcode)
        if parts.exists():  # it was killed after it had written it
            assert parts.read_bytes() == whole.read_bytes()
    assert codes[0] == -signal.SIGKILL
    assert set(codes) <= {0, -signal.SIGKILL}
    run_encode("parts", resume=True)
    for name in ("o.parquet", "s.arrow")[: 2 if states else 1]:
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not list((tmp_path / "parts").glob("*.work"))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("place", ["add", "save", "close", "drain_bucket", "drop_bucket", "files"])
def test_stopped_anywhere_it_ends_with_the_same_bytes(tmp_path, tight, monkeypatch, place, after):
    folder, model = write(tmp_path / "in", rows(600, 100)), encoder()
    whole = encode(model, folder, tmp_path / "whole.parquet")
    for call in (1, 4, 15):
        parts = None
        with stopping(monkeypatch, store.Store, place, call, after):
            parts = encode(model, folder, tmp_path / "parts.parquet", resume=True)
            break  # there are fewer calls
        assert not (tmp_path / "parts.parquet").exists()
    parts = parts or encode(model, folder, tmp_path / "parts.parquet", resume=True)
    assert whole.spills > 0
    assert (parts.spills, parts.bytes_spilled) == (whole.spills, whole.bytes_spilled)
    assert (tmp_path / "parts.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()


def test_stopped_at_the_very_end_it_is_done(tmp_path, tight, monkeypatch):
    table, model, states = rows(), encoder(), tmp_path / "states.arrow"
    days = [write(tmp_path / f"day {i}", table[i * 300 :][:300]) for i in range(2)]
    for number, day in enumerate(days):
        encode(model, day, tmp_path / f"{number}.npz", states=tmp_path / f"{number}.arrow")
    parts = [tmp_path / "0.arrow", tmp_path / "1.arrow"]

    def stop(work):
        original(work)
        raise KeyboardInterrupt

    original = run.publish_outputs
    with monkeypatch.context() as patch:
        patch.setattr(run, "publish_outputs", stop)
        with pytest.raises(KeyboardInterrupt):
            setfold.merge_states(parts, states)
    assert setfold.merge_states(parts, states, resume=True).elements == 600
    setfold.readout_states(states, tmp_path / "out.parquet")
    assert_encodes(tmp_path / "out.parquet", model, table)
    assert not list(tmp_path.glob("*.work"))


def test_what_is_done_is_not_taken_for_something_else(tmp_path, monkeypatch):
    days = [write(tmp_path / f"day {i}", rows(seed=i)) for i in range(2)]

    def stop(work):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "publish_outputs", stop)
        with pytest.raises(KeyboardInterrupt):
            encode(encoder(), days[0], tmp_path / "out.parquet")
    with pytest.raises(setfold.InputError, match="had different inputs"):
        encode(encoder(), days[1], tmp_path / "out.parquet", resume=True)
    monkeypatch.chdir(tmp_path / "day 0")  # relative names differ from here
    encode(encoder(), "../day 0", "../out.parquet", resume=True)
    assert_encodes(tmp_path / "out.parquet", encoder(), rows(seed=0))


def test_outputs_may_be_on_different_disks(tmp_path, monkeypatch):
    folder, states = write(tmp_path / "in", rows()), tmp_path / "states.arrow"
    original = Path.replace

    def replace(self, target):
        if Path(target) == states and self.parent != states.parent:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return original(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    encode(encoder(), folder, tmp_path / "out.parquet", states=states)
    setfold.readout_states(states, tmp_path / "again.parquet")
    assert_encodes(tmp_path / "again.parquet", encoder(), rows())


def test_an_interrupted_run_is_only_discarded_on_request(tmp_path, tight, monkeypatch):
    folder, model, out = write(tmp_path / "in", rows()), encoder(), tmp_path / "out.parquet"
    interrupt(monkeypatch, model, folder, out)
    with pytest.raises(setfold.InputError, match=r"interrupted.*--resume.*--restart"):
        encode(model, folder, out)
    with pytest.raises(setfold.InputError, match="not both"):
        encode(model, folder, out, resume=True, restart=True)
    encode(model, folder, out, restart=True)
    assert_encodes(out, model, rows())


def test_inputs_that_changed_are_noticed(tmp_path, tight, monkeypatch):
    folder, model, out = write(tmp_path / "in", rows()), encoder(), tmp_path / "out.parquet"
    interrupt(monkeypatch, model, folder, out)
    os.utime(folder / "part-0.parquet", ns=(0, 0))
    with pytest.raises(setfold.FileError, match=r"part-0\.parquet has changed"):
        encode(model, folder, out, resume=True)
    (folder / "part-0.parquet").unlink()
    with pytest.raises(setfold.InputError, match=r"other inputs.*part-0\.parquet"):
        encode(model, folder, out, resume=True)


def test_inputs_that_change_while_they_are_read_are_noticed(tmp_path, tight, monkeypatch):
    folder, out = write(tmp_path / "in", rows()), tmp_path / "out.parquet"
    original = run.Run._report_progress

    def report(self, *arguments):
        os.utime(folder / "part-3.parquet", ns=(0, 0))
        original(self, *arguments)

    monkeypatch.setattr(run.Run, "_report_progress", report)
    with pytest.raises(setfold.FileError, match=r"part-3\.parquet has changed"):
        encode(encoder(), folder, out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"features": "f2,f1,f0"}, "had different columns"),
        ({"skip_errors": True}, "had a different on_error"),
    ],
)
def test_a_run_with_other_arguments_cannot_resume(tmp_path, tight, monkeypatch, change, word):
    folder, model, out = write(tmp_path / "in", rows()), encoder(), tmp_path / "out.parquet"
    interrupt(monkeypatch, model, folder, out)
    with pytest.raises(setfold.InputError, match=word):
        encode(model, folder, out, resume=True, **change)
    with pytest.raises(setfold.InputError, match="had a different model"):
        encode(encoder(aggregate="max"), folder, out, resume=True)


def test_a_run_with_other_batches_cannot_resume(tmp_path, tight, monkeypatch):
    """Batches are what is counted as done, and another version may choose other ones."""
    folder, model, out = write(tmp_path / "in", rows()), encoder(), tmp_path / "out.parquet"
    interrupt(monkeypatch, model, folder, out)
    monkeypatch.setattr(plan, "split_memory", lambda *_: Budget(batch_rows=50, store_bytes=20_000))
    with pytest.raises(setfold.InputError, match="had a different batch_rows"):
        encode(model, folder, out, resume=True)


def test_a_shard_is_not_continued_within_a_batch(tmp_path, tight):
    folder, columns = write(tmp_path / "in", rows(), files=1), ColumnSpec.parse(None, "event")
    found = plan.make_plan(encoder(), [folder], columns, memory=10**9, skip=True)
    task, shard = found.task, found.shards[0]
    whole = [batch.rows for batch in task.batches(0, shard)]
    assert [batch.rows for batch in task.batches(0, shard, whole[1])] == whole[2:]
    with pytest.raises(setfold.InputError, match=r"cannot resume.* in other batches"):
        list(task.batches(0, shard, whole[1] + 1))


def test_damaged_journals_are_refused(tmp_path, tight, monkeypatch):
    folder, model, out = write(tmp_path / "in", rows()), encoder(), tmp_path / "out.parquet"
    interrupt(monkeypatch, model, folder, out)
    (tmp_path / "out.parquet.work" / "journal").write_text("{")
    with pytest.raises(setfold.FileError, match="--restart"):
        encode(model, folder, out, resume=True)
    encode(model, folder, out, restart=True)
    assert_encodes(out, model, rows())


def test_two_runs_cannot_write_the_same_output(tmp_path, monkeypatch):
    folder, model, out = write(tmp_path / "in", rows()), encoder(), tmp_path / "out.parquet"

    def callback(_):
        with pytest.raises(setfold.FileError, match="another process is writing"):
            encode(model, folder, out)

    encode(model, folder, out, progress=callback)
    assert_encodes(out, model, rows())


@pytest.mark.parametrize("after", [0, 1, 12, 25])
def test_a_full_disk_loses_nothing(tmp_path, tight, monkeypatch, after):
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
