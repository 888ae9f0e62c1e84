"""Processes that talk: a short message of each before data moves, and failures that reach all.

    exchange         what every process has to say. All see the same messages, so all come to the same
                     verdict: either all go on, or all raise.
    report_failure   what fails in one process is told to the others, which would wait for it
    gathered         the tensors of all

There are two collectives, all_gather and all_reduce, of plain tensors: gloo and nccl have both, and
nothing is pickled.
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

Message = dict[str, Any]  # what JSON can say
LONGEST = 1 << 24  # bytes of a message; more are not one, but what another collective sent
TOLD = 2000  # characters of an error that the other processes get to see


def exchange(
    message: Message, group: dist.ProcessGroup | None, device: torch.device
) -> list[Message]:
    """What every process has to say, in the order of their ranks; every process calls it.

    Args:
        message: what this process has to say, with the same keys everywhere.
        group: the processes.
        device: where the group can move tensors.

    Raises:
        DistributedError: a process had a failure to tell, or is not in step with the others.
    """
    rank_and_size(group)
    _refuse_unserved(group, device)
    own = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
    doing = "exchange messages"
    lengths = gathered(torch.tensor(len(own), device=device), group, doing).tolist()
    if not all(0 < length <= LONGEST for length in lengths):
        raise _out_of_step()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(own)] = own
    rows = gathered(padded.to(device), group, doing).cpu()
    messages = [_read(bytes(row[:n].tolist())) for row, n in zip(rows, lengths, strict=True)]
    _refuse_failures(messages)
    if any(other.keys() != message.keys() for other in messages):
        raise _out_of_step()
    return messages


@contextmanager
def report_failure(group: dist.ProcessGroup | None, device: torch.device) -> Iterator[None]:
    """A context whose failure is told to the other processes, which wait in their next exchange.

    There they raise DistributedError at once; here the error goes its way. What follows the context
    must be an exchange, in every process.
    """
    rank_and_size(group)
    try:
        yield
    except DistributedError:
        raise  # of this the others know
    except Exception as error:
        told = f"{type(error).__name__}: {error}"[:TOLD]
        with suppress(DistributedError):  # that of telling it; if others are gone, this one counts
            exchange({"failure": told}, group, device)
        raise


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """The rank of this process in the group, and how many processes there are."""
    if not (dist.is_available() and dist.is_initialized()):
        raise InputError(
            "there is no group of processes: run the program under torchrun, such as `torchrun "
            "--nproc-per-node 4 train.py`, and call torch.distributed.init_process_group() first."
        )
    try:
        rank = dist.get_rank(group)
    except ValueError:  # one that has been destroyed
        rank = -1
    if rank < 0:
        raise InputError(
            "this process is not in the group, or the group has been destroyed: run the program under "
            "torchrun, call torch.distributed.init_process_group() first, and only the members of a "
            "group may merge over it."
        )
    return rank, dist.get_world_size(group)


def gathered(tensor: Tensor, group: dist.ProcessGroup | None, doing: str) -> Tensor:
    """The tensors (R, ...) of all processes, which have the same shape, in the order of ranks."""
    _, world = rank_and_size(group)
    rows = tensor.new_empty((world, *tensor.shape))
    if world == 1:
        return rows.copy_(tensor)
    if tensor.numel():
        with watched(group, doing):
            dist.all_gather(list(rows.unbind()), tensor.contiguous(), group=group)
    return rows


@contextmanager
def watched(group: dist.ProcessGroup | None, doing: str) -> Iterator[None]:
    """A context for one collective: what gloo and nccl raise gets a name, and says what to do."""
    try:
        yield
    except RuntimeError as error:
        rank, world = rank_and_size(group)
        raise DistributedError(
            f"process {rank} of {world} could not {doing} with the others: another process has died, "
            "or did not come within the group's timeout (init_process_group's timeout). Look at the "
            f"output of the other processes. ({str(error).splitlines()[0]})"
        ) from error


def by_process(said: Iterable[object]) -> str:
    """Who said what: "3 in processes 0, 2; 4 in process 1"."""
    ranks: dict[str, list[int]] = {}
    for rank, one in enumerate(said):
        ranks.setdefault("none" if one is None else str(one), []).append(rank)
    return "; ".join(f"{one} in {processes(who)}" for one, who in ranks.items())


def processes(ranks: Sequence[int]) -> str:
    """Some processes in words."""
    return f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _read(text: bytes) -> Message:
    try:
        message = json.loads(text)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise _out_of_step()
    return message


def _refuse_failures(messages: Sequence[Message]) -> None:
    failed = [
        f"process {rank} of {len(messages)} failed: {message['failure']}"
        for rank, message in enumerate(messages)
        if "failure" in message
    ]
    if failed:
        raise DistributedError("; ".join(failed))


def _out_of_step() -> DistributedError:
    return DistributedError(
        "the processes are out of step: what came is not what was to come. All must make the same calls "
        "in the same order; give setfold a group of its own (torch.distributed.new_group) if other "
        "messages travel at the same time."
    )


def _refuse_unserved(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Raise if the group moves no tensors of that device; torch would say so, or just not do it."""
    served = dist.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
    if f"{device.type}:" not in served:
        raise InputError(
            f"the group moves tensors by {served}, and the state is on {device}: move the model and the "
            'elements, or call init_process_group("cpu:gloo,cuda:nccl").'
        )
