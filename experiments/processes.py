"""Device, precision and processes of a training, including groups started by torchrun."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.precision.amp import MixedPrecision
from lightning_fabric.plugins.precision.precision import Precision
from lightning_fabric.strategies.ddp import DDPStrategy
from torch import Tensor

from experiments import records
from experiments.records import Circumstances
from setfold import InputError
from setfold.core.persist import hold


class _Mixed(MixedPrecision):
    """Mixed precision that does not convert inputs: coordinates need full precision."""

    def convert_input(self, data: Any) -> Any:
        return data


DEVICES: dict[str, Callable[[], bool]] = {  # is it available? fastest device first
    "cuda": torch.cuda.is_available,
    "mps": torch.backends.mps.is_available,
    "cpu": lambda: True,
}
PRECISIONS: dict[str, Callable[[str], Precision]] = {
    "32-true": lambda device: Precision(),
    "bf16-mixed": lambda device: _Mixed("bf16-mixed", device),
}


def launch(device: str = "auto", precision: str = "32-true", threads: int | None = None) -> Fabric:
    """Set up Fabric on a device, alone or, under torchrun, with other processes.

    Args:
        device: "auto", "cpu", "cuda" or "mps".
        precision: "32-true" or "bf16-mixed".
        threads: number of CPU threads of torch; None for torch's default.
    """
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    here = [name for name, available in DEVICES.items() if available()]
    if device not in ("auto", *here):
        raise InputError(f"no device {device!r}; available: {', '.join(here)}, auto.")
    if precision not in PRECISIONS:
        raise InputError(f"precision must be one of {', '.join(PRECISIONS)}; got {precision!r}.")
    device = here[0] if device == "auto" else device
    if threads is not None:
        torch.set_num_threads(threads)
    on_this_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    on_all = int(os.environ.get("WORLD_SIZE", 1))
    fabric = Fabric(
        accelerator=device,
        devices=on_this_node,
        num_nodes=on_all // on_this_node,
        plugins=PRECISIONS[precision](device),
        strategy="auto" if on_all == 1 else _distributed(),
    )
    fabric.launch()
    return fabric


def _distributed() -> DDPStrategy:
    # Slots have no gradient where attention cancels, so unused parameters are expected. The long
    # timeout is for processes that wait while the first one validates and measures.
    return DDPStrategy(timeout=timedelta(days=1), find_unused_parameters=True)


def circumstances(fabric: Fabric, precision: str) -> Circumstances:
    """Return code, versions and machine of this process and its group."""
    device = fabric.device
    machine = records.cpu() | {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "precision": precision,
        "threads": torch.get_num_threads(),
        "processes": fabric.world_size,
    }
    return Circumstances(records.commit(), records.versions(), machine)


@contextmanager
def hold_together(fabric: Fabric, path: Path) -> Iterator[bool]:
    """Acquire a lock without waiting, in the first process on behalf of the group."""
    if fabric.is_global_zero:
        with hold(path, wait=False) as held:
            yield fabric.broadcast(held)
    else:
        yield fabric.broadcast(False)


def mean_of(fabric: Fabric, value: float) -> float:
    """Return the mean of a number over all processes."""
    if fabric.world_size == 1:
        return value
    mean = fabric.all_reduce(torch.tensor(value, dtype=torch.float64, device=fabric.device))
    assert isinstance(mean, Tensor)
    return float(mean)
