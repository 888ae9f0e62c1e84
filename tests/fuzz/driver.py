"""Start workers, notice those that die or hang, and collect what they found."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tests.fuzz.kind import Kind
from tests.fuzz.worker import keep, work

MOST_MEMORY = 3 << 30  # bytes, at which a worker is killed
LOOK_EVERY = 0.1  # seconds
PATIENCE = 300.0  # seconds in which a worker neither reports nor uses any CPU time


@dataclass
class Report:
    """What became of the mutations of one kind."""

    kind: type[Kind]
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0  # of CPU time

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {what}" for what, count in sorted(self.outcomes.items()))
        return f"{self.kind.name:>10}: {counts or 'nothing'} ({self.seconds:.0f} s)"


class Worker:
    """A forked process with its messages."""

    def __init__(self, report: Report, first: int, stop: int) -> None:
        self.report, self.next, self.stop = report, first, stop
        self.begin()

    def begin(self) -> None:
        """Fork a process for the mutations that are left."""
        self.folder = Path(tempfile.mkdtemp(prefix="setfold-fuzz-"))
        self.number: int | None = None  # of the mutation that it is trying
        self.killed = ""  # why, if it was
        self.heard, self.used = time.monotonic(), 0.0
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(reading)
                work(self.report.kind, self.next, self.stop, writing, self.folder)
                status = 0
            except BaseException:  # an error of the fuzzer itself
                traceback.print_exc(file=(self.folder / "trace").open("a"))
            finally:
                os._exit(status)
        os.close(writing)
        self.messages: IO[str] = os.fdopen(reading)

    def hear(self) -> bool:
        """Read one message; False at the end of all."""
        line = self.messages.readline()
        if not line.endswith("\n"):
            return False
        entry = json.loads(line)
        self.heard, self.number = time.monotonic(), entry["number"]
        if "outcome" in entry:
            self._count(entry["outcome"])
        elif "failure" in entry:
            self._fail(entry["failure"])
        return True

    def end(self) -> bool:
        """Bury the process. If it left something undone, begin again, and return True."""
        _, status, usage = os.wait4(self.pid, 0)
        self.messages.close()
        self.report.seconds += usage.ru_utime + usage.ru_stime
        if self.number is not None:
            keep(self.folder / "target", self.report.kind, self.number)
            self._fail((self.killed or _death(status)) + _trace(self.folder))
        elif status and self.next < self.stop:  # before the first mutation
            self.report.failures[-1] = f"cannot begin: {_death(status)}{_trace(self.folder)}"
            self.next = self.stop
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.next < self.stop:
            self.begin()
            return True
        return False

    def check(self) -> None:
        """Kill the process if it takes very much memory, or has done nothing for long."""
        if _resident(self.pid) > MOST_MEMORY:
            self.killed = "takes very much memory"
            os.kill(self.pid, signal.SIGTERM)
        if time.monotonic() - self.heard < PATIENCE:
            return
        used = _cpu_seconds(self.pid)
        if used - self.used < 0.01:
            self.killed = "hangs: it waits for something"
            os.kill(self.pid, signal.SIGTERM)
        self.heard, self.used = time.monotonic(), used

    def _count(self, outcome: str) -> None:
        self.report.outcomes[outcome] += 1
        self.next, self.number = self.number + 1, None

    def _fail(self, text: str) -> None:
        self.report.failures[self.number] = text
        self._count("failed")


def fuzz(kinds: Iterable[type[Kind]], first: int, count: int, at_once: int) -> Iterator[Report]:
    """Try mutations of some kinds, and yield a report for each.

    Args:
        kinds: the kinds.
        first: the number of the first mutation.
        count: how many for each kind.
        at_once: how many processes.
    """
    waiting = list(kinds)
    with selectors.DefaultSelector() as selector:
        while waiting or selector.get_map():
            while waiting and len(selector.get_map()) < at_once:
                worker = Worker(Report(waiting.pop(0)), first, first + count)
                selector.register(worker.messages, selectors.EVENT_READ, worker)
            for key, _ in selector.select(timeout=LOOK_EVERY):
                worker = key.data
                if worker.hear():
                    continue
                selector.unregister(worker.messages)
                if worker.end():
                    selector.register(worker.messages, selectors.EVENT_READ, worker)
                else:
                    yield worker.report
            for key in list(selector.get_map().values()):
                key.data.check()


def _death(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGXCPU:
        return "hangs: it took more CPU time than allowed"
    return f"crashes: {signal.Signals(-code).name}" if code < 0 else f"ends with status {code}"


def _trace(folder: Path) -> str:
    path = folder / "trace"
    text = path.read_text(errors="replace").strip() if path.exists() else ""
    return f"\n{text[:3000]}" if text else ""


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
