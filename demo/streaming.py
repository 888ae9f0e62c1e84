"""Digits that arrive in chunks, and several ways to encode them."""

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
READINGS = (1, 2, 4, 7, 14, 28)  # numbers of chunks after which digits are completed
PIXELS_SEEN = [chunks * CHUNK for chunks in READINGS]  # 28, 56, 112, 196, 392, 784

Encodings = Callable[[SetEncoder, tuple[Tensor, ...]], Iterator[Tensor]]


class Unseen(NamedTuple):
    """Held-out digits, and the order in which their pixels arrive."""

    images: Tensor  # (B, 784)
    order: Tensor  # (B, 784)

    def chunks(self) -> tuple[Tensor, ...]:
        """Return all pixels in 28 chunks (B, 28, 3)."""
        return digits.elements(self.images, self.order).split(CHUNK, 1)


class Outcome(NamedTuple):
    """Results of one method at each of the READINGS."""

    errors: list[float]  # mean squared errors per pixel
    likelihoods: list[float]  # negative log-likelihoods per pixel
    difference: float  # largest relative difference to the encoding of the whole set
    completions: NDArray[np.float64]  # (readings, B, 784)


def unseen_digits(count: int) -> Unseen:
    """Return the first held-out digits, in float64: 0, 1, 2, ..."""
    images = digits.load().unseen[:count].double()
    draw = torch.Generator().manual_seed(digits.SEED)
    return Unseen(images, digits.some_pixels(images, digits.PIXELS, draw))


def streamed(encoder: SetEncoder, chunks: tuple[Tensor, ...]) -> Iterator[Tensor]:
    """Update a state with one chunk after the other; the state can be read at any time."""
    assert isinstance(encoder, StreamingSetEncoder)
    state = encoder.initial_state(len(chunks[0]))
    for number, chunk in enumerate(chunks, start=1):
        state = encoder.update(state, chunk)
        if number in READINGS:
            yield encoder.readout(state)


def whole(encoder: SetEncoder, chunks: tuple[Tensor, ...]) -> Iterator[Tensor]:
    """Keep all chunks and encode them at once for every reading."""
    for number in READINGS:
        yield encoder(torch.cat(chunks[:number], 1))


def folded(encoder: SetEncoder, chunks: tuple[Tensor, ...]) -> Iterator[Tensor]:
    """Fold the chunks for every reading, in as many passes as the encoder needs."""
    for number in READINGS:
        yield fold(encoder, chunks[:number])


def averaged(encoder: SetEncoder, chunks: tuple[Tensor, ...]) -> Iterator[Tensor]:
    """Encode each chunk as if it were the whole set, and average. This is WRONG."""
    return whole(ChunkAverage(encoder, CHUNK), chunks)


@torch.no_grad()
def outcomes(model: Completion, unseen: Unseen, ways: dict[str, Encodings]) -> dict[str, Outcome]:
    """Complete the digits in several ways and compare with the digits and the whole sets."""
    chunks = unseen.chunks()
    references = list(whole(model.encoder, chunks))
    made = {name: list(way(model.encoder, chunks)) for name, way in ways.items()}
    return {name: judged(model, unseen.images, made[name], references) for name in ways}


def judged(
    model: Completion, images: Tensor, encodings: list[Tensor], references: list[Tensor]
) -> Outcome:
    """Measure error and exactness of the encodings at each reading."""
    pairs = zip(encodings, references, strict=True)
    difference = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    completed = [model.decode(encoding) for encoding in encodings]
    return Outcome(
        [float(mse_loss(mean, images)) for mean, _ in completed],
        [float(nll_loss(mean, images, scale.square(), full=True)) for mean, scale in completed],
        difference,
        np.stack([mean.numpy() for mean, _ in completed]),
    )
