"""Damaged files in the work folder of an interrupted run: never another answer."""

from __future__ import annotations

import json
import os
import shutil

import pyarrow as pa
import pytest
import torch

import setfold
from setfold.files import journal, run
from setfold.files.journal import read_journal
from setfold.files.tables.frames import HEAD, append_frame, read_frame, read_frames
from setfold.files.tables.sorted_runs import merge_sorted_runs, read_sorted_run, write_sorted_run
from setfold.files.tables.store import Store
from setfold.files.tables.table import RowTable, StateTable
from tests.files.files import encode, encoder, rows, write
from tests.small import draw, make

TABLES = [pa.table({"x": [number, 0.5]}) for number in (1.0, 2.0, 3.0)]


@pytest.fixture
def frames(tmp_path):
    path = tmp_path / "frames"
    for table in (*TABLES, None):
        append_frame(path, table)
    return path


def split(content):
    """The frames of a file."""
    found = []
    while content:
        length = HEAD.unpack(content[: HEAD.size])[1] + HEAD.size
        found.append(content[:length])
        content = content[length:]
    return found


# ---- frames ------------------------------------------------------------------------------------


def test_frames_are_read_as_they_were_written(frames):
    assert [table.equals(wanted) for table, wanted in zip(read_frames(frames), TABLES, strict=True)]
    table, end = read_frame(frames, 0)
    assert table.equals(TABLES[0])
    assert read_frame(frames, end)[0].equals(TABLES[1])
    assert sum(map(len, split(frames.read_bytes()))) == frames.stat().st_size


def test_a_flipped_bit_in_a_frame_is_noticed(frames):
    content = frames.read_bytes()
    for place in range(0, len(content), 3):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        frames.write_bytes(damaged)
        with pytest.raises(setfold.FileError, match=r"corrupt.*--restart"):
            list(read_frames(frames))


@pytest.mark.parametrize(
    "change",
    [
        lambda a, b, c, end: a + b + end,
        lambda a, b, c, end: a + b + c,
        lambda a, b, c, end: b + a + c + end,
        lambda a, b, c, end: a + b + b + c + end,
        lambda a, b, c, end: a + b + c + end + end,
        lambda a, b, c, end: a + b + c + end + c,
        lambda a, b, c, end: a + end + b + c,
        lambda a, b, c, end: a + b + c + end + b"more",
        lambda a, b, c, end: a + b + c[:-8],
        lambda a, b, c, end: a + b + c + end[:-1],
        lambda a, b, c, end: b"",
        lambda a, b, c, end: end[:-1],
    ],
)
def test_lost_repeated_and_moved_frames_are_noticed(frames, change):
    frames.write_bytes(change(*split(frames.read_bytes())))
    with pytest.raises(setfold.FileError, match="corrupt"):
        list(read_frames(frames))


def test_a_frame_of_another_file_is_noticed(frames, tmp_path):
    frames.rename(tmp_path / "frames.run")  # the suffix may change
    assert len(list(read_frames(tmp_path / "frames.run"))) == 3
    (tmp_path / "frames.run").rename(tmp_path / "other.run")
    with pytest.raises(setfold.FileError, match="corrupt"):
        list(read_frames(tmp_path / "other.run"))


@pytest.mark.parametrize(
    "tables",
    [
        [pa.table({"x": [1.0]})],
        [RowTable(pa.array([1]), torch.ones(1, 3)).to_arrow()],
        [StateTable.of(make(), pa.array([1]), draw(1, 3)).to_arrow().drop_columns("set")],
        [StateTable.of(make(), pa.array([1]), draw(1, 3)).to_arrow().slice(0, 0)],
    ],
)
def test_a_sorted_run_holds_states_and_nothing_else(tmp_path, tables):
    for table in (*tables, None):
        append_frame(tmp_path / "a.run", table)
    with pytest.raises(setfold.FileError):
        list(merge_sorted_runs([read_sorted_run(tmp_path / "a.run")]))


def test_sorted_runs_have_the_same_columns(tmp_path):
    for name, model in {"a": make(), "b": make(aggregate="max")}.items():
        write_sorted_run(tmp_path / name, [StateTable.of(model, pa.array([1]), draw(1, 3))], 1)
    with pytest.raises(setfold.FileError, match="--restart"):
        list(merge_sorted_runs([read_sorted_run(tmp_path / name) for name in "ab"]))


def test_a_missing_file_is_noticed(tmp_path):
    with pytest.raises(setfold.FileError, match="corrupt"):
        list(read_frames(tmp_path / "missing"))


def test_a_huge_length_is_not_believed(frames):
    content = frames.read_bytes()
    frames.write_bytes(content[:8] + (1 << 62).to_bytes(8, "little") + content[16:])
    with pytest.raises(setfold.FileError, match="corrupt"):
        list(read_frames(frames))


# ---- resumed runs ------------------------------------------------------------------------------


@pytest.fixture
def interrupted(tmp_path, tight, monkeypatch):
    """A function that interrupts a run in a phase, and returns its folder and how to resume it."""
    folder, model, out = write(tmp_path / "in", rows(600, 100)), encoder(), tmp_path / "out.arrow"

    def stop(phase):
        left = {"reading": 8, "merging": 2, "writing": 1}[phase]

        def progress(now):
            nonlocal left
            left -= now.phase == phase
            if not left:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            encode(model, folder, out, progress=progress)
        return out.with_name("out.arrow.work"), lambda: encode(model, folder, out, resume=True)

    return stop


@pytest.mark.parametrize("phase", ["reading", "merging", "writing"])
def test_damage_is_noticed_when_a_run_is_resumed(interrupted, phase):
    work, resume = interrupted(phase)
    journal = read_journal(work)
    spilled = [work / "spill" / name for name in journal.lengths]
    if phase != "reading":
        spilled = [path for path in spilled if int(path.name[:2]) in journal.buckets]
    needed = [*spilled, *(work / "runs" / name for name in journal.sorted_runs)]
    if journal.snapshot:
        needed.append(work / journal.snapshot)
    assert needed
    assert "interrupted run" in setfold.verify(work)
    copy = shutil.copytree(work, work.with_name("copy"))
    for path in (needed[0], needed[-1]):
        content = path.read_bytes()
        last = split(content)[-1]
        middle = bytearray(content)
        middle[len(content) // 2] ^= 1
        for damaged in (bytes(middle), content[: -len(last)], content[:-1], b"", None):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            for function in (lambda: setfold.verify(work), resume):
                with pytest.raises(setfold.FileError, match=r"corrupt.*--restart"):
                    function()
            shutil.rmtree(work)
            shutil.copytree(copy, work)
    resume()
    assert not work.exists()


def test_every_character_of_a_journal_counts(interrupted):
    work, resume = interrupted("reading")
    text = (work / "journal").read_bytes()
    for place in range(0, len(text), 23):
        for changed in (bytes([text[place] ^ 1]), b"7", b""):
            damaged = text[:place] + changed + text[place + 1 :]
            (work / "journal").write_bytes(damaged)
            try:
                same = json.loads(damaged) == json.loads(text)
            except ValueError:
                same = False
            if not same:
                with pytest.raises(setfold.FileError, match="--restart"):
                    read_journal(work)
    (work / "journal").write_bytes(text)
    resume()


@pytest.mark.parametrize(
    "change", [{"version": 2}, {"version": "1"}, {"checksum": ""}, {"more": 1}]
)
def test_a_journal_of_another_version_is_refused(interrupted, change):
    work, _ = interrupted("reading")
    saved = json.loads((work / "journal").read_text()) | change
    (work / "journal").write_text(json.dumps(saved))
    with pytest.raises(setfold.FileError, match=r"another version.*--restart"):
        read_journal(work)


HOSTILE = {
    "a file elsewhere is truncated": {"lengths": {"../../victim": 0}},
    "an absolute path is truncated": {"lengths": {"/tmp/victim": 0}},
    "a snapshot elsewhere": {"snapshot": "../../victim"},
    "a run elsewhere": {"sorted_runs": ["../../victim.run"]},
    "an output elsewhere": {"outputs": {"output-0": "/tmp/victim"}, "digests": {"output-0": "0"}},
    "another file is moved": {"outputs": {"../../victim": "OUT"}, "digests": {"../../victim": "0"}},
    "an output without a digest": {"outputs": {"output-0": "OUT"}},
    "a negative count": {"rows": -1},
    "a fractional count": {"shard": 0.5},
    "a flag as a count": {"elements": True},
    "text as a number": {"read": "x"},
    "no number": {"seconds": None},
    "NaN": {"read": float("nan")},
    "a negative bucket": {"buckets": [-1]},
    "a bucket without files": {"buckets": [99]},
    "a number of buckets": {"buckets": 0.0},
    "a run that is listed twice": {"sorted_runs": ["00.run", "00.run"]},
    "names that are numbers": {"sorted_runs": [7]},
    "lengths that are a list": {"lengths": []},
    "no inputs": {"signature": {}},
    "a request that is a list": {"request": []},
    "a flag that is text": {"overwrite": "yes"},
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_journal_with_a_matching_checksum_is_not_trusted(interrupted, change):
    work, resume = interrupted("reading")
    victim = work.parent / "victim"
    victim.write_text("precious")
    changed = json.loads((work / "journal").read_text())["journal"] | change
    text = json.dumps(changed).replace("OUT", str(work.with_suffix("")))
    (work / "journal").write_text(json.dumps(journal._to_save(json.loads(text))))
    with pytest.raises(setfold.FileError, match="--restart"):
        resume()
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("name", ["", "lock", "journal", "skipped", "spill", "runs", "output-0"])
@pytest.mark.parametrize("kind", ["folder", "file", "pipe"])
def test_links_and_pipes_in_a_work_folder_are_refused(interrupted, name, kind):
    work, resume = interrupted("reading")
    elsewhere = work.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "00.states.tables").write_text("years of work")
    path = work / name
    if path.exists():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(elsewhere if kind == "folder" else elsewhere / "00.states.tables")
    with pytest.raises(setfold.FileError, match="setfold did not write"):
        resume()
    assert (elsewhere / "00.states.tables").read_text() == "years of work"
    assert len(list(elsewhere.iterdir())) == 1
    if (work / "journal").is_file():
        with pytest.raises(setfold.FileError, match="setfold did not write"):
            setfold.verify(work)


def test_a_folder_of_somebody_else_is_not_emptied(tmp_path):
    """A work folder without a journal is emptied. This one only has the name of one."""
    folder, thesis = write(tmp_path / "in", rows(60, 10)), tmp_path / "out.arrow.work" / "thesis"
    thesis.mkdir(parents=True)
    (thesis / "text").write_text("years of work")
    for options in ({}, {"resume": True}, {"restart": True}):
        with pytest.raises(setfold.FileError, match=r"setfold did not write .*thesis"):
            encode(encoder(), folder, tmp_path / "out.arrow", **options)
    assert (thesis / "text").read_text() == "years of work"


@pytest.mark.parametrize(
    "other",
    [
        RowTable(pa.array([1], pa.uint64()), torch.ones(1, 3)),
        RowTable(pa.array([1]), torch.ones(1, 4)),
        RowTable(pa.array([1]), torch.ones(1, 3, dtype=torch.float64)),
        StateTable.of(make(), pa.array(["1"]), draw(1, 3)),
    ],
    ids=["ids", "width", "dtype", "states"],
)
def test_tables_that_do_not_fit_together_are_noticed(tmp_path, other):
    store = Store(make(), tmp_path, budget=1 << 20)
    store.add(RowTable(pa.array([1]), torch.ones(1, 3)))
    with pytest.raises(setfold.FileError, match=r"does not fit the others.*--restart"):
        store.add(other)


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("suffix", [".arrow", ".parquet", ".npz"])
def test_a_complete_output_is_verified_before_it_gets_its_name(
    tmp_path, monkeypatch, suffix, states
):
    folder, out = write(tmp_path / "in", rows(60, 10)), tmp_path / f"out{suffix}"
    asked = {"states": tmp_path / "states.arrow"} if states else {}
    with monkeypatch.context() as patch:
        patch.setattr(run, "publish", lambda work: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            encode(encoder(), folder, out, **asked)
    path = tmp_path / f"out{suffix}.work" / f"output-{int(states)}"
    content = path.read_bytes()
    middle = bytearray(content)
    middle[len(content) // 2] ^= 1  # within the numbers, in all formats
    path.write_bytes(middle)
    with pytest.raises(setfold.FileError, match=r"damaged.*--restart"):
        encode(encoder(), folder, out, resume=True, **asked)
    assert not out.exists()
    path.write_bytes(content)
    encode(encoder(), folder, out, resume=True, **asked)
    assert "encodings" in setfold.verify(out)
