"""One set of ten million rows trains within the memory limit; takes minutes: make stress."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.skipif(
    not os.environ.get("SETFOLD_STRESS"), reason="takes minutes; set SETFOLD_STRESS=1 to run"
)
ROWS, WIDTH, LIMIT = 10_000_000, 8, 1_000_000_000
SMALL = 40  # further sets, of a thousand rows
SCRIPT = """
import json, sys
from setfold.files.budget import peak_memory
from setfold import TrainOptions, train_sets

folder, encoder = sys.argv[1:]
options = TrainOptions(
    set="id",
    target="label",
    labels=f"{folder}/labels.csv",
    encoder=encoder,
    epochs=1,
    test=0.0,
    folds=1,
    memory="1GB",
)
result = train_sets(f"{folder}/rows.parquet", f"{folder}/{encoder}.safetensors", options)
assert max(result.data.reported.lengths) == 1000  # the large one is for training
print(json.dumps({"peak": peak_memory(), "elements": result.elements, "sets": result.sets}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    random = np.random.default_rng(0)
    kinds = {f"x{i}": pa.float32() for i in range(WIDTH)}
    schema = pa.schema({"id": pa.int64(), **kinds})
    with pq.ParquetWriter(folder / "rows.parquet", schema) as writer:
        for number in range(1 + SMALL):
            left = ROWS if number == 0 else 1000
            while left:
                size = min(left, 1 << 18)
                values = random.standard_normal((size, WIDTH), np.float32) * (1 + number % 2)
                columns = {f"x{i}": values[:, i] for i in range(WIDTH)}
                writer.write_table(pa.table({"id": np.full(size, number), **columns}, schema))
                left -= size
    lines = [f"{number},{'ab'[number % 2]}" for number in range(1 + SMALL)]
    (folder / "labels.csv").write_text("\n".join(["id,label", *lines]))
    return folder


@pytest.mark.parametrize("encoder", ["deep-sets", "slots", "attention"])
def test_one_set_of_ten_million_rows_trains_in_a_gigabyte(folder, encoder):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), encoder], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    print(f"{encoder}: peak memory {facts['peak'] / 1e6:.0f} MB")
    assert facts["elements"] == ROWS + 1000 * SMALL
    assert facts["peak"] < LIMIT
