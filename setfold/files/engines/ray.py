"""The Ray engine: tasks on a cluster process shards, and this process merges the results.

Each shard is a Ray task that yields its steps one by one, so a worker has one step in memory at a
time. Steps are consumed in shard order, so the result is the same as with the local engine. The
number of shards in flight is limited: enough to keep all cores busy, few enough to bound the steps
that wait. Steps that do not fit into Ray's object store are spilled to disk by Ray.

Tasks are stateless. If a worker is lost, Ray runs its task again, and steps that were already
consumed are not consumed twice.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import chdir, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from setfold.errors import DistributedError, FileError, InputError, SetfoldError
from setfold.files.engines.task import Shard, Step, Task
from setfold.files.inputs import file_of
from setfold.files.tables.table import from_arrow

SHARDS_PER_CORE = 2  # one in progress, one that is complete or queued
RETRIES = 3  # for a shard whose worker is lost
STORE_BYTES = 256 << 20  # object store, if Ray is started by this process
CONNECT_SECONDS = 10.0

_tasks: dict[str, Task] = {}  # in a worker: its current task, by object id


def steps(
    task: Task, shards: Sequence[Shard], first: int, done: int, *, address: str | None = None
) -> Generator[Step, None, None]:
    """Yield the steps of all shards in order, starting at one of them.

    Args:
        task: How to process a shard.
        shards: All shards.
        first: The index of the shard to start with.
        done: How many of its rows are already done.
        address: Address of a cluster, "host:port", or "auto" for the cluster that this machine
            belongs to. If None, Ray is started on this machine. If this process is already
            connected to Ray, that connection is used.

    Raises:
        InputError: Ray is not installed, or the cluster cannot be reached.
        DistributedError: Workers died too often.
    """
    ray = _import_ray()
    with _connection(ray, address):
        yield from _steps(ray, task, shards, first, done)


def _steps(ray: Any, task: Task, shards: Sequence[Shard], first: int, done: int) -> Iterator[Step]:
    remote = ray.remote(_process_shard).options(num_returns="streaming", max_retries=RETRIES)
    shared = [ray.put(task)]  # in a list, so that Ray does not deserialize it for every shard
    folder = str(Path.cwd())
    waiting = iter(range(first, len(shards)))
    in_flight: deque[tuple[int, Any]] = deque()
    try:
        while True:
            cores = max(1, int(ray.cluster_resources().get("CPU", 1)))  # a cluster may grow
            while (
                len(in_flight) < SHARDS_PER_CORE * cores
                and (number := next(waiting, None)) is not None
            ):
                skip = done if number == first else 0
                in_flight.append(
                    (number, remote.remote(shared, folder, number, shards[number], skip))
                )
            if not in_flight:
                return
            number, references = in_flight[0]
            yield from _receive(ray, references, shards[number])
            in_flight.popleft()
    finally:
        for _, references in in_flight:
            ray.cancel(references)


def _receive(ray: Any, references: Iterator[Any], shard: Shard) -> Iterator[Step]:
    """Yield the steps that a task has yielded, with their tables restored from Arrow."""
    for reference in references:
        try:
            sent = ray.get(reference)
        except ray.exceptions.RayTaskError:  # an error in the model's own code, with its traceback
            raise
        except ray.exceptions.RayError as error:
            raise DistributedError(
                f"Ray could not process {shard.input.path} after {RETRIES} retries: "
                f"{_in_one_line(error)}. If workers ran out of memory, reduce --memory or use "
                "larger machines, then continue with --resume."
            ) from error
        if isinstance(sent, SetfoldError):
            raise sent
        yield sent._replace(tables=tuple(map(from_arrow, sent.tables)))


def _process_shard(
    shared: list[Any], folder: str, number: int, shard: Shard, done: int
) -> Iterator[Step | SetfoldError]:
    """Yield the steps of a shard, in a worker. If an error ends them, yield it last."""
    torch.set_num_threads(1)  # Ray gives each task one core
    # File names may be relative to the folder in which the run was started.
    with torch.no_grad(), chdir(folder) if os.path.isdir(folder) else nullcontext():
        try:
            if not file_of(shard.input.path).exists():
                raise FileError(
                    f"{shard.input.path} does not exist on {socket.gethostname()}. All machines "
                    "of a cluster must see the inputs under the same path; use a shared folder."
                )
            for step in _load_task(shared[0]).steps(number, shard, done):
                # Arrow tables are deserialized several times faster than pickled tensors.
                yield step._replace(tables=tuple(table.to_arrow() for table in step.tables))
        except SetfoldError as error:  # yielded, because Ray would wrap and log a raised error
            yield error


def _load_task(reference: Any) -> Task:
    """Return the task, deserialized once per worker."""
    name = reference.hex()
    if name not in _tasks:
        _tasks.clear()
        _tasks[name] = _import_ray().get(reference)
    return _tasks[name]


# ---- clusters ----------------------------------------------------------------------------------


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise InputError(
            "the engine 'ray' needs the package ray, which is not installed. Run: "
            "pip install 'setfold[ray]'"
        ) from error
    return ray


@contextmanager
def _connection(ray: Any, address: str | None) -> Iterator[None]:
    """Start Ray or connect to a cluster, and shut down afterwards. Reuse an existing connection."""
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
        _connect(ray, address, quiet)
    try:
        yield
    finally:
        ray.shutdown()


def _connect(ray: Any, address: str, settings: dict[str, Any]) -> None:
    try:
        if address != "auto":
            host, _, port = address.rpartition(":")
            # Fails fast; Ray itself would retry for minutes.
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        ray.init(address, **settings)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"cannot connect to a Ray cluster at {address!r}: {_in_one_line(error)}. Expected "
            '"auto" on a machine of the cluster, or the host:port that `ray start --head` prints. '
            "Omit the address to start Ray on this machine."
        ) from error


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
