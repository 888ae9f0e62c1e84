"""The Ray engine: the same steps as the local engine, even if workers are lost."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import setfold
from setfold.files.columns import ColumnSpec
from setfold.files.engines import local
from setfold.files.engines import ray as engine
from setfold.files.engines.task import Skipped, Task
from setfold.files.request import ReadOptions, build_plan, with_defaults
from setfold.files.tables.table import RowTable, StateTable

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.long  # all share one cluster

FILES, ROWS, BATCH = 4, 1500, 500  # three steps for each file
HANG = 3600  # seconds; ends a test that hangs, however busy the machine is


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """One Ray instance for all tests, started by the engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "cpu_count", lambda: 2)
        with engine._connection(ray, None):
            yield
    assert not ray.is_initialized()


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def encoder():
    torch.manual_seed(0)
    return setfold.SlotSetEncoder(dim_in=2, num_slots=4, dim_slot=8, dim_out=8).eval()


@pytest.fixture
def folder(tmp_path):
    """Files in which every set occurs."""
    for number in range(FILES):
        generator = np.random.default_rng(number)
        x, y = generator.standard_normal((2, ROWS)).astype(np.float32)
        write(tmp_path / f"{number}.parquet", generator.integers(0, 7, ROWS), x, y)
    return tmp_path


def write(path, event, x, y):
    pq.write_table(pa.table({"event": event, "x": x, "y": y}), path)


def work_on(folder, set="event", kind=Task, skip=False, **settings):
    """Return a task and its shards, with small batches, so that each shard has several steps."""
    columns = ColumnSpec.parse("x, y", set)
    options = with_defaults({"memory": "1GB", "skip_errors": skip}, ReadOptions)
    plan = build_plan(encoder(), folder, columns, options)
    given = {field.name: getattr(plan.task, field.name) for field in fields(Task)}
    return kind(**given | {"batch_rows": BATCH} | settings), plan.shards


def contents_of(steps):
    """Return the content of steps in a form that compares bit by bit."""
    return [(*step[:2], *map(contents, step.tables), *step[3:]) for step in steps]


def contents(table):
    if isinstance(table, RowTable):
        return table.sets.type, table.sets.to_pylist(), table.elements.numpy().tobytes()
    tensors = table.state.tensors()
    bits = {name: (part.dtype, part.numpy().tobytes()) for name, part in tensors.items()}
    return table.sets.type, table.sets.to_pylist(), bits, table.state.weights.digest


# ---- the same as the local engine --------------------------------------------------------------


@pytest.mark.parametrize("set", ["event", None])
def test_the_steps_are_those_of_the_local_engine(folder, set):
    task, shards = work_on(folder, set)
    steps = list(engine.steps(task, shards, 0, 0))
    assert [step.rows for step in steps] == [500, 1000, 1500] * FILES
    assert all(isinstance(step.tables[0], StateTable) for step in steps)
    assert contents_of(steps) == contents_of(local.steps(task, shards, 0, 0))


def test_rows_that_stay_rows_arrive_as_rows(tmp_path):
    zeros = np.zeros(ROWS, np.float32)
    write(tmp_path / "small.parquet", np.arange(ROWS).astype(str), zeros, zeros + 1)
    task, shards = work_on(tmp_path)
    steps = list(engine.steps(task, shards, 0, 0))
    assert all(isinstance(step.tables[0], RowTable) for step in steps)
    assert [name for step in steps for name in step.tables[0].sets.to_pylist()] == [
        str(number) for number in range(ROWS)
    ]
    assert contents_of(steps) == contents_of(local.steps(task, shards, 0, 0))


def test_it_resumes_within_a_shard(folder):
    task, shards = work_on(folder)
    steps = list(engine.steps(task, shards, 2, 500))
    assert [(step.shard, step.rows) for step in steps[:3]] == [(2, 1000), (2, 1500), (3, 500)]
    assert contents_of(steps) == contents_of(local.steps(task, shards, 0, 0))[-5:]


def test_there_may_be_nothing_to_do(folder):
    task, shards = work_on(folder)
    assert list(engine.steps(task, shards, FILES, 0)) == []


def test_names_of_files_may_be_relative(folder, monkeypatch):
    monkeypatch.chdir(folder)
    task, shards = work_on("1.parquet", set=None)
    step, *_ = engine.steps(task, shards, 0, 0)
    assert step.tables[0].sets.to_pylist() == [str(folder / "1.parquet")]


def test_files_become_the_same_vectors(folder):
    outs = {name: folder / f"{name}.arrow" for name in ("local", "ray")}
    for name, out in outs.items():
        summary = setfold.encode_sets(
            encoder(), sorted(folder.glob("*.parquet")), out, set="event", engine=name
        )
        assert (summary.sets, summary.elements) == (7, FILES * ROWS)
    assert outs["local"].read_bytes() == outs["ray"].read_bytes()
    assert ray.is_initialized()  # the existing connection is kept


# ---- errors ------------------------------------------------------------------------------------


def with_nan(folder):
    x = np.zeros(ROWS, np.float32)
    x[700] = np.nan
    write(folder / "1.parquet", np.zeros(ROWS, np.int64), x, x)


def test_an_error_arrives_as_itself_after_the_steps_before_it(folder):
    with_nan(folder)
    task, shards = work_on(folder)
    steps = engine.steps(task, shards, 0, 0)
    before = [next(steps) for _ in range(4)]
    assert [(step.shard, step.rows) for step in before[-2:]] == [(0, 1500), (1, 500)]
    with pytest.raises(setfold.FileError, match=r"1\.parquet, row 700 .*NaN") as caught:
        next(steps)
    with pytest.raises(setfold.FileError) as expected:
        list(local.steps(task, shards, 0, 0))
    assert type(caught.value) is setfold.FileError
    assert str(caught.value) == str(expected.value)


def test_bad_rows_are_skipped_on_request(folder):
    with_nan(folder)
    task, shards = work_on(folder, skip=True)
    steps = list(engine.steps(task, shards, 0, 0))
    assert [(bad.row, step.rows) for step in steps for bad in step.skipped] == [(700, 1000)]
    assert contents_of(steps) == contents_of(local.steps(task, shards, 0, 0))


def test_a_file_that_a_worker_does_not_see_is_named(folder):
    task, shards = work_on(folder)
    (folder / "2.parquet").unlink()
    with pytest.raises(setfold.FileError, match=r"2\.parquet does not exist on .* same path"):
        list(engine.steps(task, shards, 2, 0))


@dataclass(frozen=True)
class Broken(Task):
    """Raises an error that is not from setfold."""

    def steps(self, number, shard, done=0):
        raise ZeroDivisionError("in the model")


def test_an_error_of_the_model_keeps_its_type_and_its_traceback(folder):
    task, shards = work_on(folder, kind=Broken)
    with pytest.raises(ZeroDivisionError, match=r"(?s)test_ray\.py.*in the model"):
        list(engine.steps(task, shards, 0, 0))


# ---- clusters ----------------------------------------------------------------------------------


def test_a_run_without_ray_says_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(setfold.InputError, match=r"pip install 'setfold\[ray\]'"):
        next(engine.steps(None, [], 0, 0))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "ray://127.0.0.1:1"])
def test_a_cluster_that_cannot_be_reached_is_one_line(address, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(setfold.InputError, match=f"at '{address}': .*ray start") as caught:
        next(engine.steps(None, [], 0, 0, address=address))
    assert "\n" not in str(caught.value)


# ---- workers -----------------------------------------------------------------------------------


def wait_for(marker):
    """Wait until a file exists."""
    end = time.monotonic() + HANG
    while not marker.exists():
        assert time.monotonic() < end, f"there is no {marker}"
        time.sleep(0.01)


class Watched(list):
    """Remembers the largest index that was asked for."""

    largest = -1

    def __getitem__(self, index):
        self.largest = max(self.largest, index)
        return super().__getitem__(index)


@dataclass(frozen=True)
class Noting(Task):
    """Records which shards were started; the first one goes on when the fourth has started."""

    notes: Path = Path()

    def steps(self, number, shard, done=0):
        (self.notes / str(number)).touch()
        for step in super().steps(number, shard, done):
            yield step
            if number == 0:
                wait_for(self.notes / "3")


def test_few_shards_are_under_way_and_all_come_in_order(folder, tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    task, shards = work_on(folder, kind=Noting, notes=notes)
    watched = Watched(shards * 3)
    steps = engine.steps(task, watched, 0, 0)
    next(steps)
    assert watched.largest == 3  # two for each core
    wait_for(notes / "3")
    assert {note.name for note in notes.iterdir()} == {"0", "1", "2", "3"}
    assert [step.shard for step in steps] == [n for n in range(3 * FILES) for _ in range(3)][1:]


KEPT = []  # tasks of this process, so that none has the id of an earlier one


@dataclass(frozen=True)
class Counting(Task):
    """Reports its process and object id."""

    def steps(self, number, shard, done=0):
        KEPT.append(self)
        for step in super().steps(number, shard, done):
            skipped = Skipped(str(shard.input.path), None, f"{os.getpid()} {id(self)}")
            yield step._replace(skipped=(skipped,))


def test_the_task_is_unpacked_once_in_a_worker(folder):
    task, shards = work_on(folder, kind=Counting)
    names = [step.skipped[0].reason for step in engine.steps(task, shards * 3, 0, 0)]
    workers = {name.split()[0] for name in names}
    assert len(set(names)) == len(workers)


@dataclass(frozen=True)
class Fatal(Task):
    """Kills its worker in the middle of the second shard, unless the marker file exists.

    It waits until the step before has been consumed; see `consume`.
    """

    marker: Path = Path()
    consumed: Path = Path()
    always: bool = False

    def steps(self, number, shard, done=0):
        for step in super().steps(number, shard, done):
            if number == 1 and step.rows == 1000 and (self.always or not self.marker.exists()):
                self.marker.touch()
                wait_for(self.consumed)
                os.kill(os.getpid(), signal.SIGKILL)
            yield step


def consume(task, shards):
    """Return the steps of a fatal task, and tell it when the step before it dies was consumed."""
    steps = []
    for step in engine.steps(task, shards, 0, 0):
        steps.append(step)
        if (step.shard, step.rows) == (1, 500):
            task.consumed.touch()
    return steps


def fatal(folder, tmp_path, **settings):
    markers = {"marker": tmp_path / "killed", "consumed": tmp_path / "consumed"}
    return work_on(folder, kind=Fatal, **markers, **settings)


def test_a_lost_worker_changes_nothing(folder, tmp_path):
    task, shards = fatal(folder, tmp_path)
    steps = consume(task, shards)
    assert task.marker.exists()
    assert contents_of(steps) == contents_of(
        local.steps(replace(task, batch_rows=BATCH), shards, 0, 0)
    )


def test_workers_that_are_always_lost_end_it(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "RETRIES", 0)
    task, shards = fatal(folder, tmp_path, always=True)
    with pytest.raises(setfold.DistributedError, match=r"1\.parquet after 0 retries.*--resume"):
        consume(task, shards)
