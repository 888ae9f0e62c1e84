"""A picture of the weights of a set whose elements have a place, such as the patches of a slide.

The weights are read from the file that `weigh_sets` has written, twice and batch by batch: first
for the extent of the coordinates, then for the mean weight in each cell of a grid. So memory depends
on the size of the picture only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from setfold.core.persist import replace_durably
from setfold.errors import InputError
from setfold.files.columns import depth_of
from setfold.files.inputs import open_reader
from setfold.files.readers.reader import import_optional
from setfold.preprocessing.columns import as_numbers, decoded

PLACE = ("x", "y")
BATCH_ROWS = 1 << 16
MAX_CELLS = 512  # along the longer side: no more than pixels, so that none is left out
MAX_SAMPLE = 1 << 16  # elements from which the distance of neighbours is estimated
NEAR = 90  # percentile of the distances to the next element: most cells have one
ROUNDING = 1e-6  # of a cell
FAR = 1e300  # coordinates beyond are no place: distances overflow
INCHES, LEAST, MOST, DPI = 7.0, 2.5, 14.0, 110  # width, and limits of the height
BESIDE, ABOVE = 2.1, 1.0  # inches for the colour bar, and for title and labels


@dataclass(frozen=True)
class _Extent:
    """Where the elements are.

    Args:
        low: The smallest x and y.
        high: The largest x and y.
        step: The distance of neighbours.
        elements: How many elements have a place.
    """

    low: np.ndarray
    high: np.ndarray
    step: float
    elements: int

    def cells(self, most: int) -> tuple[float, int, int]:
        """Return the side of a cell, and the number of rows and columns.

        Args:
            most: The largest number of rows and of columns.
        """
        side = max(self.step, float((self.high - self.low).max()) / (most - 1))
        columns, rows = (int(n) + 1 for n in (self.high - self.low) / side + ROUNDING)
        return side, rows, columns


def check_picture(path: Path, columns: Mapping[str, pa.DataType]) -> None:
    """Raise InputError if no picture can be drawn.

    Args:
        path: The picture.
        columns: The columns that are kept, and their types.
    """
    import_optional("matplotlib", "train")
    import_optional("scipy.spatial", "train")
    if path.suffix.lower() != ".png":
        raise InputError(f"a picture must go to a .png file; got {path.name}.")
    if missing := [name for name in PLACE if name not in columns]:
        raise InputError(
            f"a picture needs the columns x and y of each element; {missing[0]!r} is not kept. Pass "
            "--keep x,y, or a file of a slide with coords."
        )
    for name in PLACE:
        if depth_of(columns[name]) != 0:
            raise InputError(
                f"a picture needs numbers in the columns x and y; {name!r} is {columns[name]}. "
                "Convert it."
            )


def draw_weights(path: Path, names: Sequence[str], title: str, out: Path) -> None:
    """Draw the weights of one set, a panel for each vector.

    A cell of the grid is as wide as the distance of neighbours, unless there were too many. It has
    the colour of the mean weight of its elements; all panels have the same colours. As in images, y
    points down.

    Args:
        path: The weights, with the columns x and y.
        names: The columns with weights.
        title: What the set is called.
        out: The picture, a .png file.

    Raises:
        InputError: No element has a place.
    """
    extent = _find_extent(path)
    across = ceil(sqrt(len(names)))
    side, rows, columns = extent.cells(max(2, MAX_CELLS // across))
    means = _average(path, names, extent.low, side, (rows, columns))
    box = (
        extent.low[0],
        extent.low[0] + columns * side,
        extent.low[1] + rows * side,
        extent.low[1],
    )
    figure = _panels(means, names, box, across)
    heading = f"{title}: weights of {extent.elements:,} elements"
    figure.suptitle(heading, parse_math=False)
    part = out.with_name(f".{out.name}.part")
    try:
        figure.savefig(part, format="png", dpi=DPI)
        replace_durably(part, out)
    finally:
        part.unlink(missing_ok=True)


def _read(path: Path, names: Sequence[str]) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Yield the places (n, 2) of elements that have one, and columns with their weights."""
    with open_reader(path, number_columns=[*PLACE, *names]) as reader:
        for batch in reader.read([*PLACE, *names], rows=BATCH_ROWS):
            numbers = [as_numbers(decoded(column)) for column in batch.columns]
            places = np.stack(numbers[:2], 1)
            known = (np.abs(places) < FAR).all(1)  # NaN is not
            yield places[known], [weights[known] for weights in numbers[2:]]


def _find_extent(path: Path) -> _Extent:
    low, high, elements = np.full(2, np.inf), np.full(2, -np.inf), 0
    samples: list[np.ndarray] = []
    for places, _ in _read(path, ()):
        if len(places):
            low, high = np.minimum(low, places.min(0)), np.maximum(high, places.max(0))
            samples.append(places[: max(0, MAX_SAMPLE - elements)])
            elements += len(places)
    if not elements:
        raise InputError(f"no element of {path} has an x and a y, so there is nothing to draw.")
    return _Extent(low, high, _distance(np.concatenate(samples)), elements)


def _distance(places: np.ndarray) -> float:
    """Return the distance of neighbours.

    The first elements of a file are enough: files of slides go along rows or columns of patches.
    """
    from scipy.spatial import KDTree

    different = np.unique(places, axis=0)
    if len(different) < 2:
        return 1.0
    distances, _ = KDTree(different).query(different, k=[2], p=np.inf)
    return float(np.percentile(distances, NEAR))


def _average(
    path: Path, names: Sequence[str], low: np.ndarray, side: float, shape: tuple[int, int]
) -> list[np.ndarray]:
    """Return the mean of each column of weights in the cells of a grid; NaN in empty cells."""
    rows, columns = shape
    counts, sums = np.zeros(rows * columns), [np.zeros(rows * columns) for _ in names]
    for places, weights in _read(path, names):
        column, row = ((places - low) / side + ROUNDING).astype(np.int64).T
        cell = np.minimum(row, rows - 1) * columns + np.minimum(column, columns - 1)
        counts += np.bincount(cell, minlength=len(counts))
        for total, own in zip(sums, weights, strict=True):
            total += np.bincount(cell, own, minlength=len(counts))
    counts[counts == 0] = np.nan
    return [(total / counts).reshape(shape) for total in sums]


def _panels(
    means: Sequence[np.ndarray], names: Sequence[str], box: Sequence[float], across: int
) -> Any:
    """Return a figure with one panel for each grid of means."""
    from matplotlib.figure import Figure

    down = ceil(len(means) / across)
    rows, columns = means[0].shape
    height = (INCHES - BESIDE) / across * rows / columns * down + ABOVE
    figure = Figure(figsize=(INCHES, min(max(height, LEAST), MOST)), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True).ravel()
    top = max(float(np.nanmax(mean)) for mean in means)
    for axis, mean, name in zip(axes, means, names, strict=False):
        shown = axis.imshow(
            mean,
            cmap="magma",
            vmin=0,
            vmax=top,
            extent=box,
            aspect="equal",
            interpolation="nearest",
        )
        if len(means) > 1:
            axis.set_title(name)
    for axis in axes[len(means) :]:
        axis.set_visible(False)
    axes[0].set(xlabel="x", ylabel="y")
    figure.colorbar(shown, ax=axes.tolist(), label="mean weight", shrink=0.8)
    return figure
