"""Slot Attention against plain loops and the package slot-attention, and what is its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

import setfold
from tests import peers, reference
from tests.small import TIGHT, assert_compiles_and_exports, assert_loops_agree, draw
from tests.strategies import cases, slot_attentions


def make(seed=0, **changes):
    torch.manual_seed(seed)
    chosen = {"dim_in": 3, "num_slots": 4, "dim": 6, "dim_hidden": 7} | changes
    return setfold.SlotAttention(**chosen).double().eval()


def loops_of(encoder):
    slots = encoder.draw_slots()[0]
    return lambda rows: reference.slot_attention(encoder, rows, slots)


@settings(max_examples=40)
@given(encoder=slot_attentions(), case=cases(), masked=st.booleans(), tracked=st.booleans())
def test_it_is_what_the_loops_say(encoder, case, masked, tracked):
    encoder, mask = encoder.double().eval(), case.mask if masked else None
    with torch.set_grad_enabled(tracked):
        assert_loops_agree(encoder, loops_of(encoder), case.elements, mask, atol=1e-11)


@pytest.mark.parametrize("num_slots", [2, 40])  # elements are summed, or their values
def test_both_ways_to_sum_are_what_the_loops_say(num_slots):
    encoder = make(dim_in=8, num_slots=num_slots, dim=4)
    assert encoder.attention.folded == (num_slots == 2)
    assert_loops_agree(encoder, loops_of(encoder), draw(2, 9, 8), atol=1e-11)


def test_a_slot_that_nobody_wants_takes_the_mean_of_all():
    """There the epsilon that is added to every weight is all that there is."""
    encoder = make(num_slots=2, num_iterations=1)
    attention, elements = encoder.attention, draw(1, 9, 3)
    with torch.no_grad():  # so that all elements want the same one
        attention.to_query.weight.mul_(200)
        attention.to_key.weight.mul_(0.01)
    weights = attention.weights(attention.initial_state(1), encoder.norm_input(elements))
    assert weights[0].amax(0).min() < 1e-12  # far below epsilon
    assert_loops_agree(encoder, loops_of(encoder), elements)
    values = attention.to_value(encoder.norm_input(elements))[0]
    update = values.mean(0).expand(2, -1)
    unwanted = int(weights[0].amax(0).argmin())
    refined = encoder.gru(update, encoder.draw_slots()[0])
    expected = refined + encoder.mlp(encoder.norm_hidden(refined))
    assert_close(encoder(elements)[0, unwanted], expected[unwanted], rtol=1e-4, atol=1e-5)


# ---- the package slot-attention ----------------------------------------------------------------


@pytest.mark.parametrize("num_iterations", [1, 3])
def test_it_is_the_packages(monkeypatch, num_iterations):
    encoder = make(dim_in=6, num_iterations=num_iterations)
    with torch.no_grad():
        encoder.attention.slot_mean.add_(draw(6))
        encoder.attention.slot_deviation.copy_(draw(6, seed=1).exp())
    elements, noise = draw(3, 10, 6), draw(4, 6, seed=2)
    theirs = peers.slot_attention(encoder)
    monkeypatch.setattr(torch, "randn", lambda *_, **__: noise.expand(3, -1, -1))
    expected = theirs(elements)
    monkeypatch.setattr(torch, "randn", lambda *_, **__: noise)
    assert_close(encoder.train()(elements), expected, **TIGHT)


def test_its_gradients_are_the_packages():
    encoder, elements = make(dim_in=6), draw(2, 10, 6).requires_grad_()
    theirs, slope = peers.slot_attention(encoder), draw(2, 4, 6, seed=1)
    nn.init.constant_(theirs.slots_mu, 0)
    nn.init.constant_(theirs.slots_logsigma, -torch.inf)  # all slots at the mean
    nn.init.zeros_(encoder.attention.slot_deviation)
    with torch.no_grad():
        theirs.slots_mu.copy_(draw(1, 1, 6, seed=3))
        encoder.attention.slot_mean.copy_(theirs.slots_mu[0, 0])
    (expected,) = torch.autograd.grad((theirs(elements) * slope).sum(), elements, retain_graph=True)
    (found,) = torch.autograd.grad((encoder(elements) * slope).sum(), elements, retain_graph=True)
    assert_close(found, expected, **TIGHT)
    (theirs(elements) * slope).sum().backward()
    (encoder(elements) * slope).sum().backward()
    for ours, other in (
        (encoder.gru, theirs.gru),
        (encoder.mlp, theirs.mlp),
        (encoder.norm_input, theirs.norm_input),
        (encoder.attention.to_value, theirs.to_v),
    ):
        pairs = zip(ours.parameters(), other.parameters(), strict=True)
        for found, expected in pairs:
            assert_close(found.grad, expected.grad, rtol=1e-10, atol=1e-12)


# ---- slots -------------------------------------------------------------------------------------


def test_evaluation_repeats_itself_and_training_does_not():
    encoder, elements = make(), draw(2, 10, 3)
    assert torch.equal(encoder(elements), encoder(elements))
    encoder.train()
    assert not torch.allclose(encoder(elements), encoder(elements))


@pytest.mark.parametrize("num_slots", [1, 7])
def test_another_number_of_slots_is_what_the_loops_say(num_slots):
    encoder, elements = make(), draw(2, 10, 3)
    encoder.num_slots = num_slots
    assert encoder(elements).shape == (2, num_slots, 6)
    assert_loops_agree(encoder, loops_of(encoder), elements)
    with torch.no_grad():
        assert_close(setfold.fold(encoder, elements.split(4, 1)), encoder(elements), **TIGHT)


def test_slots_train_their_mean_and_deviation():
    encoder = make().train()
    encoder(draw(2, 10, 3)).square().sum().backward()
    assert encoder.attention.slot_mean.grad.abs().max() > 0
    assert encoder.attention.slot_deviation.grad.abs().max() > 0


def test_compiled_and_exported_forwards_agree():
    assert_compiles_and_exports(make(num_iterations=2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_iterations": 0}, "num_iterations must be an integer of at least 1; got 0"),
        ({"num_slots": 0}, "num_slots must be an integer of at least 1"),
        ({"dim_hidden": None}, "dim_hidden must be an integer of at least 1"),
        ({"dim_in": -1}, "dim_in must be an integer of at least 1"),
    ],
)
def test_bad_settings_say_what_is_allowed(changes, message):
    with pytest.raises(setfold.InputError, match=message):
        make(**changes)


def test_another_number_of_slots_is_saved(tmp_path):
    encoder, elements = setfold.SlotAttention(3, 4, 6).eval(), draw(2, 10, 3).float()
    encoder.num_slots = 7
    found = encoder(elements)
    assert found.shape == (2, 7, 6)
    setfold.save(encoder, tmp_path / "encoder.safetensors")
    loaded = setfold.load(tmp_path / "encoder.safetensors")
    assert loaded.num_slots == 7
    assert_close(loaded(elements), found)
    with pytest.raises(setfold.InputError, match="num_slots"):
        encoder.num_slots = 0
