from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.testing import assert_close

import setfold
from setfold.core.state import SetState
from tests.small import AGGREGATES, TIGHT, assert_same_state, contextual, draw, make

# ---- merge ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (lambda e: e.train().initial_state(2), "different slots.*encoder.eval()"),
        (lambda e: make(seed=1).initial_state(2, slots=e.draw_frame(None, None)), "weights"),
        (lambda e: make(aggregate="max").initial_state(2), "different fields: .*Sum.*Max"),
        (lambda e: e.initial_state(3), "numbers of sets: 2 and 3"),
        (lambda e: e.initial_state(2, num_slots=7), "different fields: .*4.*7"),
        (lambda e: e.initial_state(2).to("meta"), "devices: cpu and meta.*state.to"),
        (lambda e: contextual().initial_state(2, context=draw(2, 4)), "contexts"),
        (lambda e: draw(2, 4, 5), "expected a state to merge; got Tensor"),
        (lambda e: None, "got NoneType"),
    ],
    ids=["slots", "weights", "aggregate", "sets", "K", "device", "context", "tensor", "none"],
)
def test_merge_names_the_difference(other, difference):
    encoder = make()
    state = encoder.update(encoder.initial_state(2), draw(2, 5, 3))
    before = copy.deepcopy(state)
    with pytest.raises(setfold.StateMismatchError, match=difference):
        state.merge(other(encoder))
    assert_same_state(state, before)


def test_merge_refuses_contexts_of_other_shapes():
    encoder = contextual()
    left = encoder.initial_state(2, context=draw(2, 4))
    with pytest.raises(setfold.StateMismatchError, match="contexts"):
        left.merge(encoder.initial_state(2, context=draw(2, 5)))


def test_merge_refuses_another_dtype():
    encoder = make()
    with pytest.raises(setfold.StateMismatchError):
        encoder.initial_state().merge(copy.deepcopy(encoder).float().initial_state())


# ---- what a state tells --------------------------------------------------------------------


def test_slots_count_and_length_are_by_set():
    encoder = make()
    mask = torch.tensor([[True, True, False], [True, False, False]])
    state = encoder.update(encoder.initial_state(2), draw(2, 3, 3), mask=mask)
    assert state.slots.shape == (2, 4, 6)
    assert torch.equal(state.slots[0], state.slots[1])
    assert state.count.dtype == torch.int64
    assert state.count.tolist() == [2, 1]
    assert len(state) == 2


def test_pool_has_no_slots():
    assert setfold.Pool(3).initial_state().slots is None


def test_repr_names_sets_elements_and_fields():
    encoder = make(aggregate=["mean", "max"])
    state = encoder.update(encoder.initial_state(2), draw(2, 5, 3))
    for words in ("2 sets", "10 elements", "sum=Sum()[4, ", "max=Max()[4, 5]"):
        assert words in repr(state)
    assert "? elements" in repr(state.to("meta"))


# ---- indexing ------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregate", AGGREGATES, ids=str)
def test_a_set_taken_out_is_that_set_folded_alone(aggregate):
    encoder, chunk = make(aggregate=aggregate), draw(3, 5, 3)
    state = encoder.update(encoder.initial_state(3), chunk)
    for number in range(3):
        alone = encoder.update(encoder.initial_state(1), chunk[number : number + 1])
        assert_same_state(state[number], alone)
        assert_same_state(state[number - 3], alone)
    assert_same_state(state[1:], encoder.update(encoder.initial_state(2), chunk[1:]))
    assert_same_state(state[::2], encoder.update(encoder.initial_state(2), chunk[::2]))
    for places in ([2, 0, -1], torch.tensor([1, 1]), [], torch.tensor([True, False, True])):
        alone = encoder.update(encoder.initial_state(len(chunk[places])), chunk[places])
        assert_same_state(state[places], alone)
    assert [len(one) for one in state] == [1, 1, 1]


@pytest.mark.parametrize("place", [3, -4])
def test_index_out_of_range_is_an_index_error(place):
    for item in (place, [0, place], torch.tensor([place])):
        with pytest.raises(IndexError, match=f"{place} is out of range for a state of 3 sets"):
            make().initial_state(3)[item]


@pytest.mark.parametrize(
    "item",
    ["0", 1.0, (0, 1), [0.0], [True, False, True], torch.ones(1), torch.ones(2, dtype=bool)],
    ids=str,
)
def test_index_of_another_kind_is_refused(item):
    with pytest.raises(setfold.InputError, match="integers, a slice, or a bool tensor"):
        make().initial_state(3)[item]


# ---- stack ---------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True], ids=["shared slots", "own slots"])
@pytest.mark.parametrize("aggregate", AGGREGATES, ids=str)
def test_stack_and_index_undo_each_other(aggregate, training):
    encoder = make(aggregate=aggregate).train(training)
    states = [
        encoder.update(encoder.initial_state(b), draw(b, 4, 3, seed=b)).detach() for b in (1, 2)
    ]
    stacked = SetState.stack(iter(states))
    assert len(stacked) == 3
    assert stacked.has_own_slots is training
    assert_same_state(stacked[0], states[0])
    for number in (0, 1):
        assert_same_state(stacked[1 + number], states[1][number])


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("aggregate", AGGREGATES, ids=str)
def test_update_of_a_stack_with_own_slots_is_that_of_each_set(aggregate, grad):
    encoder = make(aggregate=aggregate).train()
    mask = torch.rand(3, 9, generator=torch.Generator().manual_seed(1)) < 0.6
    with torch.set_grad_enabled(grad):
        states = [encoder.update(encoder.initial_state(), draw(1, 4, 3, seed=i)) for i in range(3)]
        stacked, chunk = SetState.stack(states), draw(3, 9, 3)
        ways = [
            (encoder.update(stacked, chunk), lambda i: chunk[i]),
            (encoder.update(stacked, chunk, mask=mask), lambda i: chunk[i, mask[i]]),
            (
                encoder.update(stacked, chunk[mask], index=mask.nonzero()[:, 0]),
                lambda i: chunk[i, mask[i]],
            ),
        ]
        for together, part in ways:
            alone = [encoder.update(s, part(i).unsqueeze(0)) for i, s in enumerate(states)]
            expected = torch.cat([encoder.readout(s) for s in alone])
            assert_close(encoder.readout(together), expected, **TIGHT)
            assert together.count.tolist() == [int(s.count) for s in alone]


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (lambda e: make(seed=1).initial_state(), "weights"),
        (lambda e: make(aggregate="max").initial_state(), "different fields: .*Sum.*Max"),
        (lambda e: e.initial_state(num_slots=7), "different fields: .*4.*7"),
        (lambda e: contextual().initial_state(context=draw(1, 4)), "context"),
        (lambda e: e.initial_state().to("meta"), "device"),
        (lambda e: draw(1, 4, 5), "Tensor"),
    ],
    ids=["weights", "aggregate", "K", "context", "device", "tensor"],
)
def test_stack_names_the_difference(other, difference):
    encoder = make()
    with pytest.raises(setfold.StateMismatchError, match=difference):
        SetState.stack([encoder.initial_state(), other(encoder)])


def test_stack_of_nothing_is_refused():
    with pytest.raises(setfold.InputError, match="at least one state"):
        SetState.stack([])


# ---- copies --------------------------------------------------------------------------------


def test_to_moves_every_tensor():
    encoder = make()
    state = encoder.update(encoder.initial_state(), draw(1, 5, 3))
    assert_same_state(state.to("cpu"), state)
    away = state.to(torch.device("meta"))
    assert {t.device.type for t in away.tensors().values()} == {"meta"}
    assert state.device.type == "cpu"


@pytest.mark.parametrize("device", ["garbage", torch.float32, None, 1.5])
def test_to_something_else_says_what_it_takes(device):
    with pytest.raises(setfold.InputError, match="takes a device, such as 'cpu'"):
        make().initial_state().to(device)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "detach": SetState.detach,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("aggregate", AGGREGATES, ids=str)
def test_a_copy_is_the_same_state_without_its_history(aggregate, copied):
    encoder = make(aggregate=aggregate, slots="learned")
    state = encoder.update(encoder.initial_state(), draw(1, 5, 3))
    assert any(t.requires_grad for t in state.tensors().values())
    other = copied(state)
    assert not any(t.requires_grad for t in other.tensors().values())
    assert_same_state(other, state)
    assert_close(encoder.readout(other.merge(state)), encoder.readout(state.merge(state)), **TIGHT)


def test_a_deep_copy_has_memory_of_its_own():
    encoder = make()
    state = encoder.update(encoder.initial_state(), draw(1, 5, 3)).detach()
    twin = copy.deepcopy(state)
    twin.statistics["sum"][0].zero_()
    twin.count.zero_()
    assert state.statistics["sum"][0].abs().sum() > 0
    assert int(state.count) == 5


def test_a_clone_has_memory_of_its_own_and_passes_gradients_on():
    encoder, chunk = make(), draw(1, 5, 3).requires_grad_()
    state = encoder.update(encoder.initial_state(), chunk)
    twin = state.clone()
    assert_same_state(twin, state)
    for name, parts in state.statistics.items():
        assert twin.statistics[name][0].data_ptr() != parts[0].data_ptr()
    encoder.readout(twin).sum().backward()
    assert chunk.grad.abs().max() > 0


def test_gradients_flow_through_stack_index_and_merge():
    encoder, chunk = make(), draw(2, 5, 3).requires_grad_()
    left, right = (encoder.update(encoder.initial_state(), part) for part in chunk.split(1))
    whole = encoder.readout(SetState.stack([left, right])[1].merge(left))
    (found,) = torch.autograd.grad(whole.pow(2).sum(), chunk)
    together = chunk.reshape(1, 10, 3)
    (expected,) = torch.autograd.grad(encoder(together).pow(2).sum(), chunk)
    assert expected.abs().max() > 1e-6
    assert_close(found, expected, **TIGHT)
