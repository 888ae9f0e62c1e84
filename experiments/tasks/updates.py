"""The cost of an update: pixels arrive in a set that holds many already, and some are predicted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from experiments.keeping import Kept, encode, keep, numbers
from experiments.memory import Cost, in_new_process, seconds_of
from experiments.recipe import Metrics
from experiments.tasks.completion import Completion
from setfold.files.budget import peak_memory

AT_ONCE = 1000  # pixels per chunk until the set holds as many as it should
TIMES = 7  # updates; time is the median and memory the peak over all of them
EXTENT = 1.7  # coordinates are standardised, so pictures of all sizes are from -1.7 to 1.7


def update_costs(
    model: nn.Module | None, task: Completion, held: Sequence[int], arriving: int, predicted: int
) -> Metrics:
    """Measure the cost of an update of one set, for several sizes of the set.

    What is kept of the set takes in the pixels that arrive, and pixels are predicted. Weights do not
    matter, so the model is a new one.

    Args:
        model: not used.
        task: task with the model.
        held: numbers of pixels that the set holds before the update.
        arriving: number of new pixels.
        predicted: number of pixels to predict.

    Returns:
        The numbers that are kept of the set before the update, milliseconds of CPU time, and
        megabytes: peak memory above that of a process with the model alone, with what is kept.
    """
    found = [in_new_process(cost_of_update, task, held, arriving, predicted) for held in held]
    return {
        "held": [float(number) for number in held],
        "numbers": [float(kept) for kept, _ in found],
        "milliseconds": [1e3 * cost.seconds for _, cost in found],
        "megabytes": [cost.megabytes for _, cost in found],
    }


@torch.no_grad()
def cost_of_update(task: Completion, held: int, arriving: int, predicted: int) -> tuple[int, Cost]:
    """Return how many numbers are kept of a set of pixels, and the cost of an update."""
    torch.manual_seed(0)
    model = task.build().eval()
    width, pixels = task.width, task.side**2
    positions = torch.randperm(pixels)[:predicted].unsqueeze(0)
    arrived = _pixels(arriving, width)
    before = peak_memory()
    kept: Kept | None = None
    for start in range(0, held, AT_ONCE):
        kept = keep(model.encoder, kept, _pixels(min(AT_ONCE, held - start), width))
    assert kept is not None

    def update() -> None:
        model.decode(encode(model.encoder, keep(model.encoder, kept, arrived)), positions)

    seconds = seconds_of(update, TIMES)
    return numbers(kept), Cost((peak_memory() - before) / 1e6, seconds)


def _pixels(number: int, width: int) -> Tensor:
    """Draw pixels (1, number, width): two coordinates, and colours."""
    extents = torch.tensor([EXTENT] * 2 + [1.0] * (width - 2))
    return (2 * torch.rand(1, number, width) - 1) * extents
