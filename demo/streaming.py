"""Digits that arrive chunk by chunk: what each model makes of them, however it gets to see them."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import gaussian_nll_loss

from demo import digits
from demo.completion import Completion
from setfold import ChunkAverage, SetEncoder, StreamingSetEncoder, fold

DIGITS = 200  # unseen ones, over which errors are averaged
CHUNK = 28  # pixels
READINGS = (1, 2, 4, 7, 14, 28)  # after so many chunks a digit is completed
PIXELS_SEEN = [chunks * CHUNK for chunks in READINGS]  # 28, 56, 112, 196, 392, 784

Encodings = Callable[[SetEncoder, tuple[Tensor, ...]], Iterator[Tensor]]


class Unseen(NamedTuple):
    """Digits that no model was trained on, and the order in which their pixels arrive."""

    images: Tensor  # (B, 784)
    order: Tensor  # (B, 784)

    def chunks(self) -> tuple[Tensor, ...]:
        """All pixels, CHUNK at a time: 28 chunks (B, 28, 3)."""
        return digits.elements(self.images, self.order).split(CHUNK, 1)


class Outcome(NamedTuple):
    """What came of one way of looking at the digits, at each of the readings."""

    errors: list[float]  # mean squared ones
    likelihoods: list[float]  # negative logarithms, per pixel
    difference: float  # largest, of an encoding from that of the whole set, relatively
    completions: NDArray[np.float64]  # (readings, B, 784)


def unseen_digits() -> Unseen:
    """The first DIGITS of those that were set aside, in float64: 0, 1, 2, ..."""
    images = digits.load().unseen[:DIGITS].double()
    draw = torch.Generator().manual_seed(digits.SEED)
    return Unseen(images, digits.some_pixels(images, digits.PIXELS, draw))


def streamed(encoder: SetEncoder, chunks: tuple[Tensor, ...]) -> Iterator[Tensor]:
    """Absorb one chunk after the other, and forget it; the state can be read at any time."""
    assert isinstance(encoder, StreamingSetEncoder)
    state = encoder.initial_state(len(chunks[0]))
    for number, chunk in enumerate(chunks, start=1):
        state = encoder.update(state, chunk)
        if number in READINGS:
            yield encoder.readout(state)


def whole(encoder: SetEncoder, chunks: tuple[Tensor, ...]) -> Iterator[Tensor]:
    """Keep all chunks, and encode all of them at once for every reading."""
    for number in READINGS:
        yield encoder(torch.cat(chunks[:number], 1))


def folded(encoder: SetEncoder, chunks: tuple[Tensor, ...]) -> Iterator[Tensor]:
    """Read the chunks again for every reading, one at a time, as often as the encoder needs."""
    for number in READINGS:
        yield fold(encoder, chunks[:number])


def averaged(encoder: SetEncoder, chunks: tuple[Tensor, ...]) -> Iterator[Tensor]:
    """THE WRONG WAY: encode every chunk as if it were the set, and average."""
    return whole(ChunkAverage(encoder, CHUNK), chunks)


@torch.no_grad()
def outcome(model: Completion, unseen: Unseen, way: Encodings) -> Outcome:
    """Complete the digits at every reading, and compare with the digits and with the whole set."""
    errors, likelihoods, differences, completions = [], [], [], []
    chunks = unseen.chunks()
    pairs = zip(way(model.encoder, chunks), whole(model.encoder, chunks), strict=True)
    for encoding, reference in pairs:
        differences.append(float((encoding - reference).abs().max() / reference.abs().max()))
        mean, scale = model.decode(encoding)
        errors.append(float((mean - unseen.images).square().mean()))
        loss = gaussian_nll_loss(mean, unseen.images, scale.square(), full=True)
        likelihoods.append(float(loss))
        completions.append(mean.numpy())
    return Outcome(errors, likelihoods, max(differences), np.stack(completions))
