"""Small tables of sets with labels."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def make_table(sets=60, seed=0, missing=False):
    """Sets whose class is whether x varies much, and whose size is what `age` is about."""
    random = np.random.default_rng(seed)
    rows, labels = [], []
    for number in range(sets):
        size, wild = int(random.integers(3, 20)), number % 2
        x = random.standard_normal(size) * (1 + 2 * wild)
        for value in x:
            rows.append(
                {
                    "user": f"u{number}",
                    "x": None if missing and random.random() < 0.1 else float(value),
                    "y": float(random.standard_normal()),
                    "kind": str(random.choice(["a", "b", "c"])),
                }
            )
        labels.append(
            {"user": f"u{number}", "wild": ["calm", "wild"][wild], "age": 0.5 * size + 1}
            | {"group": f"g{number % 7}"}
        )
    order = random.permutation(len(rows))
    return pa.Table.from_pylist([rows[i] for i in order]), pa.Table.from_pylist(labels)


def write_tables(folder, files=2, **options):
    rows, labels = make_table(**options)
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(np.array_split(np.arange(len(rows)), files)):
        pq.write_table(rows.slice(part[0], len(part)), folder / f"rows-{number}.parquet")
    pq.write_table(labels, folder / "labels.pq.parquet")
    return folder
