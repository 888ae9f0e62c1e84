"""Target 10: encode sets in files, compared with alternatives and with only reading the files.

Each contender runs in its own process, with one thread wherever that can be set.

    python -m bench.files CONTENDER FOLDER     prints CPU and wall seconds, peak bytes and sets

`THREADS=2` in the environment lets setfold use two cores.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from bench.memory import printed_by, status
from bench.plan import BOUNDS, FILE_SETS, FILES, FILES_MEMORY, Plan, Shape, power
from bench.results import MEGABYTE, FilesCost, Results, Target
from bench.timing import Timings
from setfold.native.library import VARIABLE, available

SHAPE = Shape(16, 16, 64)
READING, MATRIX, ENCODE = "reading alone", "reading into a matrix", "setfold encode"
PLAIN = f"{ENCODE}, plain torch"
THREADS = "THREADS"  # environment variable
SMALL = 10  # elements of a small set
FILES_NOTES = (
    f"Parquet files written by pyarrow (snappy) with {SHAPE.dim_in} float32 columns and one column "
    f"for the set; {FILE_SETS:,} sets whose sizes follow a power law, rows in random order.",
    f"{READING}: pyarrow's `iter_batches` over all columns, without using them. {MATRIX}: the "
    "same, converted to a row-major matrix, which any model needs.",
    "polars and DuckDB compute the mean of the raw columns of each set, without a model. The loop "
    "reads a DataFrame into memory, groups it and calls the encoder on each set.",
    "CPU time of a process over all threads, without imports; peak memory of the whole process. All "
    "of them have loaded torch, which takes most of the memory of reading.",
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


def _encoder():  # type: ignore[no-untyped-def]  # setfold is imported where it is used
    import torch

    import setfold

    torch.set_num_threads(int(os.environ.get(THREADS, "1")))
    torch.manual_seed(0)
    return setfold.SlotSetEncoder(SHAPE.dim_in, SHAPE.num_slots, 32, SHAPE.dim_out).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description="Print CPU and wall seconds, peak bytes, sets.")
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ["POLARS_MAX_THREADS"] = "1"
    run = CONTENDERS[arguments.contender]
    with tempfile.TemporaryDirectory() as folder:  # warm-up on a tiny set, for the imports
        _write(Path(folder) / "in", 1000, 1)
        run(Path(folder) / "in")
    begin, begin_wall = time.process_time(), time.monotonic()
    sets = run(arguments.folder)
    seconds, wall = time.process_time() - begin, time.monotonic() - begin_wall
    print(seconds, wall, status("VmHWM"), sets, sep="\n")


# ---- runs in the benchmark's process -------------------------------------------------------------


def compare(results: Results, plan: Plan, directory: Path) -> None:
    """Measure all contenders in turn, then more elements, fewer files, small sets and two cores."""
    with _files(directory, partial(_write, rows=plan.file_rows, files=FILES)) as folder:
        names = (*CONTENDERS, *(f"{ENCODE}, {isa}" for isa in available()[1:-1]))
        cost = _measured(plan, folder, plan.file_rows, FILES, names)
        walls = [[_run(folder, ENCODE, n)[1] for n in (1, 2)] for _ in range(plan.file_rounds)]
    results.files.append(cost)
    _judge_speed(results, cost)
    _judge(results, "wall time with one core / with two", median(a / b for a, b in walls), "cores")
    for rows, files in ((2 * plan.file_rows, FILES), (plan.file_rows, 4)):
        with _files(directory, partial(_write, rows=rows, files=files)) as folder:
            other = _measured(plan, folder, rows, files, (ENCODE,))
        results.files.append(other)
        ratio = other.timings.seconds(ENCODE) / cost.timings.seconds(ENCODE)
        if rows > plan.file_rows:
            claim = f"time for {power(rows)} elements / time for {power(plan.file_rows)}"
            _judge(results, claim, ratio, "linear", at_least=False)
        else:
            claim = f"time for {FILES} files / time for {files}"
            _judge(results, claim, 1 / ratio, "flat", at_least=False)
    with _files(directory, partial(_write_small, sets=plan.file_small_sets)) as folder:
        small = _measured(plan, folder, SMALL * plan.file_small_sets, FILES, (PLAIN, ENCODE))
    results.files.append(small)
    claim = f"time without compiled kernels / time, {power(plan.file_small_sets)} small sets"
    _judge(results, claim, small.timings.ratio(PLAIN, ENCODE), "small_sets")
    peak, bound = cost.megabytes[ENCODE], FILES_MEMORY / MEGABYTE
    claim = "peak memory of a process that encodes files"
    results.targets.append(Target(10, claim, peak, bound, "MB", at_least=False, shape=SHAPE))


def _judge(
    results: Results, claim: str, measured: float, bound: str, at_least: bool = True
) -> None:
    limit = getattr(BOUNDS, f"files_{bound}")
    results.targets.append(Target(10, claim, measured, limit, at_least=at_least, shape=SHAPE))


def _judge_speed(results: Results, cost: FilesCost) -> None:
    """Compare the speed of encoding with that of reading, for each instruction set."""
    best = (available() or ["plain torch"])[-1]
    for name in (name for name in cost.timings.samples if name.startswith(ENCODE)):
        isa = name.removeprefix(ENCODE).removeprefix(", ") or best
        claim = f"speed of encoding ({isa}) / speed of {READING}"
        bound = "speed_v4" if isa == "v4" else "speed"
        _judge(results, claim, cost.timings.ratio(READING, name), bound)


def _measured(plan: Plan, folder: Path, rows: int, files: int, names: tuple[str, ...]) -> FilesCost:
    samples: dict[str, list[float]] = {name: [] for name in names}
    megabytes = dict.fromkeys(names, 0.0)
    for _ in range(plan.file_rounds):
        for name in names:
            seconds, _, peak = _run(folder, name)
            samples[name].append(seconds)
            megabytes[name] = max(megabytes[name], peak / MEGABYTE)
    return FilesCost(rows, files, Timings(samples), megabytes)


def _run(folder: Path, name: str, threads: int = 1) -> tuple[float, float, float]:
    """Return CPU seconds, wall seconds and peak bytes of a contender, "name" or "name, kernels"."""
    settings = {THREADS: str(threads)}
    if name not in CONTENDERS:
        name, _, isa = name.rpartition(", ")
        settings[VARIABLE] = "0" if isa == "plain torch" else isa
    seconds, wall, peak, _ = map(float, printed_by("bench.files", name, str(folder), **settings))
    return seconds, wall, peak


@contextmanager
def _files(directory: Path, write: Callable[[Path], None]) -> Iterator[Path]:
    """Yield a folder with files, and remove it."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        path = Path(folder).resolve() / "in"
        write(path)
        yield path


def _write(folder: Path, rows: int, files: int) -> None:
    """Write sets whose sizes follow a power law."""
    draw = np.random.default_rng(0)
    weights = 1 / np.arange(1, FILE_SETS + 1)
    sets = (draw.choice(FILE_SETS, rows // files, p=weights / weights.sum()) for _ in range(files))
    _write_files(folder, sets, draw)


def _write_small(folder: Path, sets: int) -> None:
    """Write small sets, in random order."""
    draw = np.random.default_rng(0)
    owners = np.repeat(np.arange(sets), SMALL)
    draw.shuffle(owners)
    _write_files(folder, np.array_split(owners, FILES), draw)


def _write_files(folder: Path, files: Iterable[np.ndarray], draw: np.random.Generator) -> None:
    """Write files, given the sets of the rows of each."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    for number, sets in enumerate(files):
        elements = draw.standard_normal((len(sets), SHAPE.dim_in), dtype=np.float32)
        columns = {f"f{i}": elements[:, i] for i in range(SHAPE.dim_in)}
        table = pa.table({"event": sets, **columns})
        pq.write_table(table, folder / f"{number:03d}.parquet", row_group_size=1 << 17)


if __name__ == "__main__":
    main()
