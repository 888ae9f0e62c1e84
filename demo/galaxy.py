"""The large set: stars of a synthetic galaxy, generated in blocks from the block number."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

SEED = 2021
FEATURES = 4  # x, y, colour, brightness
BLOCK = 20_000  # stars per block; the last block can be smaller


def blocks(size: int, first: int = 0, step: int = 1) -> Iterator[Tensor]:
    """Yield every `step`-th block (1, n, 4) of a galaxy of `size` stars."""
    for begin in range(first * BLOCK, size, step * BLOCK):
        yield block(begin // BLOCK)[:, : size - begin]


def block(number: int) -> Tensor:
    """Generate the stars (1, BLOCK, 4) of one block; the same in every process."""
    draw = np.random.default_rng([SEED, number])
    kind = np.digitize(draw.random(BLOCK), [0.2, 0.9])  # bulge, arm or companion
    scatter, reach = draw.standard_normal((3, BLOCK)), draw.gamma(2.5, 0.45, BLOCK)
    arm = draw.integers(3, size=BLOCK) * (2 * np.pi / 3)
    angle = arm + 2.6 * np.log(reach + 0.15) + 0.3 * scatter[0]
    x = np.choose(kind, [0.45 * scatter[0], reach * np.cos(angle), 2.5 + 0.2 * scatter[0]])
    y = np.choose(kind, [0.30 * scatter[1], reach * np.sin(angle), 1.9 + 0.2 * scatter[1]])
    colour = np.choose(kind, [-0.6, 0.5, 0.0]) + 0.1 * scatter[2]  # old stars are red
    brightness = np.exp(-np.hypot(x, y)) + 0.05 * scatter[1]
    return torch.from_numpy(np.stack([x, y, colour, brightness], axis=-1)).unsqueeze(0)
