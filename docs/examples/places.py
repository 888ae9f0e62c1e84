"""Draw where slots with places are, what each holds, and how the reading sharpens.

    python docs/examples/places.py places.png

The elements are samples (x, y, brightness) of a smooth picture, in random order.
It needs `pip install matplotlib`.
"""

import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from torch import Tensor

import setfold

SIDE, READINGS = 20, (60, 300, 1500, 15000)


def brightness(places: Tensor) -> Tensor:
    """The picture: two blobs and a ring, (..., 2) -> (..., 1)."""
    x, y = places.split(1, -1)
    ring = torch.exp(-(((x - 0.6) ** 2 + (y - 0.6) ** 2).sqrt() - 0.25).square() / 0.004)
    blobs = torch.exp(-((x - 0.2) ** 2 + (y - 0.75) ** 2) / 0.01)
    return ring + blobs + 0.7 * torch.exp(-((x - 0.25) ** 2 + (y - 0.2) ** 2) / 0.02)


def draw_grid(axes, elements: Tensor, one: Tensor, weights: Tensor, reach: float) -> None:
    """Show elements, slots, and the weights of one element in the slots within reach."""
    centres = grid.centres()
    axes.scatter(*elements[0, :150, :2].T, s=5, color="#9aa3b5", label="elements")
    axes.scatter(*centres.T, s=5, marker="s", color="#d9dce4", label="slots")
    near = weights > 0
    axes.scatter(*centres[near].T, s=160 * weights[near], color="#21305a", label="weight of one")
    axes.add_patch(Circle(one.tolist(), reach, fill=False, color="#b4442e"))
    axes.plot(*one, "x", color="#b4442e")
    axes.set_title("slots, and the weights of one\nelement (red) within reach", fontsize=9)


def draw_offsets(axes, encoding: Tensor) -> None:
    """Show the mean offset of the elements of each slot as an arrow."""
    density, shift = encoding[:, 0], encoding[:, 2:]
    centres, cell = grid.centres(), 1 / SIDE
    some = density > 0
    arrows = 1.2 * cell * shift[some]
    axes.quiver(*centres[some].T, *arrows.T, scale=1, scale_units="xy", angles="xy", width=0.006)
    axes.set_title("mean offset of its elements", fontsize=9)


grid = setfold.Grid(low=(0, 0), high=(1, 1), shape=(SIDE, SIDE))
encoder = setfold.PlacedSlotEncoder(
    3, grid, values=["features", "offsets"], aggregate=["density", "weighted_mean"]
)


@torch.no_grad()
def main(target: Path) -> None:
    """Fold the elements, read at several times, and draw everything."""
    torch.manual_seed(0)
    places = torch.rand(1, READINGS[-1], 2)
    elements = torch.cat([places, brightness(places)], -1)
    state, seen, readings = encoder.initial_state(), 0, []
    for number in READINGS:
        state = encoder.update(state, elements[:, seen:number])
        seen = number
        readings.append(encoder.readout(state)[0])
    figure = Figure(figsize=(10, 5.4), layout="constrained")
    above, below = figure.subplots(2, 4)
    one = torch.tensor([0.44, 0.56])
    weights = encoder.weights(state, torch.cat([one, brightness(one)]).view(1, 1, 3))[0, 0]
    draw_grid(above[0], elements, one, weights, encoder.reach * encoder.width / SIDE)
    early = readings[1]
    for axes, channel, title in ((above[1], 0, "density"), (above[2], 1, "mean brightness")):
        axes.imshow(
            early[:, channel].view(SIDE, SIDE).T, "magma", origin="lower", extent=(0, 1, 0, 1)
        )
        axes.set_title(f"{title} in each slot", fontsize=9)
    draw_offsets(above[3], early)
    truth = brightness(grid.centres())[:, 0]
    for axes, number, reading in zip(below, READINGS, readings, strict=True):
        picture = reading[:, 1].masked_fill(reading[:, 0] == 0, torch.nan)
        axes.imshow(picture.view(SIDE, SIDE).T, "magma", origin="lower", vmin=0, vmax=1.1)
        error = (reading[:, 1] - truth).abs().mean()
        axes.set_title(f"after {number:,} elements\nmean error {error:.3f}", fontsize=9)
    for axes in (*above, *below):
        axes.set(xticks=[], yticks=[], aspect="equal")
    for axes in (above[0], above[3]):
        axes.set(xlim=(0, 1), ylim=(0, 1))
    figure.savefig(target, dpi=100)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
