"""The ways of folding one set: each is an order of chunks, and the fold over them is the same."""

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
    """What one process does: a share of the set, in one of the ways."""

    way: str
    size: int
    number: int
    of: int
    target: Path  # where the state goes


class Report(NamedTuple):
    """What came of a share, beside the state in its file."""

    readings: dict[int, NDArray[np.float64]]  # by elements seen, the encoding (K, d_out) of them
    chunks: int = 0
    wall: float = 0.0  # seconds, drawing the elements included
    folding: float = 0.0  # seconds, in `update` alone
    memory: int = 0  # bytes at the peak, above the start

    def distances(self, reference: "Report") -> dict[int, float]:
        """How far each reading is from another's last, relative to its largest number."""
        last = reference.readings[max(reference.readings)]
        return {n: float(abs(e - last).max() / abs(last).max()) for n, e in self.readings.items()}


def make_encoder() -> SlotSetEncoder:
    """The same untrained encoder in every process.

    It works in float64. A state's totals always are, but inside a chunk an encoder rounds as its
    elements do, and in float32 that alone can come to more than 1e-7.
    """
    torch.manual_seed(12)  # a draw in which each of the slots attracts some part of the galaxy
    encoder = SlotSetEncoder(galaxy.FEATURES, 6, dim_slot=16, dim_out=32, similarity="cosine")
    return encoder.double().eval()


def streamed(share: Share) -> Iterator[Tensor]:
    """A share, block after block, cut where the encoding is to be read."""
    seen = 0
    for block in galaxy.blocks(share.size, share.number, share.of):
        cuts = [mark - seen for mark in MILESTONES if seen < mark < seen + block.shape[1]]
        yield from block.tensor_split(cuts, dim=1)
        seen += block.shape[1]


def whole(share: Share) -> Iterator[Tensor]:
    """One chunk that is the set."""
    elements = torch.empty(1, share.size, galaxy.FEATURES, dtype=torch.float64)
    rooms = elements.split(galaxy.BLOCK, dim=1)
    for room, block in zip(rooms, galaxy.blocks(share.size), strict=True):
        room.copy_(block)  # in place, because joining blocks would need the memory twice
    yield elements


def shuffled(share: Share) -> Iterator[Tensor]:
    """A random permutation of the set, in chunks of one element to 100,000."""
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
    """Fold a share of the set into a state and write that to a file; count in `done`."""
    encoder = make_encoder()
    state = encoder.initial_state()
    encoder.update(state, galaxy.block(0))  # what libraries set up once is not counted
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
    """THE WRONG WAY: redraw the slots for every chunk and average the chunks' encodings."""
    encoder, redraw = make_encoder(), torch.Generator().manual_seed(galaxy.SEED)
    total = torch.zeros((), dtype=torch.float64)
    for chunk in galaxy.blocks(share.size):
        state = encoder.update(encoder.initial_state(generator=redraw), chunk)
        total = total + encoder.readout(state)[0] * (chunk.shape[1] / share.size)
        done.value += chunk.shape[1]
    return Report({share.size: total.numpy()})


def resident(field: str) -> int:
    """This process's memory in bytes: "VmRSS", what it has now, or "VmHWM", the most it had."""
    status = Path("/proc/self/status")
    if not status.exists():  # elsewhere than on Linux the peak must do for both
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    lines = status.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
