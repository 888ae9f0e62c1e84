"""Cases of distributed_jobs.py: states that do not belong together, and processes that fail."""

from __future__ import annotations

import os
import signal
from functools import partial

import torch

import setfold
from setfold.errors import DistributedError, InputError, StateMismatchError
from setfold.folding.merge import agree, all_merge
from setfold.folding.messages import exchange, report_failure
from tests.folding.distributed_jobs import arrive, case, raises, short_timeout, wait_for
from tests.small import draw, make

CPU = torch.device("cpu")


# ---- what does not belong together -----------------------------------------------------------


def state_of(model, sets=1, **options):
    return model.update(model.initial_state(sets, **options), draw(sets, 3, 3))


def last(rank, world):
    return int(rank == world - 1)


@case()
def other_weights(rank, world):
    text = raises(
        StateMismatchError, "different weights", all_merge, state_of(make(seed=last(rank, world)))
    )
    assert f"in process {world - 1}." in text


@case()
def other_slots(rank, world):
    model = make().train()
    state = state_of(model, generator=torch.Generator().manual_seed(min(rank, 1)))
    text = raises(StateMismatchError, "with different slots", all_merge, state)
    assert "processes 1, 2" in text
    assert "setfold.fold(..., group=...)" in text


@case()
def slots_that_were_rounded_differently(rank, world):
    slots = draw(4, 6) * (1 + 1e-9 * rank)
    state = all_merge(state_of(make(), slots=slots))
    assert torch.equal(state.frame[0][0], slots)
    text = "with different slots"
    raises(StateMismatchError, text, all_merge, state_of(make(), slots=draw(4, 6) + 1e-4 * rank))


@case()
def another_number_of_slots(rank, world):
    state = state_of(make().train(), num_slots=4 + last(rank, world))
    raises(StateMismatchError, "different fields", all_merge, state)


@case()
def other_contexts(rank, world):
    class Contextual(setfold.SlotSetEncoder):
        def featurize(self, elements, mask, context):
            return elements

    torch.manual_seed(0)
    model = Contextual(3, 4, 6, 5).double().eval()
    state = state_of(model, context=draw(1, 2, seed=last(rank, world)))
    text = raises(StateMismatchError, "different contexts", all_merge, state)
    assert f"those of process {world - 1} differ" in text
    state = state_of(model, context=None if rank else draw(1, 2))
    raises(StateMismatchError, "different contexts", all_merge, state)


@case()
def another_aggregate(rank, world):
    model = make(aggregate="max" if last(rank, world) else "mean")
    text = raises(StateMismatchError, "different fields", all_merge, state_of(model))
    assert f"in process {world - 1}." in text


@case()
def another_number_of_sets(rank, world):
    state = state_of(make(), sets=2 + last(rank, world))
    raises(StateMismatchError, "different numbers of sets: 2 in process", all_merge, state)


@case()
def gradients_in_some(rank, world):
    with torch.set_grad_enabled(rank != 0):
        state = state_of(make())
        raises(StateMismatchError, "different gradient modes: False in process 0", all_merge, state)


@case()
def no_state_in_one(rank, world):
    if last(rank, world):
        raises(StateMismatchError, "got NoneType", all_merge, None)
    else:
        told = f"process {world - 1} of {world} failed: StateMismatchError: expected a state"
        raises(DistributedError, told, all_merge, state_of(make()))


@case()
def weights_that_changed(rank, world):
    """A state belongs to the weights that made it, so a later change does not stop a merge."""
    model = make()
    state = state_of(model)
    if rank == 0:
        with torch.no_grad():
            next(model.parameters()).add_(1)
    assert all_merge(state).count.tolist() == [3 * world]


# ---- messages and failures -------------------------------------------------------------------


@case()
def messages(rank, world):
    said = [
        {"rank": r, "text": "ä" * 100 * r, "none": None, "big": 2**61 + r} for r in range(world)
    ]
    assert exchange(said[rank], None, CPU) == said


@case()
def out_of_step(rank, world):
    raises(DistributedError, "out of step", exchange, {"a" if rank else "b": 1}, None, CPU)


@case()
def another_device(rank, world):
    raises(InputError, "the state is on meta", exchange, {}, None, torch.device("meta"))


@case()
def agreement(rank, world):
    assert agree(None if rank == 1 else 5, 7 + rank, {}, None, CPU) == (5, 7)
    sets = 5 + last(rank, world)
    text = raises(InputError, "must have the same number of sets", agree, sets, 0, {}, None, CPU)
    assert f"6 in process {world - 1}." in text
    raises(InputError, f"none of the {world} processes has any", agree, None, 0, {}, None, CPU)


@case()
def a_failure_is_reported(rank, world):
    """Of whatever is to come next, and more than once."""
    for step in (partial(agree, 1, 0, {}, None, CPU), lambda: all_merge(state_of(make()))):

        def work(step=step):
            with report_failure(None, CPU):
                if last(rank, world):
                    raise OSError("the disk is full")
            step()

        if last(rank, world):
            raises(OSError, "the disk is full", work)
        else:
            told = f"process {world - 1} of {world} failed: OSError: the disk is full"
            raises(DistributedError, told, work)
    assert agree(1, 0, {}, None, CPU)[0] == 1  # and then they go on


@case()
def failures_in_all(rank, world):
    def work():
        with report_failure(None, CPU):
            raise OSError(f"disk {rank} is full")

    raises(OSError, f"disk {rank} is full", work)
    assert agree(1, 0, {}, None, CPU)[0] == 1


@case()
def a_failure_that_all_know_is_not_told_again(rank, world):
    def work():
        with report_failure(None, CPU):
            raise DistributedError("known")

    if last(rank, world):
        raises(DistributedError, "known", work)
    assert agree(1, 0, {}, None, CPU)[0] == 1  # no news


def give_up(rank, world, part, call, *args):
    """The last process does not come until the others have given up; what they raise."""
    short_timeout(world)
    if last(rank, world):
        wait_for("gave up", world - 1)
        return None
    text = raises(DistributedError, part, call, *args)
    arrive("gave up")
    return text


@case()
def one_does_not_come(rank, world):
    told = f"process {rank} of {world} could not"
    text = give_up(rank, world, told, all_merge, state_of(make()))
    assert text is None or "the timeout of the process group" in text


@case()
def one_does_not_come_back(rank, world):
    encoding = all_merge(state_of(make())).statistics["sum"][0]
    give_up(rank, world, "could not add up the gradients", encoding.sum().backward)


@case(deadly=True)
def one_is_killed_while_it_folds(rank, world):
    if last(rank, world):
        os.kill(os.getpid(), signal.SIGKILL)
    text = raises(DistributedError, f"process {rank} of {world}", all_merge, state_of(make()))
    assert "has died" in text


@case(deadly=True)
def one_ends_before_its_backward_pass(rank, world):
    encoding = all_merge(state_of(make())).statistics["sum"][0]
    if last(rank, world):
        wait_for("merged", world - 1)
        os._exit(7)
    arrive("merged")
    raises(DistributedError, "could not add up the gradients", encoding.sum().backward)
