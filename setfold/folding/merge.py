"""Sets spread over processes: each folds its shard, and `all_merge` gives all of them the whole set.

    agree       the number of sets and the seed, at the beginning of a pass
    all_merge   the state of the whole set, in every process

Shapes: R processes, S numbers in the statistics of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from setfold.core.state import SetState
from setfold.core.statistic import Statistics, describe_fields, join
from setfold.errors import DistributedError, InputError, StateMismatchError
from setfold.folding.messages import (
    Message,
    by_process,
    exchange,
    gathered,
    processes,
    rank_and_size,
    report_failure,
    watched,
)
from setfold.kernels.precision import accumulator_dtype
from setfold.kernels.replay import differentiable_once

_TURNS = cycle(range(1, 2**10))  # few, so that sums of squares are exact in float32 too
SAME = 1e-6  # relative; machines that compute the same slots may round them differently
MODEL = "Fold every shard with the same model"
ALIKE = {  # what must be the same in every process: its name, and what to do where it is not
    "fields": ("fields", MODEL),
    "sets": (
        "numbers of sets",
        "Every process must fold its shard of the same sets; one that has nothing of a set leaves "
        "it empty",
    ),
    "weights": (
        "weights",
        f"{MODEL}: load the same weights everywhere, or wrap it in DistributedDataParallel, which "
        "sends those of process 0 to all",
    ),
    "slots": ("shapes of slots", "Begin every state with the same number of slots"),
    "context": ("contexts", "All must follow the same earlier pass"),
    "dtype": ("dtypes", "Keep all states on devices of the same kind"),
    "grad": ("gradient modes", "Call all_merge under torch.no_grad() in all of them, or in none"),
}


def all_merge(state: SetState, group: dist.ProcessGroup | None = None) -> SetState:
    """The state of the whole set, from the states of its shards; every process of the group calls it.

    The statistics of all processes are gathered and joined in the order of their ranks, so all
    processes get the same bits. Slots and context stay this process's own, with their graph.

    Gradients are those of the sum of all processes' losses: going back, each process adds up what
    the losses of all want of its shard. DistributedDataParallel then averages over the processes,
    which makes it the gradient of the mean of the losses by the whole set; for the parameters of
    the readout and of a head too, of which each process contributes what its own loss wants.

    So every process must run the backward pass, once for each that the others run. One that has no
    loss of its own calls `(encoding * 0).sum().backward()`. One whose shard is empty takes part like
    the others: its encoder's parameters get gradients of zero. Parameters that DistributedDataParallel
    manages outside the encoder, such as those of a network that makes the elements, are another
    matter: with an empty shard they have no gradient, so give all_merge or DistributedDataParallel a
    group of its own (torch.distributed.new_group), lest their messages get mixed up.

    Args:
        state: what this process's shard has made of B sets; begun with the same slots everywhere.
        group: the processes; None for all of them.

    Returns:
        The state (B sets) of all shards together.

    Raises:
        StateMismatchError: the states do not belong together; in every process.
        DistributedError: another process has failed, has died or did not come.
        InputError: there is no process group, or this process is not in it.

    >>> import setfold  # torchrun would start several processes, and provide the store and the rank
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
        state = _checked(state)
        message = _description(state)
    messages = exchange(message, group, device)
    if world == 1:
        return state
    _refuse_unlike(messages)
    count = _same_beginning(state, group)
    turn = messages[0]["turn"] if any(m["tracked"] for m in messages) else None
    rows = _gathered_statistics(state, group, turn)
    parts = (_named(row, state.statistics) for row in rows.unbind())
    statistics = reduce(lambda left, right: join(state.fields, left, right), parts)
    return state.with_statistics(statistics, count)


def agree(
    sets: int | None,
    seed: int,
    alike: Message,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> tuple[int, int]:
    """What all processes must share at the beginning of a pass: how many sets, and a seed.

    Args:
        sets: the number of sets in this process's shard; None if it has no chunks.
        seed: what this process would take; that of process 0 counts.
        alike: by name, what must be the same everywhere.
        group: the processes.
        device: where the group can move tensors.

    Raises:
        InputError: the shards are not of the same number of sets, or all are empty, or something
            else is not the same everywhere.
    """
    _, world = rank_and_size(group)
    messages = exchange({"sets": sets, "seed": seed, "alike": alike}, group, device)
    for name in alike:
        said = [message["alike"].get(name) for message in messages]
        if any(one != said[0] for one in said):
            raise InputError(
                f"{name} must be the same in all {world} processes: {by_process(said)}."
            )
    found = [m["sets"] for m in messages]
    numbers = {number for number in found if number is not None}
    if not numbers:
        raise InputError(
            f"fold needs at least one chunk; none of the {world} processes has any. An empty set "
            "is encoder.initial_state(1)."
        )
    if len(numbers) > 1:
        raise InputError(
            f"the chunks are not of the same number of sets in all {world} processes "
            f"({by_process(found)}). Every process must read its shard of the same sets."
        )
    return numbers.pop(), messages[0]["seed"]


# ---- whether states belong together ----------------------------------------------------------


def _checked(state: SetState) -> SetState:
    if not isinstance(state, SetState):
        raise StateMismatchError(
            f"expected a state to merge; got {type(state).__name__}. A process without elements merges "
            "encoder.initial_state()."
        )
    return state.trackable()


def _device_of(state: SetState, group: dist.ProcessGroup | None) -> torch.device:
    """The state's; where there is no state, one on which the others can be told."""
    if isinstance(state, SetState):
        return state.device
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def _description(state: SetState) -> Message:
    """What can be said of a state, of which ALIKE must be the same everywhere."""
    flat = _flat(state.statistics)
    return {
        "fields": describe_fields(state.fields),
        "sets": len(state),
        "weights": state.weights.digest,
        "slots": _forms(state.frame),
        "context": _forms(state.context),
        "dtype": str(flat.dtype),
        "grad": torch.is_grad_enabled(),
        "tracked": flat.requires_grad,
        "turn": next(_TURNS),
    }


def _forms(tensors: Iterable[Tensor]) -> list[str]:
    return [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors]


def _refuse_unlike(messages: Sequence[Message]) -> None:
    for key, (what, remedy) in ALIKE.items():
        said = [message[key] for message in messages]
        if any(one != said[0] for one in said):
            raise StateMismatchError(
                f"cannot merge the states of {len(said)} processes, which have different {what}: "
                f"{by_process(said)}. {remedy}."
            )


def _same_beginning(state: SetState, group: dist.ProcessGroup | None) -> Tensor:
    """The counts (B,) of all processes together, if all began with the same slots and context."""
    begun = [state.count, *state.frame, *state.context]
    counts, *others = _gathered_bytes(begun, group)
    slots, context = others[: len(state.frame)], others[len(state.frame) :]
    if strange := _unlike_first(slots):
        raise StateMismatchError(
            f"cannot merge the states: those of {processes(strange)} began with other slots than that "
            "of process 0. In training, random slots are drawn anew by each process: use "
            "setfold.fold(..., group=...), which draws them once for all, give initial_state a "
            "generator of the same seed in every process, or call model.eval()."
        )
    if strange := _unlike_first(context):
        raise StateMismatchError(
            f"cannot merge the states: those of {processes(strange)} have other contexts than that of "
            "process 0. All must follow the same earlier pass, merged over the same group."
        )
    return counts.sum(0)


def _unlike_first(gathered: Iterable[Tensor]) -> list[int]:
    """The ranks whose tensors are not, up to rounding, those of the first; each (R, ...)."""
    strange: set[int] = set()
    for tensors in gathered:
        rows = tensors.flatten(1).to(accumulator_dtype(tensors.device))
        if rows.shape[1]:
            allowed = max(SAME, 8 * torch.finfo(tensors.dtype).eps) * rows[0].abs().max()
            alike = (rows[1:] - rows[0]).abs().amax(1) <= allowed  # false of NaN
            strange.update(rank for rank, same in enumerate(alike.tolist(), 1) if not same)
    return sorted(strange)


# ---- data ------------------------------------------------------------------------------------


def _flat(statistics: Statistics) -> Tensor:
    """All parts in one row (S,), in an order that does not depend on how a state came about."""
    return torch.cat(
        [part.reshape(-1) for _, parts in sorted(statistics.items()) for part in parts]
    )


def _named(row: Tensor, like: Statistics) -> Statistics:
    """The statistics that are laid out in a row (S,)."""
    ordered = sorted(like.items())
    pieces = iter(row.split([part.numel() for _, parts in ordered for part in parts]))
    return {
        name: tuple(next(pieces).reshape(part.shape) for part in parts) for name, parts in ordered
    }


def _gathered_statistics(
    state: SetState, group: dist.ProcessGroup | None, turn: int | None
) -> Tensor:
    """The statistics (R, S) of all processes; differentiable if they are in any of them.

    Args:
        state: of this process.
        group: the processes.
        turn: a number by which all know this gathering again; None without gradients.

    All then take part in the backward pass, each when its own engine gets there. It must get there,
    even if this shard was empty; and no sooner than in the other processes, or the message would
    meet one of DistributedDataParallel's, which sends a parameter's gradient once nothing more can
    come. So all that shaped the state hangs on the gathering, whether this shard made use of it or
    not.
    """
    flat = _flat(state.statistics)
    if turn is None:
        return gathered(flat.detach(), group, "gather the states")
    always = torch.zeros((), requires_grad=True)
    shaping = [*state.frame, *state.context, *state.weights.tensors]
    return _Gathered.apply(group, turn, flat, always, *(t for t in shaping if t.requires_grad))


class _Gathered(torch.autograd.Function):
    """Rows of all processes; going back, each process gets the sum of what all want of its row."""

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup | None, turn: int, flat: Tensor, *shaping: Tensor
    ) -> Tensor:
        ctx.group, ctx.turn = group, float(turn)
        ctx.shaping = [tensor.detach() for tensor in shaping]
        return gathered(flat, group, "gather the states")

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rank, world = rank_and_size(ctx.group)
        turns = grad.new_tensor([ctx.turn, ctx.turn**2])
        total = torch.cat([grad.reshape(-1), turns])
        with watched(ctx.group, "add up the gradients"):
            dist.all_reduce(total, group=ctx.group)
        turn, square = total[-2:].tolist()
        if turn**2 != world * square:  # equal only where all numbers are
            raise DistributedError(
                f"the {world} processes run the backward passes of different states at the same time. All must "
                "call backward in the same order."
            )
        if ctx.needs_input_grad[2]:
            own = total[:-2].view_as(grad)[rank]
            return None, None, own, *[None] * len(ctx.shaping)
        return None, None, None, *map(torch.zeros_like, ctx.shaping)  # nothing here depends on them


def _gathered_bytes(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Tensors of several dtypes at once, each as (R, ...); without gradients."""
    raw = torch.cat([t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors])
    rows = gathered(raw, group, "compare the states")
    pieces = rows.split([tensor.nbytes for tensor in tensors], 1)
    return [
        piece.contiguous().view(tensor.dtype).reshape(len(rows), *tensor.shape)
        for piece, tensor in zip(pieces, tensors, strict=True)
    ]
