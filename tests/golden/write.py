"""Write one small file of every kind that setfold writes: `python -m tests.golden.write NAME`.

Run it once for each set of format versions, when a version number changes. The files in older
folders stay as they are: tests/golden/test_golden.py reads all of them.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import setfold
from setfold.files import journal, plan
from setfold.files.budget import Budget
from tests import reference

FOLDER = Path(__file__).parent
OUTPUTS = ("encodings.parquet", "encodings.arrow", "encodings.npz")
ROWS, SETS = 96, 4


def make_model():
    torch.manual_seed(0)
    return setfold.SlotSetEncoder(2, 2, 2, 2, aggregate=["mean", "max"]).eval()


def make_rows():
    """The input: first many rows of one set, then a few of each. So states and rows are spilled."""
    generator = np.random.default_rng(0)
    sets = generator.integers(0, SETS, ROWS) * (np.arange(ROWS) >= ROWS // 2)
    x, y = generator.standard_normal((2, ROWS), dtype=np.float32)
    return pa.table({"user": ["abcd"[i] for i in sets], "x": x, "y": y})


def expected(model, rows):
    """Count and encoding of each set, computed with plain loops."""
    grouped, slots = {}, model.initial_state().slots[0].detach().double().numpy()
    for row in rows.to_pylist():
        grouped.setdefault(row["user"], []).append([row["x"], row["y"]])
    return {
        name: [len(each), reference.slot_set(model, np.array(each), slots).tolist()]
        for name, each in sorted(grouped.items())
    }


def limit_memory():
    """Let a run on a few rows spill to disk, and save a checkpoint after each step."""
    plan.split_memory = lambda *_: Budget(batch_rows=16, store_bytes=1600)
    plan.SHARD_ROWS, journal.SAVE_SHARE = 48, math.inf


def interrupt(model, folder, phase, after):
    """Leave the work folder of a run that was interrupted in a phase."""

    def progress(now):
        nonlocal after
        after -= now.phase == phase
        if not after:
            raise KeyboardInterrupt

    out = folder / f"{phase}.parquet"
    try:
        setfold.encode_sets(
            model, folder / "rows.parquet", out, set="user", save_every=0, progress=progress
        )
    except KeyboardInterrupt:
        (folder / f"{phase}.parquet.work" / "lock").unlink()


def make_places():
    """A model with so many slots that only those that were touched are stored."""
    return setfold.PlacedSlotEncoder(
        2, setfold.Grid(-3, 3, 2000), aggregate=["sum", "density", "max"], reach=2
    ).eval()


def write_places(folder, rows):
    """The states of many slots, and by set, the encoding of the slots that are not empty."""
    model, wanted = make_places(), {}
    states = folder / "places.arrow"
    setfold.encode_sets(
        model, folder / "rows.parquet", folder / "unused.npz", set="user", states=states
    )
    (folder / "unused.npz").unlink()
    for name in sorted({*rows["user"].to_pylist()}):
        chosen = [[row["x"], row["y"]] for row in rows.to_pylist() if row["user"] == name]
        encoding = reference.placed_slots(model, torch.tensor(chosen))
        wanted[name] = {slot: v for slot, v in enumerate(encoding.tolist()) if any(v)}
    (folder / "places.json").write_text(json.dumps(wanted, indent=1))


def write(name):
    if (FOLDER / name).exists():
        raise SystemExit(f"{name} exists, and golden files never change. Choose another name.")
    model, rows = make_model(), make_rows()
    folder = Path("/tmp/golden")  # files contain the paths of their inputs
    folder.mkdir()
    pq.write_table(rows, folder / "rows.parquet")
    setfold.save(model, folder / "model.safetensors")
    for out in OUTPUTS:
        setfold.encode_sets(
            model,
            folder / "rows.parquet",
            folder / out,
            set="user",
            states=folder / "states.arrow",
            overwrite=True,
        )
    wanted = expected(model, rows)
    chosen = [[row["x"], row["y"]] for row in rows.to_pylist() if row["user"] == "a"]
    with torch.no_grad():
        model.update(model.initial_state(), torch.tensor([chosen])).save(
            folder / "state.safetensors"
        )
    (folder / "expected.json").write_text(json.dumps(wanted, indent=1))
    write_places(folder, rows)
    limit_memory()
    interrupt(model, folder, "reading", 5)
    interrupt(model, folder, "merging", 1)
    shutil.move(folder, FOLDER / name)


if __name__ == "__main__":
    write(sys.argv[1])
