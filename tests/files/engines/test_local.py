"""The local engine: threads change nothing but the time."""

from __future__ import annotations

import threading
import time
from itertools import islice

import pytest
import torch

from setfold.files.budget import WAITING
from setfold.files.engines.local import one_thread, steps


class Recorder:
    """A fake task with some batches per shard. It records what happens in which thread."""

    def __init__(self, threads=1, batches=3, broken=None, fails_at=None):
        self.threads, self.number = threads, batches
        self.broken, self.fails_at = broken, fails_at
        self.lock, self.open, self.begun, self.most = threading.Lock(), set(), 0, 0
        self.closed = set()
        self.used = set()

    def batches(self, number, shard, done):
        try:
            for batch in range(done, self.number):
                with self.lock:
                    assert number not in self.open, "two threads read the same shard"
                    self.open.add(number)
                    self.begun += 1
                self.used.add(threading.current_thread())
                time.sleep(1e-4)  # another thread may run
                if (shard, batch) == self.broken:
                    raise OSError("the file ends here")
                self.open.remove(number)
                yield _Batch(number, batch)
        finally:
            self.closed.add(number)

    def step(self, batch, shard):
        assert not torch.is_grad_enabled()
        if (shard, batch.place) == self.fails_at:
            raise ValueError("a model of the user")
        return shard, batch.place


class _Batch:
    def __init__(self, shard, place):
        self.shard, self.place = shard, place


@pytest.fixture(params=[1, 2, 4])
def threads(request):
    before = set(threading.enumerate())
    with torch.no_grad():
        yield request.param
    assert set(threading.enumerate()) <= before, "all threads have ended"


def test_steps_are_in_order_and_start_at_the_given_row(threads):
    found = list(steps(Recorder(threads), ["a", "b", "c"], first=1, done=2))
    assert found == [("b", 2), ("c", 0), ("c", 1), ("c", 2)]


@pytest.mark.parametrize(("shards", "batches"), [(40, 1), (5, 50), (1, 100), (3, 0), (0, 1)])
def test_steps_of_few_and_of_many_shards(threads, shards, batches):
    names = [f"{number}" for number in range(shards)]
    found = list(steps(Recorder(threads, batches), names, 0, 0))
    assert found == [(name, place) for name in names for place in range(batches)]


def test_one_thread_is_that_of_the_caller():
    task = Recorder()
    with torch.no_grad():
        list(steps(task, ["a"], 0, 0))
    assert task.used == {threading.current_thread()}


def test_threads_share_a_shard():
    together = threading.Barrier(2, timeout=60)  # passed if two steps run at the same time

    class Slow(Recorder):
        def step(self, batch, shard):
            together.wait()
            return super().step(batch, shard)

    assert len(list(steps(Slow(2, batches=4), ["a"], 0, 0))) == 4


def test_shards_ahead_leave_room_for_all_threads_to_help_with_the_current_one():
    together = threading.Barrier(4, timeout=60)

    class Slow(Recorder):
        def step(self, batch, shard):
            if shard == "a" and batch.place < 4:
                together.wait()
            return super().step(batch, shard)

    assert len(list(steps(Slow(4, batches=30), ["a", "b", "c", "d"], 0, 0))) == 120


@pytest.mark.parametrize("options", [{"broken": ("b", 1)}, {"fails_at": ("b", 1)}])
def test_an_error_comes_after_the_steps_before_it(threads, options):
    run = steps(Recorder(threads, **options), ["a", "b", "c"], 0, 0)
    assert [*islice(run, 4)] == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
    with pytest.raises((OSError, ValueError), match=r"ends here|of the user"):
        next(run)


def test_the_first_error_is_raised(threads):
    """A later shard may fail earlier in time."""
    task = Recorder(threads, broken=("c", 0), fails_at=("b", 2))
    with pytest.raises(ValueError, match="of the user"):
        list(steps(task, ["a", "b", "c"], 0, 0))


def test_closing_a_run_ends_its_threads_and_closes_its_files(threads):
    task = Recorder(threads, batches=100)
    run = steps(task, ["a", "b", "c"], 0, 0)
    next(run)
    run.close()
    assert not task.open
    assert 0 in task.closed


def test_steps_wait_for_the_consumer():
    """However slow it is, only so many batches are in memory."""
    task, taken, most = Recorder(2, batches=30), 0, 0
    with torch.no_grad():
        for _ in steps(task, ["a", "b", "c"], 0, 0):
            taken += 1
            threading.Event().wait(0.002)
            most = max(most, task.begun - taken)
    assert taken == 90
    assert most <= 2 * WAITING + 1  # and the one for which the consumer waits


def test_torch_has_one_thread_meanwhile():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3
    torch.set_num_threads(before)


def test_torch_has_one_thread_while_any_of_two_runs_lasts():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    first, second = one_thread(), one_thread()
    with first:
        second.__enter__()
    assert torch.get_num_threads() == 1
    second.__exit__(None, None, None)
    assert torch.get_num_threads() == 3
    torch.set_num_threads(before)


def test_runs_in_two_threads_restore_the_setting_of_both():
    before, settings, found = torch.get_num_threads(), set(), []
    begun, ended = threading.Event(), threading.Event()

    def run():
        with one_thread():
            begun.set()
            ended.wait(60)
            with torch.no_grad():
                list(steps(Noting(2), ["a"], 0, 0))
        found.append(torch.get_num_threads())

    class Noting(Recorder):
        def step(self, batch, shard):
            settings.add(torch.get_num_threads())
            return super().step(batch, shard)

    torch.set_num_threads(3)
    other = threading.Thread(target=run)
    with one_thread():
        other.start()
        begun.wait(60)
    assert torch.get_num_threads() == 3
    ended.set()
    other.join()
    assert (settings, found) == ({1}, [3])
    torch.set_num_threads(before)
