"""Stream a LiDAR tile into a grid of slots, read pictures at any time, and merge two halves.

    python docs/examples/tile.py tile.png [POINTS]

The tile is synthetic: hills, houses and trees, a million points in UTM coordinates, as a LAS file.
It needs `pip install "setfold[las]" matplotlib`.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import laspy
import numpy as np
import torch
from matplotlib.figure import Figure

import setfold

EAST, NORTH, SIDE, CHUNK = 500_000.0, 5_400_000.0, 256.0, 50_000  # metres, metres, metres, points


def write_tile(path: Path, count: int) -> None:
    """Write a LAS file whose points come in flight lines, as a scanner writes them."""
    draw = np.random.default_rng(0)
    x, y = SIDE * draw.random((2, count))
    x = np.sort(x)  # the plane flies east
    z = 300 + 8 * np.sin(x / 60) + 6 * np.cos(y / 45)
    for east, north, width, depth, height in draw.uniform(
        (20, 20, 10, 10, 4), (230, 230, 30, 20, 12), (25, 5)
    ):
        z[(abs(x - east) < width / 2) & (abs(y - north) < depth / 2)] += height
    for east, north, size in draw.uniform((5, 5, 2), (250, 250, 6), (150, 3)):
        crown = size**2 - (x - east) ** 2 - (y - north) ** 2
        z += np.sqrt(np.maximum(crown, 0)) * draw.random(count)
    header = laspy.LasHeader(point_format=3, version="1.4")
    header.scales, header.offsets = np.full(3, 0.001), np.array([EAST, NORTH, 0])
    tile = laspy.LasData(header)
    tile.x, tile.y, tile.z = EAST + x, NORTH + y, z
    tile.write(path)


def chunks(path: Path, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Yield the points of a part of the file, (1, n, 3)."""
    with laspy.open(path) as file:
        file.seek(start)
        for first in range(start, stop, CHUNK):
            points = file.read_points(min(CHUNK, stop - first))
            yield torch.from_numpy(np.stack([points.x, points.y, points.z], -1))[None]


grid = setfold.Grid((EAST, NORTH), (EAST + SIDE, NORTH + SIDE), (256, 256))
encoder = setfold.PlacedSlotEncoder(
    3, grid, values="features", aggregate=["density", "weighted_mean", "variance"]
).double()  # coordinates of millions of metres do not fit into float32


@torch.no_grad()
def main(target: Path, count: int) -> None:
    """Fold the tile in two halves and draw four pictures."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tile.las"
        write_tile(path, count)
        halves = []
        for start in (0, count // 2):
            state = encoder.initial_state()
            for chunk in chunks(path, start, start + count // 2):
                state = encoder.update(state, chunk)
            halves.append(state)
        merged = halves[0].merge(halves[1])
        whole = encoder(torch.cat(list(chunks(path, 0, count)), 1))
    encoding = encoder.readout(merged)
    outside = int(encoder.outside_count(merged))
    print(f"{int(merged.count):,} points in {grid.num_slots:,} slots, {outside} outside the grid")
    print(f"merged halves and the whole tile differ by {(encoding - whole).abs().max():.1e}")
    arrange = setfold.SlotGrid(grid.shape)
    first, both = (arrange(encoder.readout(state))[0] for state in (halves[0], merged))
    pictures = {
        "height, first half": first[1].masked_fill(first[0] == 0, torch.nan),
        "height, both halves merged": both[1],
        "standard deviation in a cell": both[2].sqrt(),
        "points per cell": both[0],
    }
    figure = Figure(figsize=(11, 2.9), layout="constrained")
    for axes, (title, picture) in zip(figure.subplots(1, 4), pictures.items(), strict=True):
        is_height = "height" in title
        limits = both[1].aminmax() if is_height else picture.aminmax()
        colours = "terrain" if is_height else "magma"
        image = axes.imshow(picture.T, colours, origin="lower", vmin=limits[0], vmax=limits[1])
        figure.colorbar(image, ax=axes, shrink=0.8)
        axes.set_title(title, fontsize=9)
        axes.set_axis_off()
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000)
