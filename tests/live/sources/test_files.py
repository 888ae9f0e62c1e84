"""Files as batches: what counts is the content, whatever the name."""

from __future__ import annotations

import threading

import pytest

import setfold
from setfold import live
from setfold.errors import FileError, InputError
from setfold.live.sources import files as module
from setfold.live.sources.files import FileSource, watch
from setfold.live.sources.intake import Intake
from tests.files.readers.written import FORMATS
from tests.live.events import NAMES, assert_holds, events, pool, slots


@pytest.fixture
def sets(store_url):
    with live.create(store_url, slots()) as found:
        yield found


@pytest.fixture
def folder(tmp_path):
    found = tmp_path / "inbox"
    found.mkdir()
    return found


def apply(sets, *paths, source=None, **options):
    """Apply files, and return what was counted."""
    intake = Intake(sets, **{"set": "user", "features": "x,y", **options})
    files = FileSource(intake, source)
    files.apply(files.find(paths))
    return intake


def write(path, rows):
    kinds = {".parquet": rows.to_parquet, ".feather": rows.to_feather}
    if path.suffix in kinds:
        kinds[path.suffix](path)
    elif path.suffix == ".csv":
        rows.to_csv(path, index=False)
    else:
        rows.to_json(path, orient="records", lines=True, double_precision=15)
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl", ".feather"])
def test_a_file_counts_once_under_any_name(sets, folder, suffix):
    first = write(folder / f"monday{suffix}", events(1))
    assert apply(sets, first).rows == 20
    again = apply(sets, first)
    assert (again.batches, again.duplicates, again.rows) == (0, 1, 0)
    first.rename(folder / f"renamed{suffix}")
    write(folder / f"tuesday{suffix}", events(2))
    both = apply(sets, folder)
    assert (both.batches, both.duplicates, both.rows) == (1, 1, 20)
    assert_holds(sets, slots(), events(1), events(2))


def test_new_content_under_an_old_name_is_a_new_batch(sets, folder):
    for seed in (1, 2, 1):
        apply(sets, write(folder / "latest.parquet", events(seed)))
    assert_holds(sets, slots(), events(1), events(2))


def test_other_sources_are_counted_apart(sets, folder):
    path = write(folder / "monday.parquet", events(1))
    apply(sets, path)
    apply(sets, path, source="mirror")
    assert_holds(sets, slots(), events(1), events(1))


def test_set_ids_in_the_names_of_folders(sets, folder):
    rows = events(1)[["x", "y"]]
    for name in ("ann", "bob"):  # the same content, but of other sets
        (folder / f"user={name}").mkdir()
        write(folder / f"user={name}" / "rows.parquet", rows)
    assert apply(sets, folder).batches == 2
    assert apply(sets, folder).duplicates == 2
    expected = [rows.assign(user=name) for name in ("ann", "bob")]
    assert_holds(sets, slots(), *expected, names=["ann", "bob"])


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(store_url, tmp_path, name):
    kind = FORMATS[name]
    path = tmp_path / f"rows{kind.suffix}"
    columns = kind.write(path, 30)
    numbers = [n for n, v in columns.items() if v.ndim == 1 and v.dtype.kind == "f"]
    with live.create(store_url, setfold.Pool(1, "sum")) as sets:
        if "event" not in columns:
            with pytest.raises(InputError, match="has no column 'event'"):
                apply(sets, path, set="event", features=numbers[:1] or None)
            return
        for batches in (1, 0):
            found = apply(sets, path, set="event", features=numbers[:1])
            assert found.batches == batches
        assert sum(sets.read().read_all()["count"].to_pylist()) == 30


def test_large_files_in_bounded_memory(sets, folder, monkeypatch):
    monkeypatch.setattr("setfold.live.sources.intake.SMALL_ROWS", 1000)
    monkeypatch.setattr("setfold.live.absorb.STORE_BYTES", 1 << 17)
    names = [f"user {number}" for number in range(3000)]
    rows = events(1, 20_000, names=names)
    path = write(folder / "large.parquet", rows)
    found = apply(sets, path)
    assert (found.rows, found.batches) == (20_000, 1)
    assert apply(sets, path).duplicates == 1
    assert_holds(sets, slots(), rows, names=names[::300])
    assert sets.info().models[0].elements == 20_000


def test_progress(sets, folder):
    write(folder / "a.parquet", events(1)), write(folder / "b.parquet", events(2))
    seen = []
    files = FileSource(Intake(sets, "user"), progress=seen.append)
    files.apply(files.find([folder]))
    assert [round(entry.done / entry.total, 2) for entry in seen] == [0.5, 1.0]


def test_bad_rows_are_named(sets, folder):
    good, bad = events(1), events(2)
    write(folder / "a.parquet", good)
    bad.loc[3, "x"] = None
    write(folder / "b.parquet", bad)
    with pytest.raises(InputError, match=r"b\.parquet, row 3 .* column 'x' is null"):
        apply(sets, folder)
    assert_holds(sets, slots(), good)  # what was applied before stays
    found = apply(sets, folder, skip=True)
    assert (found.rows, found.skipped, found.duplicates) == (19, 1, 1)
    assert_holds(sets, slots(), good, bad.drop(index=3))
    lines = folder / "c.jsonl"
    lines.write_text('{"user": "ann", "x": 1, "y": 2}\n{"user": "ann", "x": "?", "y": 2}\n')
    with pytest.raises(InputError, match=r"c\.jsonl, row 1 .*: column 'x': expected .* got \"\?\""):
        apply(sets, lines)
    lines.write_text('{"user": "ann", "x": 1, "y": 2}\n{]\n')
    with pytest.raises(InputError, match=r"c\.jsonl, row 1 .*: the line is not valid JSON"):
        apply(sets, lines)
    found = apply(sets, lines, skip=True)
    assert (found.rows, found.skipped) == (1, 1)


def test_damaged_files_are_refused_or_skipped(sets, folder):
    write(folder / "a.parquet", events(1))
    (folder / "b.parquet").write_bytes((folder / "a.parquet").read_bytes()[:-100])
    with pytest.raises(FileError, match=r"b\.parquet"):
        apply(sets, folder)
    errors = []
    files = FileSource(Intake(sets, "user", skip=True), on_error=errors.append)
    files.apply(files.find([folder]))
    assert files.unreadable == len(errors) == 1
    assert_holds(sets, slots(), events(1))


def test_a_file_that_changes_while_it_is_read_is_not_applied(sets, folder, monkeypatch):
    path = write(folder / "a.parquet", events(1))
    original = module.digest_of_file

    def change(file):
        found = original(file)
        write(path, events(2))
        return found

    monkeypatch.setattr(module, "digest_of_file", change)
    with pytest.raises(FileError, match="has changed while it was read"):
        apply(sets, path)
    assert_holds(sets, slots())
    assert sets.info().batches == 0


def test_an_empty_file(sets, folder):
    write(folder / "a.parquet", events(1, 0))
    (folder / "b.jsonl").write_text("")
    found = apply(sets, folder)
    assert (found.batches, found.rows) == (1, 0)
    assert_holds(sets, slots())


def test_a_store_that_changes_meanwhile_is_tried_again(sets, folder, monkeypatch):
    monkeypatch.setattr("setfold.live.sources.intake.SMALL_ROWS", 6)  # a large batch
    path, done = write(folder / "a.parquet", events(1)), []

    def report(_):
        if not done:
            done.append(sets.delete(["nobody"]))

    files = FileSource(Intake(sets, "user"), progress=report)
    files.apply(files.find([path]))
    assert done == [0]
    assert_holds(sets, slots(), events(1))


def test_history_of_a_new_model(sets, folder):
    write(folder / "a.parquet", events(1))
    apply(sets, folder)
    number = sets.add_model(pool())
    write(folder / "b.parquet", events(2))
    apply(sets, folder)
    assert apply(sets, folder, history=True).rows == 20
    assert apply(sets, folder, history=True).duplicates == 2
    sets.switch(number)
    assert_holds(sets, pool(), events(1), events(2))


# ---- folders that are watched --------------------------------------------------------------------


class Looks(threading.Event):
    """An event whose waits are the looks of a watch: something happens before each of them."""

    def __init__(self, *actions):
        super().__init__()
        self.actions = [*actions]

    def wait(self, timeout=None):
        if self.actions:
            self.actions.pop(0)()
        else:
            self.set()


def watching(sets, folder, *actions, **options):
    intake = Intake(sets, **{"set": "user", "features": "x,y", **options})
    files = FileSource(intake, on_error=(lambda error: None) if intake.skip else None)
    watch(files, [folder], 0.0, Looks(*actions))
    return intake


def test_files_are_applied_when_they_stay_the_same(sets, folder):
    path, counts = folder / "a.parquet", []

    def write_half():
        path.write_bytes(b"PAR1 half of a file")
        counts.append(sets.info().batches)

    def write_whole():
        write(path, events(1))
        counts.append(sets.info().batches)

    def look():
        counts.append(sets.info().batches)

    found = watching(sets, folder, write_half, write_whole, look, look, look)
    assert counts == [0, 0, 0, 1, 1]
    assert (found.batches, found.duplicates) == (1, 0)
    assert_holds(sets, slots(), events(1))


def test_new_content_and_new_files_are_applied(sets, folder):
    def nothing():
        pass

    found = watching(
        sets,
        folder,
        lambda: write(folder / "latest.parquet", events(1)),
        nothing,
        nothing,
        lambda: write(folder / "latest.parquet", events(2)),
        lambda: write(folder / "copy.parquet", events(1)),
        nothing,
        nothing,
        lambda: (folder / "latest.parquet").unlink(),
        nothing,
    )
    assert (found.batches, found.duplicates) == (2, 1)
    assert_holds(sets, slots(), events(1), events(2))


def test_hidden_files_and_others_are_ignored(sets, folder):
    write(folder / ".a.parquet", events(1)), write(folder / "_b.parquet", events(2))
    (folder / "notes.txt").write_text("nothing")
    assert watching(sets, folder, *[lambda: None] * 4).batches == 0


def test_a_bad_file_stops_the_watch_or_is_skipped(sets, folder):
    (folder / "a.parquet").write_bytes(b"PAR1 not a file")
    write(folder / "b.parquet", events(1))
    looks = [lambda: None] * 5
    with pytest.raises(FileError, match=r"a\.parquet"):
        watching(sets, folder, *looks)
    assert watching(sets, folder, *looks, skip=True).batches == 1
    assert_holds(sets, slots(), events(1))


def test_a_watch_that_is_stopped_applies_no_more(sets, folder):
    for number in range(5):
        write(folder / f"{number}.parquet", events(number))
    stop = threading.Event()
    intake = Intake(sets, "user")
    files = FileSource(intake, progress=lambda _: stop.set())  # while the first one is read
    watch(files, [folder], 0.0, stop)
    assert intake.batches == 1
    assert sum(sets.count(NAMES)) == 20
