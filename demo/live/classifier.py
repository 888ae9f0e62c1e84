"""A model that classifies point clouds: slots on a grid in space, and a small network.

    points (n, 3) -> slots on a grid -> encoding (216, 4) -> network -> logits of the classes

Slots keep how many points are near them, and where these are on average. Both are sums, so points
can be removed again.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from demo.live.shapes import SEED, Clouds
from setfold import Grid, PlacedSlotEncoder

GRID = 6  # side of the grid of slots
HIDDEN = 128
BATCH, RATE = 64, 2e-3
STEPS = {"made up in code": 1200, "ModelNet40": 6000}
SMALLEST = 8  # number of points of a cloud in training, and all of them at most


class Classifier(nn.Module):
    """A set encoder and a network that reads classes out of encodings.

    Args:
        classes: the number of classes.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        grid = Grid(low=(-1, -1, -1), high=(1, 1, 1), shape=(GRID, GRID, GRID))
        self.encoder = PlacedSlotEncoder(
            dim_in=3, places=grid, aggregate=["density", "weighted_mean"]
        )
        width = self.encoder.num_slots * self.encoder.dim_readout
        self.network = nn.Sequential(
            nn.Flatten(),
            nn.LayerNorm(width),
            nn.Linear(width, HIDDEN),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(HIDDEN, classes),
        )

    def decode(self, encoding: Tensor) -> Tensor:
        """Return the logits (B, classes) of encodings."""
        density, offsets = encoding.split([1, encoding.shape[-1] - 1], -1)
        return self.network(torch.cat([density.log1p(), offsets], -1))


def train(clouds: Clouds, steps: int, done: Any) -> Classifier:
    """Train a model on random points of clouds; counts steps in `done.value`."""
    torch.manual_seed(SEED)
    model = Classifier(len(clouds.classes))
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=1e-5)
    total = clouds.train.shape[1]
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 + math.cos(math.pi * step / steps)) / 2
        some = torch.randint(len(clouds.train), (BATCH,))
        count = min(int(SMALLEST * (2 * total / SMALLEST) ** torch.rand(()).item()), total)
        points = clouds.train[some][:, torch.randperm(total)[:count]]
        loss = cross_entropy(model.decode(model.encoder(points)), clouds.train_labels[some])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done.value = step + 1
    return model.eval()


@torch.no_grad()
def accuracy(model: Classifier, points: Tensor, labels: Tensor) -> float:
    """Return how many of some clouds (n, P, 3) are classified correctly."""
    return float((model.decode(model.encoder(points)).argmax(1) == labels).float().mean())
