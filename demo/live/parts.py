"""What the page shows: two models, each with sets whose elements arrive."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demo import digits
from demo.completion import Completion
from demo.live.classifier import GRID, Classifier
from demo.live.shapes import Clouds
from demo.streaming import CHUNK
from setfold import StreamingSetEncoder

DIGITS = 30  # on the page
CHUNK_OF_POINTS = 32
SHOWN = 4  # slots whose numbers are on the page

View = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A model, and sets for it.

    Args:
        encoder: the encoder of the model, in float64 and in evaluation mode.
        examples: sets (E, n, d).
        names: the name of each set.
        chunk: the size of a chunk for chunk and average.
        show: makes what the page shows of an encoding (1, ...) of an example.
        about: what the page says about the model.
    """

    encoder: StreamingSetEncoder
    examples: Tensor
    names: list[str]
    chunk: int
    show: Callable[[Tensor, int], View]
    about: dict[str, Any]


def digit_part(model: Completion) -> Part:
    """Make the part in which a model completes held-out digits."""
    model = model.double().eval()
    images = digits.load().unseen[:DIGITS].double()
    everything = torch.arange(digits.PIXELS).expand(len(images), -1)

    @torch.no_grad()
    def show(encoding: Tensor, example: int) -> View:
        mean, scale = model.decode(encoding)
        density, brightness = encoding[0].unbind(-1)
        return {
            "mean": rounded(mean[0]),
            "scale": rounded(scale[0]),
            "density": rounded(density),
            "value": rounded(brightness),
            "error": float((mean[0] - images[example]).square().mean()),
        }

    assert isinstance(model.encoder, StreamingSetEncoder)
    return Part(
        model.encoder,
        digits.elements(images, everything),
        [f"a {number % 10}" for number in range(len(images))],
        CHUNK,
        show,
        {"side": digits.SIDE, "grid": 14, "parameters": _parameters(model)},
    )


def shape_part(model: Classifier, clouds: Clouds) -> Part:
    """Make the part in which a model classifies held-out point clouds."""
    model = model.double().eval()
    labels = clouds.unseen_labels.tolist()

    @torch.no_grad()
    def show(encoding: Tensor, example: int) -> View:
        probabilities = model.decode(encoding)[0].softmax(0)
        spread = -(probabilities * probabilities.clamp(min=1e-12).log()).sum()
        return {
            "probabilities": rounded(probabilities),
            "density": rounded(encoding[0, :, 0]),
            "spread": float(spread / np.log(len(probabilities))),
            "error": 1 - float(probabilities[labels[example]]),
        }

    return Part(
        model.encoder,
        clouds.unseen.double(),
        [clouds.classes[label] for label in labels],
        CHUNK_OF_POINTS,
        show,
        {
            "classes": clouds.classes,
            "grid": GRID,
            "source": clouds.source,
            "parameters": _parameters(model),
        },
    )


def rounded(numbers: Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return numbers with as many digits as a picture needs."""
    return np.round(numbers.numpy(), 4)


def _parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
