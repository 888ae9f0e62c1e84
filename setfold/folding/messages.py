"""Communication between the processes of a group.

    exchange           every process sends a short message to all others. All receive the same
                       messages, so they all continue, or all raise.
    report_failure     sends an exception to the other processes, which would otherwise wait
    gather             the tensors of all processes
    translate_errors   raises errors of a collective as DistributedError

The only collectives are all_gather and all_reduce, of tensors: gloo and nccl support both. Pickle
is not used.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from setfold.errors import DistributedError, InputError

Message = dict[str, Any]  # serialized as JSON
MAX_BYTES = 1 << 24  # of a message; a larger length is data of another collective
SENT = "_sent_to_processes"  # attribute of an exception that the other processes know
MAX_ERROR = 2000  # characters of an error message that are sent to the other processes


def exchange(
    message: Message,
    group: dist.ProcessGroup | None,
    device: torch.device,
    task: str = "exchange messages",
) -> list[Message]:
    """Send a message to all processes and receive theirs. Every process must call it.

    Args:
        message: the message of this process, with the same keys in every process.
        group: the process group.
        device: a device whose tensors the group can send.
        task: what the caller does, for the error message.

    Returns:
        The messages of all processes, by rank.

    Raises:
        DistributedError: another process reported a failure, or made another call.
        InputError: there is no process group, or it cannot send tensors of this device.
    """
    rank_and_size(group)
    _check_device(group, device)
    own = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
    lengths = gather(torch.tensor(len(own), device=device), group, task).tolist()
    if not all(0 < length <= MAX_BYTES for length in lengths):
        raise _out_of_step()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(own)] = own
    rows = gather(padded.to(device), group, task).cpu()
    messages = [_parse(bytes(row[:n].tolist())) for row, n in zip(rows, lengths, strict=True)]
    _check_failures(messages)
    if any(other.keys() != message.keys() for other in messages):
        raise _out_of_step()
    return messages


@contextmanager
def report_failure(group: dist.ProcessGroup | None, device: torch.device) -> Iterator[None]:
    """Send an exception of the block to the other processes.

    They raise DistributedError in their next `exchange`, without waiting for a timeout. This
    process raises the original exception. In every process, an `exchange` must follow the block.
    Blocks can be nested: an exception is sent once.
    """
    rank_and_size(group)
    try:
        yield
    except DistributedError:
        raise  # all processes raise it
    except Exception as error:
        if not hasattr(error, SENT):
            setattr(error, SENT, True)
            failure = f"{type(error).__name__}: {error}"[:MAX_ERROR]
            with suppress(DistributedError):  # if sending fails too, the original one matters
                exchange({"failure": failure}, group, device)
        raise


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """The rank of this process in the group, and the number of processes.

    Raises:
        InputError: there is no process group, or this process is not in it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise InputError(
            "there is no process group: run the program with torchrun, such as `torchrun "
            "--nproc-per-node 4 train.py`, and call torch.distributed.init_process_group() first."
        )
    try:
        rank = dist.get_rank(group)
    except ValueError:  # the group was destroyed
        rank = -1
    if rank < 0:
        raise InputError(
            "this process is not in the process group, or the group was destroyed. Call "
            "torch.distributed.init_process_group() first, and merge only in processes that are in "
            "the group."
        )
    return rank, dist.get_world_size(group)


def gather(tensor: Tensor, group: dist.ProcessGroup | None, task: str) -> Tensor:
    """Gather the tensors of all processes.

    Args:
        tensor: (...), of the same shape and dtype in every process.
        group: the process group.
        task: what the caller does, for the error message.

    Returns:
        (R, ...), the tensors of all processes, by rank.

    Raises:
        DistributedError: the collective failed.
    """
    _, world = rank_and_size(group)
    rows = tensor.new_empty((world, *tensor.shape))
    if world == 1:
        return rows.copy_(tensor)
    if tensor.numel():
        with translate_errors(group, task):
            dist.all_gather(list(rows.unbind()), tensor.contiguous(), group=group)
    return rows


@contextmanager
def translate_errors(group: dist.ProcessGroup | None, task: str) -> Iterator[None]:
    """Raise errors of a collective as DistributedError, with advice."""
    try:
        yield
    except RuntimeError as error:
        rank, world = rank_and_size(group)
        raise DistributedError(
            f"process {rank} of {world} could not {task} with the others: another process has "
            "died, or did not make the same call within the timeout of the process group (the "
            "argument timeout of init_process_group). Check the output of the other processes. "
            f"({str(error).splitlines()[0]})"
        ) from error


def by_process(values: Iterable[object]) -> str:
    """Format values by rank.

    >>> by_process([3, 4, 3])
    '3 in processes 0, 2; 4 in process 1'
    """
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault("none" if value is None else str(value), []).append(rank)
    return "; ".join(f"{value} in {processes(found)}" for value, found in ranks.items())


def processes(ranks: Sequence[int]) -> str:
    """Format ranks.

    >>> processes([1, 3])
    'processes 1, 3'
    """
    return f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _parse(text: bytes) -> Message:
    """Parse a message; raises DistributedError if it is not one."""
    try:
        message = json.loads(text)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise _out_of_step()
    return message


def _check_failures(messages: Sequence[Message]) -> None:
    """Raise DistributedError if a process reported a failure."""
    failed = [
        f"process {rank} of {len(messages)} failed: {message['failure']}"
        for rank, message in enumerate(messages)
        if "failure" in message
    ]
    if failed:
        raise DistributedError("; ".join(failed))


def _out_of_step() -> DistributedError:
    return DistributedError(
        "the processes are out of step: they make different calls, or other code uses the same "
        "process group at the same time. All processes must make the same calls in the same order. "
        "If other code runs collectives concurrently, pass setfold a separate process group "
        "(torch.distributed.new_group)."
    )


def _check_device(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Raise InputError if the group cannot send tensors of a device.

    torch does not always raise an error itself.
    """
    backends = dist.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
    if f"{device.type}:" not in backends:
        raise InputError(
            f"the state is on {device}, but the backends of the process group are {backends}: move "
            'the model and the elements, or call init_process_group("cpu:gloo,cuda:nccl").'
        )
