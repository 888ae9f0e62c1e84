"""Target 10: encode sets in files, compared with alternatives and with only reading the files.

Each contender runs in its own process, with one thread wherever that can be set.

    python -m bench.files CONTENDER FOLDER     prints CPU seconds, peak bytes and sets
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.memory import printed_by, status
from bench.plan import BOUNDS, FILE_SETS, FILES, FILES_MEMORY, Plan, Shape, power
from bench.results import MEGABYTE, FilesCost, Results, Target
from bench.timing import Timings

SHAPE = Shape(16, 16, 64)
READING, MATRIX, ENCODE = "reading alone", "reading into a matrix", "setfold encode"
FILES_NOTES = (
    f"Parquet files written by pyarrow (snappy) with {SHAPE.dim_in} float32 columns and one column "
    f"for the set; {FILE_SETS:,} sets whose sizes follow a power law, rows in random order.",
    f"{READING}: pyarrow's `iter_batches` over all columns, without using them. {MATRIX}: the "
    "same, converted to a row-major matrix, which any model needs.",
    "polars and DuckDB compute the mean of the raw columns of each set, without a model. The loop "
    "reads a DataFrame into memory, groups it and calls the encoder on each set.",
    "CPU time of a process over all threads, without imports; peak memory of the whole process.",
)


# ---- runs in the measured process ----------------------------------------------------------------


def read(folder: Path) -> int:
    """Read all batches and discard them."""
    import pyarrow.parquet as pq

    rows = 0
    for path in sorted(folder.iterdir()):
        with pq.ParquetFile(path, buffer_size=1 << 16, pre_buffer=False) as file:
            rows += sum(len(batch) for batch in file.iter_batches(use_threads=False))
    return rows


def read_matrix(folder: Path) -> int:
    """Read all batches as matrices."""
    from setfold.files.columns import ColumnSpec
    from setfold.files.inputs import open_reader
    from setfold.files.rows import rows_of

    columns, dtype = ColumnSpec(None, "event"), np.dtype(np.float32)
    rows = 0
    for path in sorted(folder.iterdir()):
        with open_reader(path) as reader:
            names = columns.needed(reader.schema, {}, path)
            for batch in reader.read(names, rows=1 << 16):
                found = rows_of(batch, columns, first=0, dtype=dtype, width=16, partition={})
                rows += len(found.elements)
    return rows


def encode(folder: Path) -> int:
    """Encode each set as one vector."""
    import setfold

    with tempfile.TemporaryDirectory(dir=folder.parent) as out:
        path = Path(out) / "out.parquet"
        return setfold.encode_sets(_encoder(), folder, path, set="event", memory=FILES_MEMORY).sets


def polars_mean(folder: Path) -> int:
    """Compute the mean of the raw features with polars."""
    import polars as pl

    means = pl.all().exclude("event").mean()
    found = pl.scan_parquet(folder / "*.parquet").group_by("event").agg(means)
    return len(found.collect(engine="streaming"))


def duckdb_mean(folder: Path) -> int:
    """Compute the mean of the raw features with DuckDB."""
    import duckdb

    means = ", ".join(f"avg(f{i})" for i in range(SHAPE.dim_in))
    with duckdb.connect(config={"threads": 1}) as connection:
        query = f"select event, {means} from '{folder}/*.parquet' group by event"
        return len(connection.execute(query).fetchall())


def loop(folder: Path) -> int:
    """Call the encoder on each set of a DataFrame in memory."""
    import pandas as pd
    import torch

    encoder, sets = _encoder(), 0
    frame = pd.read_parquet(folder)
    with torch.no_grad():
        for _, rows in frame.groupby("event"):
            elements = rows.drop(columns="event").to_numpy(np.float32)
            encoder(torch.from_numpy(elements).unsqueeze(0))
            sets += 1
    return sets


CONTENDERS: dict[str, Callable[[Path], int]] = {
    READING: read,
    MATRIX: read_matrix,
    ENCODE: encode,
    "polars, mean": polars_mean,
    "DuckDB, mean": duckdb_mean,
    "PyTorch loop over a DataFrame": loop,
}


def _encoder():  # type: ignore[no-untyped-def]  # the contenders without torch do not import it
    import torch

    import setfold

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return setfold.SlotSetEncoder(SHAPE.dim_in, SHAPE.num_slots, 32, SHAPE.dim_out).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description="Print CPU seconds, peak bytes and sets.")
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ["POLARS_MAX_THREADS"] = "1"
    run = CONTENDERS[arguments.contender]
    with tempfile.TemporaryDirectory() as folder:  # warm-up on a tiny set, for the imports
        _write(Path(folder) / "in", 1000, 1)
        run(Path(folder) / "in")
    begin = time.process_time()
    sets = run(arguments.folder)
    print(time.process_time() - begin, status("VmHWM"), sets, sep="\n")


# ---- runs in the benchmark's process -------------------------------------------------------------


def compare(results: Results, plan: Plan, directory: Path) -> None:
    """Measure all contenders in turn, then more elements and fewer files."""
    cost = _measured(plan, directory, plan.file_rows, FILES, tuple(CONTENDERS))
    results.files.append(cost)
    for number, (rows, files) in enumerate([(2 * plan.file_rows, FILES), (plan.file_rows, 4)]):
        other = _measured(plan, directory, rows, files, (ENCODE,))
        results.files.append(other)
        ratio = other.timings.seconds(ENCODE) / cost.timings.seconds(ENCODE)
        if number == 0:
            claim, bound = (
                f"time for {power(rows)} elements / time for {power(plan.file_rows)}",
                BOUNDS.files_linear,
            )
        else:
            claim, ratio, bound = (
                f"time for {FILES} files / time for {files}",
                1 / ratio,
                BOUNDS.files_flat,
            )
        results.targets.append(Target(10, claim, ratio, bound, at_least=False, shape=SHAPE))
    for peer in (READING, MATRIX):
        speed = cost.timings.ratio(peer, ENCODE)
        claim = f"speed of encoding / speed of {peer}"
        results.targets.append(Target(10, claim, speed, BOUNDS.files_speed, shape=SHAPE))
    peak, bound = cost.megabytes[ENCODE], FILES_MEMORY / MEGABYTE
    claim = "peak memory of a process that encodes files"
    results.targets.append(Target(10, claim, peak, bound, "MB", at_least=False, shape=SHAPE))


def _measured(
    plan: Plan, directory: Path, rows: int, files: int, names: tuple[str, ...]
) -> FilesCost:
    samples: dict[str, list[float]] = {name: [] for name in names}
    megabytes = dict.fromkeys(names, 0.0)
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        _write(Path(folder) / "in", rows, files)
        for _ in range(plan.file_rounds):
            for name in names:
                lines = printed_by("bench.files", name, str(Path(folder).resolve() / "in"))
                samples[name].append(float(lines[0]))
                megabytes[name] = max(megabytes[name], float(lines[1]) / MEGABYTE)
    return FilesCost(rows, files, Timings(samples), megabytes)


def _write(folder: Path, rows: int, files: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    draw = np.random.default_rng(0)
    weights = 1 / np.arange(1, FILE_SETS + 1)
    for number in range(files):
        count = rows // files
        elements = draw.standard_normal((count, SHAPE.dim_in), dtype=np.float32)
        table = pa.table(
            {
                "event": draw.choice(FILE_SETS, count, p=weights / weights.sum()),
                **{f"f{i}": elements[:, i] for i in range(SHAPE.dim_in)},
            }
        )
        pq.write_table(table, folder / f"{number:03d}.parquet", row_group_size=1 << 17)


if __name__ == "__main__":
    main()
