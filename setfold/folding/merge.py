"""Sets that are sharded over processes. Each folds its shard; `all_merge` merges the states.

    agree       the number of sets and the seed, at the beginning of a pass
    all_merge   the state of the whole set, in every process

Shapes: R processes, S numbers in the statistics of one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from setfold.core.state import SetState
from setfold.core.state_files import describe_fields
from setfold.core.statistic import Statistics, join
from setfold.errors import DistributedError, InputError, StateMismatchError
from setfold.folding.messages import (
    Message,
    by_process,
    exchange,
    gather,
    processes,
    rank_and_size,
    report_failure,
    translate_errors,
)
from setfold.kernels.modes import accumulator_dtype, differentiable_once

_TICKETS = itertools.count()
SAME = 1e-6  # relative tolerance for slots, which machines may round differently
MODEL = "Fold every shard with the same model"
ALIKE = {  # what must be equal in all processes: its name and advice for the error message
    "fields": ("fields", MODEL),
    "sets": (
        "numbers of sets",
        "Every process must fold its shard of the same sets. A set of which a process has no "
        "elements stays empty",
    ),
    "weights": (
        "weights",
        f"{MODEL}: load the same weights in every process, or wrap it in DistributedDataParallel, "
        "which broadcasts those of process 0",
    ),
    "slots": ("shapes of slots", "Begin every state with the same number of slots"),
    "context": ("contexts", "All states must follow the same earlier pass"),
    "dtype": ("dtypes", "Keep all states on devices of the same type"),
    "grad": ("gradient modes", "Call all_merge under torch.no_grad() in every process or in none"),
}


def all_merge(state: SetState, group: dist.ProcessGroup | None = None) -> SetState:
    """Merge the states of all processes. Every process of the group must call it.

    The statistics of all processes are gathered and joined in the order of ranks, so the result is
    bitwise equal in all processes. Slots and context are those of this process, with their graph.

    Gradients are those of the sum of the losses of all processes. In the backward pass, each
    process receives the sum of the gradients of all losses with respect to its statistics.
    DistributedDataParallel averages over processes, so it computes the gradient of the mean of the
    losses. This includes the parameters of the readout and of a head, for which each process
    contributes the gradient of its own loss.

    The backward pass is a collective: every process must run it, and equally often. A process
    without a loss calls `(encoding * 0).sum().backward()`. A process with an empty shard takes part
    as well; the parameters of its encoder get gradients of zero. Parameters outside the encoder
    that DistributedDataParallel manages, such as those of a network that computes the elements,
    have no gradient if the shard is empty. In this case pass all_merge or DistributedDataParallel a
    separate process group (torch.distributed.new_group), so that their collectives do not
    interfere.

    Args:
        state: the state of this process's shard of B sets. All processes must begin with the same
            slots.
        group: the process group; None for the default group.

    Returns:
        The state of the whole sets (B sets), in every process.

    Raises:
        StateMismatchError: the states cannot be merged; raised in every process.
        DistributedError: another process has failed or died, or did not make the same call.
        InputError: there is no process group, or this process is not in it.

    >>> import setfold  # torchrun starts several processes, and provides store and rank
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> encoder = setfold.SlotSetEncoder(dim_in=3, num_slots=4, dim_slot=8, dim_out=8).eval()
    >>> shard = torch.randn(1, 100, 3)  # this process's
    >>> state = all_merge(encoder.update(encoder.initial_state(), shard))
    >>> encoder.readout(state).shape
    torch.Size([1, 4, 8])
    >>> dist.destroy_process_group()
    """
    _, world = rank_and_size(group)
    device = _device_of(state, group)
    with report_failure(group, device):
        state = _validate(state)
        message = _describe(state)
    messages = exchange(message, group, device)
    if world == 1:
        return state
    _check_alike(messages)
    count = _add_counts(state, group)
    ticket = messages[0]["ticket"] if any(m["tracked"] for m in messages) else None
    rows = _gather_statistics(state, group, ticket)
    parts = (_unflatten(row, state.statistics) for row in rows.unbind())
    statistics = reduce(lambda left, right: join(state.fields, left, right), parts)
    return state.with_statistics(statistics, count)


def agree(
    sets: int | None,
    seed: int,
    alike: Message,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> tuple[int, int]:
    """Agree on the number of sets and the seed of a pass. Every process must call it.

    Args:
        sets: the number of sets in this process's shard; None if it has no chunks.
        seed: the seed that this process proposes.
        alike: by name, values that must be equal in all processes.
        group: the process group.
        device: a device whose tensors the group can send.

    Returns:
        The number of sets, and the seed of process 0.

    Raises:
        InputError: the number of sets or a value of `alike` differs between processes, or no
            process has chunks.
    """
    _, world = rank_and_size(group)
    messages = exchange({"sets": sets, "seed": seed, "alike": alike}, group, device)
    for name in alike:
        values = [message["alike"].get(name) for message in messages]
        if any(value != values[0] for value in values):
            raise InputError(
                f"{name} must be the same in all {world} processes; got {by_process(values)}."
            )
    found = [m["sets"] for m in messages]
    numbers = {number for number in found if number is not None}
    if not numbers:
        raise InputError(
            f"fold needs at least one chunk; none of the {world} processes has any. The state of "
            "an empty set is encoder.initial_state(1)."
        )
    if len(numbers) > 1:
        raise InputError(
            f"the chunks must have the same number of sets in all {world} processes; got "
            f"{by_process(found)}. Every process must read its shard of the same sets."
        )
    return numbers.pop(), messages[0]["seed"]


# ---- validation ------------------------------------------------------------------------------


def _validate(state: SetState) -> SetState:
    if not isinstance(state, SetState):
        raise StateMismatchError(
            f"expected a state to merge; got {type(state).__name__}. A process without elements "
            "passes encoder.initial_state()."
        )
    return state.trackable()


def _device_of(state: SetState, group: dist.ProcessGroup | None) -> torch.device:
    """The device of the state. Without a state, a device on which the error can be sent."""
    if isinstance(state, SetState):
        return state.device
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def _describe(state: SetState) -> Message:
    """The message about a state. The entries in ALIKE must be equal in all processes."""
    flat = _flatten(state.statistics)
    return {
        "fields": describe_fields(state.fields),
        "sets": len(state),
        "weights": state.weights.digest,
        "slots": _shapes(state.frame),
        "context": _shapes(state.context),
        "dtype": str(flat.dtype),
        "grad": torch.is_grad_enabled(),
        "tracked": flat.requires_grad,
        "ticket": next(_TICKETS),
    }


def _shapes(tensors: Iterable[Tensor]) -> list[str]:
    return [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors]


def _check_alike(messages: Sequence[Message]) -> None:
    """Raise StateMismatchError if an entry in ALIKE differs between processes."""
    for key, (what, advice) in ALIKE.items():
        values = [message[key] for message in messages]
        if any(value != values[0] for value in values):
            raise StateMismatchError(
                f"cannot merge states of {len(values)} processes with different {what}: "
                f"{by_process(values)}. {advice}."
            )


def _add_counts(state: SetState, group: dist.ProcessGroup | None) -> Tensor:
    """Add up the counts (B,) of all processes.

    Raises:
        StateMismatchError: the processes began with different slots or contexts.
    """
    counts, *others = _gather_bytes([state.count, *state.frame, *state.context], group)
    slots, context = others[: len(state.frame)], others[len(state.frame) :]
    if ranks := _differing_ranks(slots):
        raise StateMismatchError(
            f"cannot merge states with different slots: those of {processes(ranks)} differ from "
            "those of process 0. In training mode each process draws its own random slots. Use "
            "setfold.fold(..., group=...), which draws them once for all processes, pass "
            "initial_state a generator with the same seed in every process, or call model.eval()."
        )
    if ranks := _differing_ranks(context):
        raise StateMismatchError(
            f"cannot merge states with different contexts: those of {processes(ranks)} differ from "
            "those of process 0. All states must follow the same earlier pass, merged over the "
            "same process group."
        )
    return counts.sum(0)


def _differing_ranks(gathered: Iterable[Tensor]) -> list[int]:
    """The ranks whose tensors differ from those of rank 0 by more than rounding; each (R, ...)."""
    differing: set[int] = set()
    for tensors in gathered:
        rows = tensors.flatten(1).to(accumulator_dtype(tensors.device))
        if rows.shape[1]:
            allowed = max(SAME, 8 * torch.finfo(tensors.dtype).eps) * rows[0].abs().max()
            alike = (rows[1:] - rows[0]).abs().amax(1) <= allowed  # False for NaN
            differing.update(rank for rank, same in enumerate(alike.tolist(), 1) if not same)
    return sorted(differing)


# ---- collectives -----------------------------------------------------------------------------


def _flatten(statistics: Statistics) -> Tensor:
    """All parts in one row (S,), sorted by field name, so that all processes use the same order."""
    return torch.cat(
        [part.reshape(-1) for _, parts in sorted(statistics.items()) for part in parts]
    )


def _unflatten(row: Tensor, like: Statistics) -> Statistics:
    """The inverse of `_flatten`: statistics of the same names and shapes as `like`."""
    ordered = sorted(like.items())
    pieces = iter(row.split([part.numel() for _, parts in ordered for part in parts]))
    return {
        name: tuple(next(pieces).reshape(part.shape) for part in parts) for name, parts in ordered
    }


def _gather_statistics(
    state: SetState, group: dist.ProcessGroup | None, ticket: int | None
) -> Tensor:
    """Gather the statistics (R, S) of all processes; differentiable if those of any process are.

    The backward pass is a collective, so the autograd engine of every process must reach it, even
    if the shard is empty. It must not reach it earlier than in the other processes: the all_reduce
    could then meet one of DistributedDataParallel, which reduces the gradient of a parameter as
    soon as it is complete. So all tensors that shape the state are inputs of this function, whether
    this shard used them or not.

    Args:
        state: of this process.
        group: the process group.
        ticket: a number that identifies this call in the backward pass; None without gradients.
    """
    flat = _flatten(state.statistics)
    if ticket is None:
        return gather(flat.detach(), group, "gather the states")
    always = torch.zeros((), requires_grad=True)
    shaping = [*state.frame, *state.context, *state.weights.tensors]
    return _Gather.apply(group, ticket, flat, always, *(t for t in shaping if t.requires_grad))


class _Gather(torch.autograd.Function):
    """Gathers the rows of all processes. Backward, each row gets the sum of its gradients."""

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup | None, ticket: int, flat: Tensor, *shaping: Tensor
    ) -> Tensor:
        ctx.group, ctx.ticket = group, ticket
        ctx.shaping = [tensor.detach() for tensor in shaping]
        return gather(flat, group, "gather the states")

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rank, world = rank_and_size(ctx.group)
        # a message first, so that a process that fails on the way here can tell the others
        task = "add up the gradients"
        messages = exchange({"backward": ctx.ticket}, ctx.group, grad.device, task)
        if any(message["backward"] != ctx.ticket for message in messages):
            raise DistributedError(
                f"the {world} processes run the backward passes of different states at the same "
                "time. All processes must call backward in the same order."
            )
        total = grad.contiguous().clone()
        with translate_errors(ctx.group, task):
            dist.all_reduce(total, group=ctx.group)
        if ctx.needs_input_grad[2]:
            return None, None, total[rank], *[None] * len(ctx.shaping)
        return None, None, None, *map(torch.zeros_like, ctx.shaping)  # this shard used none of them


def _gather_bytes(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Gather tensors of several dtypes at once, each as (R, ...); without gradients."""
    raw = torch.cat([t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors])
    rows = gather(raw, group, "compare the states")
    pieces = rows.split([tensor.nbytes for tensor in tensors], 1)
    return [
        piece.contiguous().view(tensor.dtype).reshape(len(rows), *tensor.shape)
        for piece, tensor in zip(pieces, tensors, strict=True)
    ]
