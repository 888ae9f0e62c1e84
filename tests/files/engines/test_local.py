"""The local engine: a second core reads ahead, one core does one thing after the other."""

from __future__ import annotations

import threading

import pytest
import torch

from setfold.files.engines.local import steps


class Recorder:
    """Stands for a task: three batches of a piece, and in which thread each thing was done."""

    def __init__(self, broken=False, device="cpu"):
        self.broken, self.device = broken, torch.device(device)
        self.read_in, self.threads = set(), set()

    def batches(self, number, piece, done):
        for batch in range(done, 3):
            self.read_in.add(threading.current_thread())
            if self.broken and batch == 2:
                raise OSError("the file ends here")
            yield _Batch(number, batch)

    def step(self, batch, piece):
        self.threads.add(torch.get_num_threads())
        return piece, batch.place


class _Batch:
    def __init__(self, piece, place):
        self.piece, self.place = piece, place


@pytest.fixture(params=[1, 2, 4])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    assert torch.get_num_threads() == request.param, "left as it was found"
    torch.set_num_threads(before)


def test_steps_come_in_order_and_begin_where_they_are_told_to(threads):
    found = list(steps(Recorder(), ["a", "b", "c"], first=1, done=2))
    assert found == [("b", 2), ("c", 0), ("c", 1), ("c", 2)]


def test_who_reads_is_taken_from_those_who_compute(threads):
    task = Recorder()
    list(steps(task, ["a"], first=0, done=0))
    assert (threading.current_thread() in task.read_in) == (threads == 1)
    assert task.threads == {max(1, threads - 1)}


def test_another_device_computes_while_files_are_read(threads):
    task = Recorder(device="meta")
    list(steps(task, ["a"], first=0, done=0))
    assert threading.current_thread() not in task.read_in


def test_an_error_while_reading_comes_after_the_steps_before_it(threads):
    run = steps(Recorder(broken=True), ["a"], first=0, done=0)
    assert [next(run), next(run)] == [("a", 0), ("a", 1)]
    with pytest.raises(OSError, match="ends here"):
        next(run)


def test_no_thread_outlives_a_run_that_was_given_up(threads):
    before = threading.active_count()
    run = steps(Recorder(), ["a", "b"], first=0, done=0)
    next(run)
    run.close()
    assert threading.active_count() == before
