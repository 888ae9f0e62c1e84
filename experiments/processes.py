"""Device, precision and processes of a training, including groups started by torchrun."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from experiments import records
from experiments.records import Circumstances
from setfold import InputError
from setfold.core.persist import hold
from setfold.learning.processes import Processes

DEVICES: dict[str, Callable[[], bool]] = {  # is it available? fastest device first
    "cuda": torch.cuda.is_available,
    "mps": torch.backends.mps.is_available,
    "cpu": lambda: True,
}
TIMEOUT = timedelta(days=1)  # processes wait while the first one validates and measures
FULL, MIXED = PRECISIONS = ("32-true", "bf16-mixed")


class Place(NamedTuple):
    """Where a training runs: its processes with their device, and its precision."""

    processes: Processes
    precision: str

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.processes.device

    def rounded(self) -> AbstractContextManager[Any]:
        """Return a context for losses: mixed precision rounds products, but not their inputs."""
        if self.precision == FULL:
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def moved(self, batch: Any) -> Any:
        """Return a batch of tensors, which may be nested, on the device."""
        if isinstance(batch, Tensor):
            return batch.to(self.device)
        if isinstance(batch, dict):
            return {name: self.moved(part) for name, part in batch.items()}
        if isinstance(batch, tuple | list):
            parts = [self.moved(part) for part in batch]
            return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
        return batch


def launch(device: str = "auto", precision: str = FULL, threads: int | None = None) -> Place:
    """Choose a device, and under torchrun join the other processes.

    Args:
        device: "auto", "cpu", "cuda" or "mps".
        precision: "32-true" or "bf16-mixed".
        threads: number of CPU threads of torch; None for torch's default.
    """
    here = [name for name, available in DEVICES.items() if available()]
    if device not in ("auto", *here):
        raise InputError(f"no device {device!r}; available: {', '.join(here)}, auto.")
    if precision not in PRECISIONS:
        raise InputError(f"precision must be one of {', '.join(PRECISIONS)}; got {precision!r}.")
    chosen = torch.device(here[0] if device == "auto" else device)
    if threads is not None:
        torch.set_num_threads(threads)
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(chosen)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        backend = "nccl" if chosen.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=TIMEOUT)
    return Place(Processes.current(chosen), precision)


def circumstances(place: Place) -> Circumstances:
    """Return code, versions and machine of this process and its group."""
    device = place.device
    machine = records.cpu() | {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "precision": place.precision,
        "threads": torch.get_num_threads(),
        "processes": place.processes.size,
    }
    if preloaded := os.environ.get("LD_PRELOAD"):  # an allocator, say: it changes times
        machine["preloaded"] = " ".join(Path(name).name for name in preloaded.split())
    return Circumstances(records.commit(), records.versions(), machine)


@contextmanager
def hold_together(processes: Processes, path: Path) -> Iterator[bool]:
    """Acquire a lock without waiting, in the first process on behalf of the group."""
    if processes.first:
        with hold(path, wait=False) as held:
            yield processes.from_first(held)
    else:
        yield processes.from_first()
