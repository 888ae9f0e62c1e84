"""Load a service on this machine: updates of one element from many clients, and reads of one set.

The clients are connections of this process, each of which sends the next request when it has the
answer to the last one. They share the cores with the service.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import setfold
from bench.results import Load
from setfold import live

SETS = 10_000
FEATURES = ["x", "y", "z"]
READS = 300


class Client(asyncio.Protocol):
    """A connection that sends one request after the other.

    Args:
        request: Makes the next request, as bytes; None if it was the last one.
    """

    def __init__(self, request: Callable[[], bytes | None]) -> None:
        self.request = request
        self.times: list[float] = []
        self.failed: list[str] = []
        self.received = b""
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._send()

    def _send(self) -> None:
        request = self.request()
        if request is None:
            self.transport.close()
            return
        self.begun = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, _, body = self.received.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        if not length or len(body) < int(length):
            return
        self.times.append(time.perf_counter() - self.begun)
        if not head.startswith(b"HTTP/1.1 200"):
            self.failed.append(self.received.decode())
        self.received = b""
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Serve a new store in another process; yields host, port and the id of the process."""
    encoder = setfold.SlotSetEncoder(dim_in=len(FEATURES), num_slots=4, dim_slot=8, dim_out=16)
    live.create(folder / "live.db", encoder.eval()).close()
    command = [sys.executable, "-m", "setfold.cli", "live", "serve", str(folder / "live.db")]
    environment = {name: value for name, value in os.environ.items() if name != "SETFOLD_TOKEN"}
    with subprocess.Popen(
        [*command, "--port", "0"], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            host, port = process.stdout.readline().rpartition("//")[2].strip().split(":")
            yield host, int(port), process.pid
        finally:
            process.terminate()


async def load(
    host: str, port: int, requests: list[Callable[[], bytes | None]]
) -> tuple[float, list[float], list[str]]:
    """Return the seconds that all requests took, the time of each, and the answers of failed ones."""
    loop, begun = asyncio.get_running_loop(), time.perf_counter()
    clients = [
        (await loop.create_connection(lambda make=make: Client(make), host, port))[1]  # type: ignore[misc]
        for make in requests
    ]
    await asyncio.gather(*(client.done for client in clients))
    took = time.perf_counter() - begun
    times = [each for client in clients for each in client.times]
    return took, times, [text for client in clients for text in client.failed]


def updates(client: int, seconds: float) -> Callable[[], bytes | None]:
    """Return what makes updates of one element, for some seconds."""
    end, number = time.monotonic() + seconds, 0

    def make() -> bytes | None:
        nonlocal number
        if time.monotonic() > end:
            return None
        number += 1
        row = {"user": f"user {(client * 7919 + number * 104729) % SETS}", "x": 0.5, "y": number}
        body = json.dumps(
            {
                "batch": ["bench", client, number],
                "set": "user",
                "features": FEATURES,
                "rows": [row | {"z": client}],
            }
        ).encode()
        return (
            b"POST /v1/updates HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )

    return make


def reads(count: int) -> Callable[[], bytes | None]:
    """Return what makes reads of one set."""
    numbers = iter(range(count))

    def make() -> bytes | None:
        number = next(numbers, None)
        if number is None:
            return None
        path = f"/v1/sets/user%20{number * 104729 % SETS}"
        return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()

    return make


def memory_of(process: int) -> float:
    """Return the memory of a process in MB; 0 if the system does not tell."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def seconds_of(process: int) -> float:
    """Return the CPU time of a process; 0 if the system does not tell."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _measure(host: str, port: int, process: int, seconds: float, clients: int) -> Load:
    warm_up = [updates(number, seconds / 5) for number in range(1000, 1000 + clients)]
    await load(host, port, warm_up)
    before, own, used = memory_of(process), time.process_time(), seconds_of(process)
    took, times, failed = await load(
        host, port, [updates(number, seconds) for number in range(clients)]
    )
    after, own, used = memory_of(process), time.process_time() - own, seconds_of(process) - used
    _, alone, more = await load(host, port, [reads(READS)])
    return Load(clients, times, took, used, own, before, after, alone, failed + more)


def measure(folder: Path, seconds: float, clients: int) -> Load:
    """Load a service on a new store in a folder."""
    with serving(folder) as (host, port, process):
        return asyncio.run(_measure(host, port, process, seconds, clients))
