"""Writers and servers that are killed at any moment: what was acknowledged is there, once.

`make stress` kills a hundred writers; the ordinary tests kill a tenth of that.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pytest

import setfold
from setfold import live
from setfold.errors import StoreError
from tests.killed import calls_of, die_around, die_at
from tests.live.rows import NAMES, assert_holds, make_model, random_rows
from tests.live.server import Server
from tests.paused import PROCESSES

SHARE = 1 if os.environ.get("SETFOLD_STRESS") else 0.1
WRITERS, LOST = 3, 9  # and the exit code of a writer that misses something
STEP = 5  # batches of a writer in a round


def rows_of(writer, number):
    """The rows of a batch: of sets that all writers change, and of some new ones."""
    names = [*NAMES[:4], f"{writer} {number}", f"new {number // 2}"]
    return random_rows((writer, number), 8, names)


def acknowledged(log):
    return len(log.read_bytes()) if log.exists() else 0


def update(sets, writer, number):
    return sets.update(rows_of(writer, number), set="user", batch=(f"w{writer}", number))


def work(url, log, writer, last, life):
    """Write batches, beginning with some that were written before; log each that is acknowledged.

    Args:
        url: The store.
        log: A file that gets a byte for each batch.
        writer: The number of the writer.
        last: The number of batches to write.
        life: Function that arranges the death of this process.
    """
    known = acknowledged(log)
    life()
    with live.open(url) as sets, log.open("ab", buffering=0) as file:
        for number in range(max(known - 2, 0), last):
            found = update(sets, writer, number)
            if number < known and found.status != "duplicate":
                os._exit(LOST)
            if number >= known:
                file.write(b".")


class Writers:
    """Processes that write, and are replaced when they die.

    Args:
        url: The store.
        folder: A folder for their logs.
        draw_life: Function that returns how the next process dies.
    """

    def __init__(self, url, folder, draw_life):
        self.url, self.draw_life = url, draw_life
        self.logs = [folder / f"{writer}.log" for writer in range(WRITERS)]
        self.kills, self.last = 0, 0

    def run(self, last, meanwhile=lambda: None):
        """Let every writer write batches up to a number, however often it dies."""
        self.last = last
        running = {writer: self.start(writer) for writer in range(WRITERS)}
        while running:
            meanwhile()
            for writer, process in [*running.items()]:
                process.join(0.002)
                if process.exitcode is None:
                    continue
                assert process.exitcode in (0, -signal.SIGKILL, -signal.SIGPROF)
                del running[writer]
                if process.exitcode:
                    self.kills += 1
                    running[writer] = self.start(writer)

    def start(self, writer):
        arguments = (self.url, self.logs[writer], writer, self.last, self.draw_life())
        process = PROCESSES.Process(target=work, args=arguments, daemon=True)
        process.start()
        return process

    def assert_right(self, model):
        """All batches are there, each once."""
        batches = [(writer, number) for writer in range(WRITERS) for number in range(self.last)]
        rows = pa.concat_tables([rows_of(*batch) for batch in batches])
        names = sorted({*rows["user"].to_pylist()})
        with live.open(self.url) as sets:
            assert_holds(sets, model, rows, names)
            assert sets.database.check() == []
            with sets.database.reading() as view:
                assert view.totals(1)[:3] == (len(names), len(names), len(rows))
            for batch in batches:
                assert update(sets, *batch).status == "duplicate"
        assert [acknowledged(log) for log in self.logs] == [self.last] * WRITERS


def lives(seed, calls):
    """Return a function that draws deaths: at a call in Python, or at a moment of CPU time."""
    generator = random.Random(seed)

    def draw():
        if generator.random() < 0.7:
            call = generator.randint(1, 3 * calls)
            return lambda: die_at(call)
        seconds = generator.uniform(0.002, 0.15)  # SIGPROF kills it, also within SQLite
        return lambda: signal.setitimer(signal.ITIMER_PROF, seconds)

    return draw


@pytest.mark.long
@pytest.mark.parametrize(("kind", "kills"), [("sqlite", 100), ("postgres", 30)])
def test_writers_that_are_killed(request, tmp_path, kind, kills):
    url = str(tmp_path / "live.db")
    if kind == "postgres":
        url = request.getfixturevalue("server").url()
    model, kills = make_model(), round(SHARE * kills)
    with live.create(url, model) as sets:
        update(sets, 0, 0)  # what happens only once
        calls = calls_of(lambda: update(sets, 0, 1))
    writers, last = Writers(url, tmp_path, lives(0, calls)), 0
    while writers.kills < kills:
        last += STEP
        writers.run(last)
    writers.assert_right(model)


@pytest.mark.long
def test_a_writer_that_dies_around_any_statement(url, tmp_path):
    """Before and after each statement of an update, its commit among them."""
    model, log = make_model(), tmp_path / "0.log"
    statements = ("execute", "executemany")
    with live.create(url, model) as sets:
        update(sets, 0, 0)
        number, exit_code = 0, -signal.SIGKILL
        while exit_code:
            number, known = number + 1, acknowledged(log)

            def write(number=number):
                with live.open(url) as own, log.open("ab", buffering=0) as file:
                    die_around(number, *statements)
                    update(own, 0, number)
                    sys.setprofile(None)
                    file.write(b".")

            process = PROCESSES.Process(target=write)
            process.start()
            process.join()
            exit_code = process.exitcode
            assert exit_code in (0, -signal.SIGKILL)
            found = update(sets, 0, number)
            assert found.status == "duplicate" or acknowledged(log) == known
        assert number > 10
        rows = pa.concat_tables([rows_of(0, batch) for batch in range(number + 1)])
        assert_holds(sets, model, rows, sorted({*rows["user"].to_pylist()}))


@pytest.mark.skipif(SHARE < 1, reason="restarts take seconds; set SETFOLD_STRESS=1 to run")
def test_a_server_that_crashes(tmp_path):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        server = Server(Path(folder) / "server")
        server.create()
        server.start()
        try:
            url, model, crashes = server.url(), make_model(), 10
            live.create(url, model).close()
            writers = Writers(url, tmp_path, lambda: lambda: None)
            generator, crashed = random.Random(0), []

            def crash():
                if len(crashed) < crashes:
                    time.sleep(generator.uniform(0, 0.5))
                    server.stop()
                    server.start()
                    crashed.append(time.monotonic())

            writers.run(400, crash)
            assert (len(crashed), writers.kills) == (crashes, 0)
            writers.assert_right(model)
        finally:
            server.stop()


@pytest.mark.skipif(SHARE < 1, reason="a server takes seconds; set SETFOLD_STRESS=1 to run")
def test_a_server_whose_disk_is_full(tmp_path):
    with tempfile.TemporaryDirectory() as name:
        folder, model, done = Path(name), setfold.SlotSetEncoder(3, 32, 8, 8).double().eval(), []
        folder.chmod(0o755)
        mount = ["mount", "-t", "tmpfs", "-o", "size=110m", "none", name]
        if subprocess.run(mount, check=False).returncode:
            pytest.skip("mounting a small disk needs root")
        server = Server(folder / "server", max_wal_size="32MB", wal_recycle="off")
        try:
            server.create()
            server.start()
            rows = [
                random_rows(seed, 8000, [f"{seed} {n}" for n in range(8000)]) for seed in range(12)
            ]

            def write():
                for number, some in enumerate(rows):
                    sets.update(some, set="user", batch=("orders", number))
                    done.append(number)

            with live.create(server.url(), model) as sets:
                with pytest.raises(StoreError, match=r"disk|connection"):
                    write()
                subprocess.run(["mount", "-o", "remount,size=600m", name], check=True)
                if not server.is_running():  # a log that cannot be written is a crash
                    server.start()
                for number, some in enumerate(rows):
                    found = sets.update(some, set="user", batch=("orders", number))
                    assert found.status == ("duplicate" if number < len(done) else "applied")
                assert 0 < len(done) < len(rows)
                held = pa.concat_tables(rows)
                names = sorted({*held["user"].to_pylist()})
                assert_holds(sets, model, held, names[::2000])
                assert sets.verify() == (len(names), ())
                with sets.database.reading() as view:
                    assert view.totals(1)[2] == len(held)
        finally:
            server.stop()
            subprocess.run(["umount", name], check=True)
