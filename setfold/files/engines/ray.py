"""The engine for a cluster: Ray. Tasks read pieces wherever there is a core, this process merges.

Each piece is a Ray task that yields its steps one by one, so a worker holds one step at a time. Steps are
taken in the order of pieces, so the result is that of the local engine. A window of pieces is under way:
enough to keep all cores busy, few enough that what waits to be taken is bounded. What does not fit into
Ray's store waits on disk.

A task keeps nothing. One whose worker is lost runs again, and the steps that were taken before are not
taken twice.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from setfold.errors import DistributedError, FileError, InputError, SetfoldError
from setfold.files.engines.task import Piece, Step, Task
from setfold.files.tables.table import from_arrow

PIECES_PER_CORE = 2  # one at work, one that is done or waits
RETRIES = 3  # of a piece whose worker was lost
STORE_BYTES = 256 << 20  # of shared memory, where Ray is started here
CONNECT_SECONDS = 10.0

_tasks: dict[str, Task] = {}  # in a worker: the task that it has, by the id of its object


def steps(
    task: Task, pieces: Sequence[Piece], first: int, done: int, *, address: str | None = None
) -> Iterator[Step]:
    """The steps of all pieces in order, from one piece on.

    Args:
        task: what to do with a piece.
        pieces: all of them.
        first: the number of the piece to begin with.
        done: rows of it that are done.
        address: of a cluster, "host:port", or "auto" for the one that this machine belongs to; None to start Ray on this
            machine. Where this process has started Ray or joined a cluster already, that is used.

    Raises:
        InputError: Ray is not installed, or the cluster cannot be reached.
        DistributedError: workers died too often.
    """
    ray = _ray()
    with _connected(ray, address):
        yield from _steps(ray, task, pieces, first, done)


def _steps(ray: Any, task: Task, pieces: Sequence[Piece], first: int, done: int) -> Iterator[Step]:
    remote = ray.remote(_work).options(num_returns="streaming", max_retries=RETRIES)
    shared = [ray.put(task)]  # in a list, so that Ray does not unpack it anew for every piece
    folder = str(Path.cwd())
    waiting = iter(range(first, len(pieces)))
    under_way: deque[tuple[int, Any]] = deque()
    try:
        while True:
            cores = max(1, int(ray.cluster_resources().get("CPU", 1)))  # a cluster may grow
            while (
                len(under_way) < PIECES_PER_CORE * cores
                and (number := next(waiting, None)) is not None
            ):
                skip = done if number == first else 0
                under_way.append(
                    (number, remote.remote(shared, folder, number, pieces[number], skip))
                )
            if not under_way:
                return
            number, found = under_way[0]
            yield from _taken(ray, found, pieces[number])
            under_way.popleft()
    finally:
        for _, found in under_way:
            ray.cancel(found)


def _taken(ray: Any, found: Iterator[Any], piece: Piece) -> Iterator[Step]:
    """What a task has yielded, as it was before it was sent."""
    for reference in found:
        try:
            sent = ray.get(reference)
        except ray.exceptions.RayTaskError:  # an error in the model's own code, with its traceback
            raise
        except ray.exceptions.RayError as error:
            raise DistributedError(
                f"Ray could not finish {piece.input.path}, not in {RETRIES} retries either: {_in_one_line(error)}. If "
                "workers ran out of memory, give --memory less or the machines more, and go on with --resume."
            ) from error
        if isinstance(sent, SetfoldError):
            raise sent
        yield sent._replace(tables=tuple(map(from_arrow, sent.tables)))


def _work(
    shared: list[Any], folder: str, number: int, piece: Piece, done: int
) -> Iterator[Step | SetfoldError]:
    """The steps of a piece, in a worker; last, the error that ended them, if one did."""
    torch.set_num_threads(1)  # Ray gives each task one core
    # Names of files may be relative to where the run was started.
    with torch.no_grad(), chdir(folder) if os.path.isdir(folder) else nullcontext():
        try:
            if not piece.input.path.exists():
                raise FileError(
                    f"{piece.input.path} is not there on {socket.gethostname()}: all machines of a cluster must see the "
                    "files under the same name, as in a shared folder."
                )
            for step in _task(shared[0]).steps(number, piece, done):
                # Arrow is unpacked several times faster than pickled tensors are.
                yield step._replace(tables=tuple(table.to_arrow() for table in step.tables))
        except SetfoldError as error:  # as a value: Ray would wrap it, and log it
            yield error


def _task(reference: Any) -> Task:
    """The task, unpacked once in each worker."""
    name = reference.hex()
    if name not in _tasks:
        _tasks.clear()
        _tasks[name] = _ray().get(reference)
    return _tasks[name]


# ---- clusters ----------------------------------------------------------------------------------


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise InputError(
            "the engine 'ray' needs ray, which is not installed; type: pip install 'setfold[ray]'"
        ) from error
    return ray


@contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    """Start Ray, or join a cluster, unless this process has done so; leave all as it was."""
    if ray.is_initialized():
        yield
        return
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            "local",
            num_cpus=os.cpu_count(),
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            **quiet,
        )
    else:
        _join(ray, address, quiet)
    try:
        yield
    finally:
        ray.shutdown()


def _join(ray: Any, address: str, settings: dict[str, Any]) -> None:
    try:
        if address != "auto":
            host, _, port = address.rpartition(":")
            # Ray itself would knock for minutes.
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        ray.init(address, **settings)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f'cannot reach a Ray cluster at {address!r}: {_in_one_line(error)}. Expected "auto" on a machine of the '
            "cluster, or host:port as `ray start --head` tells it; without an address Ray is started on this machine."
        ) from error


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
