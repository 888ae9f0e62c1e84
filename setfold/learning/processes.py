"""The processes of a training. Each computes a part of every step; all keep the same weights."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from setfold.folding.messages import exchange, gather, report_failure, translate_errors
from setfold.learning.checkpoints import Standing

CPU = torch.device("cpu")
T = TypeVar("T")
TIMEOUT = timedelta(hours=1)  # processes wait while the first one writes a report


@dataclass(frozen=True)
class Processes:
    """The processes that train together.

    Args:
        rank: The number of this process.
        size: The number of processes.
        device: A device whose tensors they can send.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = CPU

    @classmethod
    def current(cls, device: torch.device = CPU) -> Processes:
        """Return those of the default process group; this process alone if there is none."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(device=device)
        return cls(dist.get_rank(), dist.get_world_size(), device)

    @property
    def first(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    @property
    def on_one_machine(self) -> bool:
        """Whether there are several processes, and torchrun has started all on one machine."""
        return self.size > 1 and os.environ.get("LOCAL_WORLD_SIZE") == str(self.size)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group over which a set is spread; None for one process."""
        return None if self.size == 1 else dist.group.WORLD

    def together(self) -> AbstractContextManager[None]:
        """Return a context whose exceptions end the other processes, too, when they next talk."""
        return nullcontext() if self.size == 1 else report_failure(None, self.device)

    def from_first(self, value: Any = None) -> Any:
        """Return a value of the first process, serialized as JSON. All wait until all call this."""
        if self.size == 1:
            return value
        return exchange({"value": value if self.first else None}, None, self.device)[0]["value"]

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors with those of the first process."""
        if self.size == 1:
            return
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
        for alike in kinds.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in alike]).to(self.device)
            with translate_errors(None, "receive tensors"):
                dist.broadcast(flat, 0)
            _copy_back(alike, flat)

    def share_standing(self, standing: Standing | None) -> Standing | None:
        """Return the state of a training that the first process has read."""
        if self.size == 1:
            return standing
        mine = None
        if standing is not None:
            kinds = {
                n: [str(t.dtype).removeprefix("torch."), list(t.shape)]
                for n, t in standing.tensors().items()
            }
            mine = {"plain": standing.plain(), "notes": standing.notes, "kinds": kinds}
        found = self.from_first(mine)
        if found is None:
            return None
        if standing is None or not self.first:
            empty = {
                name: torch.empty(shape, dtype=getattr(torch, dtype))
                for name, (dtype, shape) in found["kinds"].items()
            }
            standing = Standing.of(found["plain"], empty, found["notes"])
        self.share(standing.tensors().values())
        return standing

    def sum_gradients(self, parameters: Sequence[nn.Parameter], loss: Tensor) -> Tensor:
        """Sum the gradients of all processes, in place; return the sum of their losses.

        A parameter without a gradient in every process stays without one.
        """
        if self.size == 1:
            return loss
        have = [parameter.grad is not None for parameter in parameters]
        messages = exchange({"loss": loss.item(), "have": have}, None, self.device)
        anywhere = [any(flags) for flags in zip(*(m["have"] for m in messages), strict=True)]
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter, wanted in zip(parameters, anywhere, strict=True):
            if wanted:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                key = parameter.dtype, parameter.device
                kinds.setdefault(key, []).append(parameter.grad)
        for alike in kinds.values():
            flat = torch.cat([gradient.reshape(-1) for gradient in alike])
            with translate_errors(None, "sum gradients"):
                dist.all_reduce(flat)
            _copy_back(alike, flat)
        return loss.new_tensor(sum(message["loss"] for message in messages))

    def deal(self, items: Sequence[T]) -> Sequence[T]:
        """Return the share of this process.

        >>> Processes(1, 2).deal([5, 6, 7])
        [6]
        """
        return items[self.rank :: self.size]

    def collect(self, own: Tensor | None, total: int) -> Tensor:
        """Gather rows that were dealt: (own, ...) -> (total, ...), the same in all processes.

        Gradients are those of the sum of the losses of all processes. The backward pass is a
        collective.

        Args:
            own: The rows of this process's share; None if the share is empty.
            total: The number of rows of all processes.
        """
        if self.size == 1:
            assert own is not None
            return own
        kind = None
        if own is not None:
            kind = [str(own.dtype).removeprefix("torch."), list(own.shape[1:])]
        kinds = [m["kind"] for m in exchange({"kind": kind}, None, self.device)]
        dtype, shape = next(found for found in kinds if found is not None)
        if own is None:
            own = torch.zeros(0, *shape, dtype=getattr(torch, dtype), device=self.device)
        # a process without rows takes part in the backward pass, too
        anchor = torch.zeros((), device=self.device, requires_grad=torch.is_grad_enabled())
        found: Tensor = _Collect.apply(own, anchor, total, self)
        return found


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, anchor: Tensor, total: int, processes: Processes) -> Tensor:
        ctx.processes = processes
        most = -(-total // processes.size)
        padded = own.new_zeros(most, *own.shape[1:])
        padded[: len(own)] = own
        rows = gather(padded, None, "gather encodings")
        return rows.transpose(0, 1).flatten(0, 1)[:total].contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (gradient,) = gradients
        ctx.processes.from_first()  # a process that fails on the way here can tell the others
        summed = gradient.contiguous().clone()
        with translate_errors(None, "sum gradients"):
            dist.all_reduce(summed)
        own = summed[ctx.processes.rank :: ctx.processes.size]
        return own, gradient.new_zeros(()), None, None


def _copy_back(tensors: Sequence[Tensor], flat: Tensor) -> None:
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


@contextmanager
def join_processes() -> Iterator[Processes]:
    """Join the processes that torchrun has started, on the CPU; alone, if it has not."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or dist.is_initialized():
        yield Processes.current()
        return
    dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        yield Processes.current()
    finally:
        gc.collect()  # what refers to the group keeps its threads alive
        dist.destroy_process_group()
