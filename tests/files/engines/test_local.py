"""The local engine: it reads ahead in a thread if there are two cores."""

from __future__ import annotations

import threading

import pytest
import torch

from setfold.files.engines.local import steps


class Recorder:
    """A fake task with three batches per shard. It records the threads that were used."""

    def __init__(self, broken=False, device="cpu"):
        self.broken, self.device = broken, torch.device(device)
        self.read_in, self.threads = set(), set()

    def batches(self, number, shard, done):
        for batch in range(done, 3):
            self.read_in.add(threading.current_thread())
            if self.broken and batch == 2:
                raise OSError("the file ends here")
            yield _Batch(number, batch)

    def step(self, batch, shard):
        self.threads.add(torch.get_num_threads())
        return shard, batch.place


class _Batch:
    def __init__(self, shard, place):
        self.shard, self.place = shard, place


@pytest.fixture(params=[1, 2, 4])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    assert torch.get_num_threads() == request.param, "the number of threads is restored"
    torch.set_num_threads(before)


def test_steps_are_in_order_and_start_at_the_given_row(threads):
    found = list(steps(Recorder(), ["a", "b", "c"], first=1, done=2))
    assert found == [("b", 2), ("c", 0), ("c", 1), ("c", 2)]


def test_the_reading_thread_replaces_a_computing_thread(threads):
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


def test_closing_a_run_ends_its_thread(threads):
    before = set(threading.enumerate())
    run = steps(Recorder(), ["a", "b"], first=0, done=0)
    next(run)
    run.close()
    assert set(threading.enumerate()) <= before
