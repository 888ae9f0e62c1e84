"""Ways to fold the same set: each is a different sequence of chunks."""

import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from demo import galaxy
from setfold import SlotSetEncoder

MILESTONES = [digit * 10**power for power in range(2, 12) for digit in (1, 2, 5)]


class Share(NamedTuple):
    """The share of the set that one process folds."""

    way: str
    size: int
    number: int
    of: int
    target: Path  # file for the state


class Report(NamedTuple):
    """Measurements of a share; the state is in its file."""

    readings: dict[int, NDArray[np.float64]]  # encodings (K, d_out) by elements seen
    chunks: int = 0
    wall: float = 0.0  # seconds, including generation of the elements
    folding: float = 0.0  # seconds in `update` alone
    memory: int = 0  # peak memory in bytes above the start

    def distances(self, reference: "Report") -> dict[int, float]:
        """Difference of each reading to the reference's last, relative to its largest number."""
        last = reference.readings[max(reference.readings)]
        return {n: float(abs(e - last).max() / abs(last).max()) for n, e in self.readings.items()}


def make_encoder() -> SlotSetEncoder:
    """Build the untrained encoder; it is the same in every process.

    It uses float64: in float32, rounding inside a chunk alone can exceed 1e-7.
    """
    torch.manual_seed(12)  # a seed with which each slot attends to a part of the galaxy
    encoder = SlotSetEncoder(galaxy.FEATURES, 6, dim_slot=16, dim_out=32, similarity="cosine")
    return encoder.double().eval()


def streamed(share: Share) -> Iterator[Tensor]:
    """Yield the blocks of a share, cut at the milestones where the encoding is read."""
    seen = 0
    for block in galaxy.blocks(share.size, share.number, share.of):
        cuts = [mark - seen for mark in MILESTONES if seen < mark < seen + block.shape[1]]
        yield from block.tensor_split(cuts, dim=1)
        seen += block.shape[1]


def whole(share: Share) -> Iterator[Tensor]:
    """Yield the whole set as one chunk."""
    elements = torch.empty(1, share.size, galaxy.FEATURES, dtype=torch.float64)
    rooms = elements.split(galaxy.BLOCK, dim=1)
    for room, block in zip(rooms, galaxy.blocks(share.size), strict=True):
        room.copy_(block)  # in place, because concatenation would need twice the memory
    yield elements


def shuffled(share: Share) -> Iterator[Tensor]:
    """Yield a random permutation of the set, in chunks of 1 to 100,000 elements."""
    elements, draw = next(whole(share)), np.random.default_rng(galaxy.SEED)
    order = torch.from_numpy(draw.permutation(share.size))
    while len(order):
        count = int(10 ** draw.uniform(0, 5))
        yield elements[:, order[:count]]
        order = order[count:]


WAYS = {"streamed": streamed, "split": streamed, "shuffled": shuffled, "whole": whole}
WRONG = "WRONG"


@torch.no_grad()
def fold(share: Share, done: Any) -> Report:
    """Fold a share of the set and write its state to a file; counts elements in `done.value`."""
    encoder = make_encoder()
    state = encoder.initial_state()
    encoder.update(state, galaxy.block(0))  # warm-up, which is not measured
    before, begin = resident("VmRSS"), perf_counter()
    chunks, folding, readings = 0, 0.0, {}
    for chunk in WAYS[share.way](share):
        start = perf_counter()
        state = encoder.update(state, chunk)
        folding += perf_counter() - start
        chunks, done.value = chunks + 1, int(state.count)
        if done.value in MILESTONES:
            readings[done.value] = encoder.readout(state)[0].numpy()
    state.save(share.target)
    wall = perf_counter() - begin
    return Report(readings, chunks, wall, folding, resident("VmHWM") - before)


@torch.no_grad()
def average_wrongly(share: Share, done: Any) -> Report:
    """Redraw the slots for every chunk and average the encodings. This is WRONG."""
    encoder, redraw = make_encoder(), torch.Generator().manual_seed(galaxy.SEED)
    total = torch.zeros((), dtype=torch.float64)
    for chunk in galaxy.blocks(share.size):
        state = encoder.update(encoder.initial_state(generator=redraw), chunk)
        total = total + encoder.readout(state)[0] * (chunk.shape[1] / share.size)
        done.value += chunk.shape[1]
    return Report({share.size: total.numpy()})


def resident(field: str) -> int:
    """Return the memory of this process in bytes: "VmRSS" now, or "VmHWM" at the peak."""
    status = Path("/proc/self/status")
    if not status.exists():  # without /proc, use the peak for both
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    lines = status.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
