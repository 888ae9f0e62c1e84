"""Target 16: live sets in a database, compared with raw upserts and with rewriting a file.

The time of a batch is wall time, because a commit waits for the disk; the tables show the CPU time
of this process and of the database, too. Each round gives every contender the same batches.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median

import pyarrow as pa

from bench import serve
from bench.plan import (
    BOUNDS,
    LIVE_SCALE_SLOTS,
    LIVE_SLOTS,
    LIVE_WIDTH,
    LIVE_WRITERS,
    Plan,
    power,
)
from bench.results import LiveCost, Rate, Results, Target
from bench.server import NoServerError
from bench.stores import (
    Events,
    StateFile,
    Stores,
    lacking_space,
    name_of,
    timed,
)
from bench.timing import Timings
from setfold import live
from setfold.live.sources.records import RecordReader

LIVE, RAW, READ_WRITE = "live sets", "raw upserts", "raw reads and upserts"
FEW, REWRITING = "live sets, few kept", "rewriting a file of states"
MANY, SMALL, SCALE = "many", "few", "scale"  # names of stores
WRITER_SETS, WRITER_BATCHES = 1_000, 8  # sets of a batch of a writer; prepared batches
LIVE_NOTES = (
    f"An element has {LIVE_WIDTH} numbers and a state {LIVE_SLOTS * 8 * (LIVE_WIDTH + 1):,} bytes. "
    "A batch has one element of each set that it touches, in one durable transaction: SQLite syncs "
    "its log, and so does PostgreSQL, which has a server on this machine.",
    f"{RAW}: as many bytes for the same sets, in a table of names and states with the same "
    f"settings, without looking at what is there. {READ_WRITE}: the old bytes are read before. The "
    "target is relative to raw upserts, by wall time; CPU times are of the process and the server.",
    f"{REWRITING}: `encode_sets(states=)` on the batch and `merge_states` with the file of all "
    "sets. It was measured once.",
    f"Work of one core: events per second of CPU time, of the process and the server, with states "
    f"of {LIVE_SCALE_SLOTS * 8 * (LIVE_WIDTH + 1):,} bytes.",
    "Writers are processes on sets of their own, each with batches of "
    f"{WRITER_SETS:,} sets. The service and its clients share the cores.",
)


class LiveBench:
    """The measurements of live sets, which share stores.

    Args:
        plan: Sizes.
        directory: A folder on disk.
    """

    def __init__(self, plan: Plan, directory: Path) -> None:
        self.plan, self.directory = plan, directory
        self.events = Events()
        self.stores: Stores | None = None
        self.folder: tempfile.TemporaryDirectory[str] | None = None

    # ---- stores ------------------------------------------------------------------------------

    def open(self, results: Results, make: Callable[[Path], Stores]) -> None:
        """Fill stores, and the table for raw upserts."""
        reason = lacking_space(self.directory, self.plan)
        if reason is None:
            self.folder = tempfile.TemporaryDirectory(dir=self.directory)
            Path(self.folder.name).chmod(0o755)  # a server may have a user of its own
            atexit.register(self.close)
            try:
                self.stores = make(Path(self.folder.name).resolve())
            except NoServerError as error:
                reason = str(error)
        if self.stores is None:
            self.close()
            results.omissions.append(f"Live sets in a database were left out: {reason}.")
            return
        self.stores.create(MANY, LIVE_SLOTS, self.plan.live_sets, self.events)
        self.stores.create(SMALL, LIVE_SLOTS, self.plan.live_few, self.events)
        self.stores.create(SCALE, LIVE_SCALE_SLOTS, self.plan.live_scale_sets, self.events)
        self.stores.fill_raw(MANY)
        self.stores.settle()

    def close(self) -> None:
        """Remove the stores."""
        atexit.unregister(self.close)
        if self.stores is not None:
            self.stores.close()
        if self.folder is not None:
            with suppress(OSError):  # files of a server that has just ended
                self.folder.cleanup()
        self.stores = self.folder = None

    def with_stores(self, results: Results, run: Callable[[Results, Stores], None]) -> None:
        """Run a measurement, unless there are no stores."""
        if self.stores is not None:
            run(results, self.stores)

    # ---- batches -----------------------------------------------------------------------------

    def compare(self, results: Results, stores: Stores, touched: int) -> None:
        """Measure batches that touch some sets, by all contenders in turn, and judge them."""
        size, rounds = LIVE_SLOTS * 8 * (LIVE_WIDTH + 1), range(1 + self.plan.live_rounds)
        batches = range(self.plan.live_batches[touched])
        contenders = (LIVE, RAW, READ_WRITE, FEW)
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        for number in rounds:
            chosen = [self.events.choose(self.plan.live_sets, touched) for _ in batches]
            few = [self.events.choose(self.plan.live_few, touched) for _ in batches]
            names = [[b"%s\0\1" % name_of(n).encode() for n in sorted(own)] for own in chosen]
            runs = {
                LIVE: partial(_update, stores, MANY, [*map(self.events.of, chosen)]),
                RAW: partial(_upsert, stores, names, self._blobs(names, size), read=False),
                READ_WRITE: partial(_upsert, stores, names, self._blobs(names, size), read=True),
                FEW: partial(_update, stores, SMALL, [*map(self.events.of, few)]),
            }
            for name in (*runs, *runs)[number % len(runs) :][: len(runs)]:
                took = timed(runs[name], stores.cpu_seconds)
                samples[name] += [took] if number else []  # the first round is the warm-up
        wall, cpu = (
            Timings({n: [took[i] / len(batches) for took in s] for n, s in samples.items()})
            for i in (0, 1)
        )
        cost = LiveCost(stores.title, self.plan.live_sets, touched, wall, cpu)
        results.live.append(cost)
        self._judge(results, cost)

    def _blobs(self, names: Sequence[Sequence[bytes]], size: int) -> list[list[bytes]]:
        return [self.events.blobs(len(own), size) for own in names]

    def _judge(self, results: Results, cost: LiveCost) -> None:
        where = f"{cost.database}, batches of {cost.touched:,} sets"
        measured, cpu = cost.wall.ratio(RAW, LIVE), cost.cpu.ratio(RAW, LIVE)
        _judge(results, f"throughput / that of {RAW}, {where}", measured, "raw", f"CPU {cpu:.2f}×")
        measured, cpu = cost.wall.ratio(LIVE, FEW), cost.cpu.ratio(LIVE, FEW)
        sizes = f"{power(self.plan.live_sets)} sets kept / {power(self.plan.live_few)}"
        claim = f"time of a batch, {sizes}, {where}"
        _judge(results, claim, measured, "kept", f"CPU {cpu:.2f}×", at_least=False)

    def rewrite(self, results: Results, stores: Stores) -> None:
        """Measure batches by rewriting a file of states, which takes long, for the table."""
        assert self.folder is not None
        file = StateFile(stores.opened[MANY], Path(self.folder.name))
        for place, cost in enumerate(results.live):
            samples = []
            for _ in range(self.plan.live_rewrites):
                rows = self.events.of(self.events.choose(cost.kept, cost.touched))
                samples.append(timed(partial(file.update, rows), time.process_time))
            wall, cpu = (
                Timings({**timings.samples, REWRITING: [took[i] for took in samples]})
                for i, timings in enumerate((cost.wall, cost.cpu))
            )
            results.live[place] = LiveCost(cost.database, cost.kept, cost.touched, wall, cpu)
        file.remove()

    # ---- reads, and the work of a core -------------------------------------------------------

    def read(self, results: Results, stores: Stores) -> None:
        """Measure reads of one set."""
        store, chosen = stores.opened[MANY], self.events.choose(self.plan.live_sets, 10**9)
        numbers = chosen[: self.plan.live_reads].tolist()
        took = []
        for number in numbers:
            took.append(timed(partial(store.encode, [name_of(number)]), time.process_time))
        wall, cpu = (1e3 * median(column) for column in zip(*took, strict=True))
        claim = f"median time to encode one set, in process, {stores.title}"
        _judge(results, claim, wall, "read_ms", f"CPU {cpu:.2f} ms", unit="ms", at_least=False)
        results.rates.append(Rate(f"`encode` of one set, {stores.title}", 1e3 / cpu))

    def work(self, results: Results, stores: Stores) -> None:
        """Measure the events that one core absorbs."""
        events = self.plan.live_scale_events
        each = max(1, events // 100)  # sets, with a hundred events each
        kinds = (
            (events, "events of different sets absorbed"),
            (each, "events absorbed, 100 of each set"),
        )
        for sets, what in kinds:
            took = []
            for number in range(1 + self.plan.live_rounds):
                chosen = self.events.choose(self.plan.live_scale_sets, sets)
                rows = self.events.of(chosen.repeat(max(1, events // len(chosen))))
                own = timed(partial(stores.update, SCALE, rows), stores.cpu_seconds)
                took += [own[1] / len(rows)] if number else []
            what = f"{what}, batches of {events:,}, {stores.title}"
            results.rates.append(Rate(what, 1 / max(median(took), 1e-9)))

    def parse(self, results: Results) -> None:
        """Measure the JSON records that one core parses."""
        rows = self.events.of(self.events.choose(self.plan.live_scale_sets, 10**9))
        records = [json.dumps(row).encode() for row in rows.to_pylist()]
        took = []
        for _ in range(self.plan.live_rounds):
            reader = RecordReader(records, {}, ["user"], [], [])
            read = partial(_drain, reader.read(rows.column_names, rows=1 << 16))
            took.append(timed(read, time.process_time)[1])
        each = sum(map(len, records)) / len(records)
        what = f"JSON records of {each:.0f} bytes parsed"
        results.rates.append(Rate(what, len(records) / median(took)))

    # ---- writers and the service -------------------------------------------------------------

    def write_together(self, results: Results, stores: Stores) -> None:
        """Compare several writers with one."""
        rates: dict[int, list[float]] = {1: [], LIVE_WRITERS: []}
        for number in range(min(3, self.plan.live_rounds)):
            for writers in rates:
                rates[writers].append(self._rate_of(writers, number, stores.url(MANY)))
        ratio = median(many / one for many, one in zip(rates[LIVE_WRITERS], rates[1], strict=True))
        claim = f"throughput of {LIVE_WRITERS} writers / of one, {stores.title}"
        detail = f"{median(rates[1]):,.0f} sets/s by one, {os.cpu_count()} cores"
        _judge(results, claim, ratio, "writers", detail)

    def _rate_of(self, writers: int, number: int, url: str) -> float:
        """Return the sets per second that some writers change together."""
        context = multiprocessing.get_context("fork")  # a copy of this process starts at once
        barrier, processes = context.Barrier(writers), []
        for writer in range(writers):
            receiver, sender = context.Pipe(duplex=False)
            source = f"writer {writers} {number} {writer}"
            words = (url, source, writer, self.plan, barrier, sender)
            process = context.Process(target=write_alone, args=words)
            process.start()
            sender.close()
            processes.append((process, receiver))
        rate = 0.0
        for process, receiver in processes:
            rate += receiver.recv()
            process.join()
        return rate

    def serve(self, results: Results) -> None:
        """Measure the service under load."""
        with tempfile.TemporaryDirectory(dir=self.directory) as folder:
            found = serve.measure(Path(folder), self.plan.live_seconds, self.plan.live_clients)
        results.load = found
        judge = partial(_judge, results)
        clients = f"{found.clients} clients"
        judge(f"updates of one element per second, {clients}", found.rate, "service", unit="/s")
        judge(
            "growth of the service's memory meanwhile",
            *(found.after - found.before, "growth_megabytes"),
            unit="MB",
            at_least=False,
        )
        target = Target(16, "requests that failed", len(found.failed), 0, "", at_least=False)
        results.targets.append(target)
        judge(
            "median time to encode one set, over HTTP",
            *(1e3 * median(found.reads), "http_ms"),
            unit="ms",
            at_least=False,
        )


def write_alone(
    url: str, source: str, writer: int, plan: Plan, barrier: Barrier, sender: Connection
) -> None:
    """Change sets that no other writer changes for some seconds, and send how many per second."""
    events, share = Events(writer), plan.live_sets // LIVE_WRITERS
    tables = [
        events.of(writer * share + events.choose(share, WRITER_SETS)) for _ in range(WRITER_BATCHES)
    ]
    with live.open(url) as store:
        barrier.wait()
        begin, batch, rows = time.perf_counter(), 0, 0
        while time.perf_counter() - begin < plan.live_seconds:
            table = tables[batch % len(tables)]
            store.update(table, set="user", batch=(source, batch))
            batch, rows = batch + 1, rows + len(table)
        sender.send(rows / (time.perf_counter() - begin))


def _update(stores: Stores, name: str, tables: Sequence[pa.Table]) -> None:
    for table in tables:
        stores.update(name, table)


def _upsert(
    stores: Stores,
    names: Sequence[Sequence[bytes]],
    states: Sequence[Sequence[bytes]],
    *,
    read: bool,
) -> None:
    for own, content in zip(names, states, strict=True):
        stores.upsert(own, content, read=read)


def _drain(batches: Iterator[pa.RecordBatch]) -> None:
    for _ in batches:
        pass


def _judge(
    results: Results,
    claim: str,
    measured: float,
    bound: str,
    detail: str = "",
    *,
    unit: str = "x",
    at_least: bool = True,
) -> None:
    limit = getattr(BOUNDS, f"live_{bound}")
    target = Target(16, claim, measured, limit, unit, at_least=at_least, detail=detail)
    results.targets.append(target)
