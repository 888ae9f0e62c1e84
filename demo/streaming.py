"""Digits that arrive chunk by chunk: what each model makes of them, however it gets to see them."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import gaussian_nll_loss as nll_loss
from torch.nn.functional import mse_loss

from demo import digits
from demo.completion import Completion
from setfold import SetEncoder, StreamingSetEncoder, fold
from setfold.laws.wrong_way import ChunkAverage

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


def unseen_digits(count: int) -> Unseen:
    """The first of those that were set aside, in float64: 0, 1, 2, ..."""
    images = digits.load().unseen[:count].double()
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
def outcomes(model: Completion, unseen: Unseen, ways: dict[str, Encodings]) -> dict[str, Outcome]:
    """Complete the digits in some ways, and compare with the digits and with the whole sets."""
    chunks = unseen.chunks()
    references = list(whole(model.encoder, chunks))
    made = {name: list(way(model.encoder, chunks)) for name, way in ways.items()}
    return {name: judged(model, unseen.images, made[name], references) for name in ways}


def judged(
    model: Completion, images: Tensor, encodings: list[Tensor], references: list[Tensor]
) -> Outcome:
    """How good and how exact the encodings at each of the readings are."""
    pairs = zip(encodings, references, strict=True)
    difference = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    completed = [model.decode(encoding) for encoding in encodings]
    return Outcome(
        [float(mse_loss(mean, images)) for mean, _ in completed],
        [float(nll_loss(mean, images, scale.square(), full=True)) for mean, scale in completed],
        difference,
        np.stack([mean.numpy() for mean, _ in completed]),
    )
