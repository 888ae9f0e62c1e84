"""Threads: the same bits with any number of them, also after errors and interruptions."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pytest
import torch

import setfold
from setfold.errors import FileError, InputError
from setfold.files import plan
from setfold.files.budget import BASE_BYTES, COLUMN_BYTES, WAITING, split_memory
from setfold.files.columns import ColumnSpec
from setfold.files.engines.task import Task
from setfold.files.plan import make_plan
from setfold.files.readers.columnar import ParquetReader
from tests.files.files import encode, encoder, interrupt, rows, write

NUMBERS = [1, 2, 5]
MB = 10**6


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No run leaves threads behind, or changes how many torch uses."""
    running, before = set(threading.enumerate()), torch.get_num_threads()
    yield
    assert set(threading.enumerate()) <= running
    assert torch.get_num_threads() == before


def assert_same_bytes(paths):
    first, *others = (path.read_bytes() for path in paths)
    assert all(other == first for other in others)


@pytest.mark.parametrize("names", [int, str])
@pytest.mark.parametrize("memory", ["little", "enough"])
def test_the_same_bytes(tmp_path, request, names, memory):
    if memory == "little":
        request.getfixturevalue("tight")
    folder = write(tmp_path / "in", rows(2000, 60, names=names))
    outs = [tmp_path / f"{number}.parquet" for number in NUMBERS]
    for number, out in zip(NUMBERS, outs, strict=True):
        encode(encoder(), folder, out, threads=number, states=out.with_suffix(".arrow"))
    assert_same_bytes(outs)
    assert_same_bytes([out.with_suffix(".arrow") for out in outs])


def test_the_same_bytes_of_one_shard(tmp_path, tight):
    pacsv.write_csv(rows(2000, 60), tmp_path / "in.csv")
    outs = [tmp_path / f"{number}.parquet" for number in NUMBERS]
    for number, out in zip(NUMBERS, outs, strict=True):
        encode(encoder(), tmp_path / "in.csv", out, threads=number)
    assert_same_bytes(outs)


def test_the_same_bytes_of_a_wide_model_with_a_network(tmp_path):
    """Torch computes with one thread for each batch, so that it adds in the same order."""
    torch.manual_seed(0)
    features = torch.nn.Sequential(torch.nn.Linear(3, 256), torch.nn.ReLU())
    model = setfold.DeepSets(features, dim_features=256).eval()
    folder = write(tmp_path / "in", rows(20_000, 7))
    outs = [tmp_path / f"{number}.parquet" for number in NUMBERS]
    before = torch.get_num_threads()
    try:
        for number, out in zip(NUMBERS, outs, strict=True):
            torch.set_num_threads(number)  # the default
            encode(model, folder, out)
    finally:
        torch.set_num_threads(before)
    assert_same_bytes(outs)


def test_an_operation_of_torch_has_one_thread(tmp_path, tight, monkeypatch):
    """Also when weights are prepared and encodings are read out."""
    used, forward = set(), torch.nn.Linear.forward

    def noted(layer, elements):
        used.add(torch.get_num_threads())
        return forward(layer, elements)

    monkeypatch.setattr(torch.nn.Linear, "forward", noted)
    encode_with_three(deep_sets(torch.nn.Linear), tmp_path)
    assert used == {1}


def test_a_model_for_one_thread_has_those_of_torch(tmp_path, tight):
    used, callers = set(), set()

    class Noting(torch.nn.Linear):
        def forward(self, elements):
            used.add(torch.get_num_threads())
            callers.add(threading.current_thread())
            return super().forward(elements)

    encode_with_three(deep_sets(Noting), tmp_path)
    assert used == {3}
    assert callers == {threading.current_thread()}


def deep_sets(layer):
    torch.manual_seed(0)
    return setfold.DeepSets(layer(3, 4), dim_features=4, head=layer(4, 2)).eval()


def encode_with_three(model, folder):
    """Encode with different numbers of threads, while torch uses three."""
    rows_folder, before = write(folder / "in", rows()), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for number in NUMBERS:
            encode(model, rows_folder, folder / f"{number}.parquet", threads=number, head=True)
    finally:
        torch.set_num_threads(before)


class Own(torch.nn.Linear):
    """A module of the user, which keeps something in an attribute during a call."""

    def forward(self, elements):
        self.seen = elements
        return super().forward(elements) * self.seen.norm(dim=-1, keepdim=True)


MODELS = {
    "several passes": (lambda: setfold.EquivariantDeepSets(3, [8, 8]), 4),
    "half precision": (lambda: setfold.EquivariantDeepSets(3, [8, 8]).half(), 1),
    "a head": (lambda: deep_sets(torch.nn.Linear), 4),
    "own modules": (lambda: setfold.DeepSets(Own(3, 4), dim_features=4), 1),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_same_bytes_of_all_models(tmp_path, tight, monkeypatch, name):
    """Only one thread calls a model that keeps something in its modules during a call."""
    make, allowed = MODELS[name]
    torch.manual_seed(0)
    model, used = make().eval(), []
    monkeypatch.setattr(plan, "Task", lambda *args: used.append(args[-1]) or Task(*args))
    folder = write(tmp_path / "in", rows(2000, 60))
    outs = [tmp_path / f"{number}.parquet" for number in (1, 4)]
    encode(model, folder, outs[0], threads=1, head=name == "a head")
    assert {*used} == {1}
    used.clear()
    encode(model, folder, outs[1], threads=4, head=name == "a head")
    assert {*used} == {allowed}
    assert_same_bytes(outs)


def test_another_device_has_two_threads():
    """One reads while another waits for the device, and more of them would only take memory."""
    assert [plan.threads_for(encoder(), number) for number in (1, 8)] == [1, 8]
    assert [plan.threads_for(encoder().to("meta"), number) for number in (1, 8)] == [2, 2]
    assert plan.threads_for(encoder().half().to("meta"), 8) == 1
    hooked = deep_sets(torch.nn.Linear)
    hooked.features.register_forward_hook(lambda *_: None)
    assert plan.threads_for(hooked, 8) == 1


def test_the_same_bytes_within_autocast(tmp_path, tight):
    """It is not used, because other threads do not have it."""
    folder, model = write(tmp_path / "in", rows()), deep_sets(torch.nn.Linear)
    outs = [tmp_path / f"{number}.parquet" for number in (1, 2, 3)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for number, out in zip((1, 2), outs, strict=False):
            encode(model, folder, out, threads=number, head=True)
        assert torch.is_autocast_enabled("cpu")
    encode(model, folder, outs[2], head=True)
    assert_same_bytes(outs)


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1), (4, 4)])
def test_a_run_is_resumed_with_any_number(tmp_path, tight, monkeypatch, first, second):
    folder, model = write(tmp_path / "in", rows(1000, 100)), encoder()
    whole, parts = tmp_path / "whole.parquet", tmp_path / "parts.parquet"
    encode(model, folder, whole, threads=1)
    interrupt(monkeypatch, model, folder, parts, threads=first)
    encode(model, folder, parts, threads=second, resume=True)
    assert_same_bytes([whole, parts])


@pytest.mark.parametrize("number", NUMBERS)
def test_a_bad_row_is_named(tmp_path, tight, number):
    table = rows(1000, 30)
    numbers = table["f1"].to_numpy().copy()
    numbers[[310, 700, 990]] = np.nan
    folder = write(tmp_path / "in", table.set_column(2, "f1", pa.array(numbers)))
    with pytest.raises(FileError, match=r"part-1.parquet, row 60 .*'f1' is NaN"):
        encode(encoder(), folder, tmp_path / "out.parquet", threads=number)


def test_skipped_rows_are_listed_in_order(tmp_path, tight):
    table = rows(1000, 30)
    numbers = table["f1"].to_numpy().copy()
    numbers[::37] = np.nan
    folder = write(tmp_path / "in", table.set_column(2, "f1", pa.array(numbers)))
    reports = []
    for number in NUMBERS:
        out = tmp_path / f"{number}.parquet"
        found = encode(encoder(), folder, out, threads=number, skip_errors=True)
        with open(found.report) as file:
            reports.append(file.read())
    assert reports[0] == reports[1] == reports[2]
    assert reports[0].count("NaN") == 28


# The signal may arrive between the opening of a file and the `with` that closes it.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_ctrl_c(tmp_path, tight, monkeypatch):
    """The main thread is interrupted while others work; the run can be resumed."""
    folder, model = write(tmp_path / "in", rows(1000, 100)), encoder()
    whole, parts = tmp_path / "whole.parquet", tmp_path / "parts.parquet"
    encode(model, folder, whole)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    original, calls = Task.step, []

    def press(self, batch, shard):
        calls.append(batch)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, batch, shard)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(Task, "step", press)
            with pytest.raises(KeyboardInterrupt):
                encode(model, folder, parts, threads=2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not parts.exists()
    encode(model, folder, parts, threads=2, resume=True)
    assert_same_bytes([whole, parts])


def test_an_error_of_the_consumer_ends_the_threads(tmp_path, tight):
    def fail(progress):
        raise ZeroDivisionError

    folder = write(tmp_path / "in", rows(1000, 30))
    with pytest.raises(ZeroDivisionError):
        encode(encoder(), folder, tmp_path / "out.parquet", threads=2, progress=fail)


def test_threads_fit_in_memory(tmp_path, monkeypatch):
    """The batches, and the blocks of rows that can only be read together, of all threads."""
    folder, columns = write(tmp_path / "in", rows()), ColumnSpec.parse(None, "event")

    def threads(memory):
        arguments = {"memory": memory, "skip": False, "threads": 64}
        return make_plan(encoder(), [folder], columns, **arguments).task.threads

    assert 1 <= threads(500 * MB) < threads(1000 * MB) < threads(4000 * MB)
    monkeypatch.setattr(ParquetReader, "block_bytes", lambda self, names: 160 * MB)
    assert threads(500 * MB) == 1
    assert threads(1000 * MB) == 2


@pytest.mark.parametrize(("columns", "row_bytes"), [(1, 100), (20, 1000), (500, 20_000)])
def test_memory_is_split_between_threads(columns, row_bytes):
    for memory in (1200 * MB, 2000 * MB, 9000 * MB):
        found = split_memory(memory, 10 * MB, columns, row_bytes, 50)
        held = found.batch_rows * (row_bytes + (WAITING - 1) * 50) + columns * COLUMN_BYTES
        rest = BASE_BYTES + 30 * MB + found.store_bytes
        assert found.batches >= 1
        assert rest + found.batches * held <= memory


@pytest.mark.parametrize("wrong", [0, -1])
def test_numbers_that_are_not_positive(tmp_path, wrong):
    with pytest.raises(InputError, match="threads must be an integer of at least 1"):
        encode(encoder(), tmp_path, tmp_path / "out.parquet", threads=wrong)
