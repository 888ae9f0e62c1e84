"""Softmax pooling against plain loops and torch's own attention, and what is its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import setfold
from tests import peers, reference
from tests.small import TIGHT, assert_compiles_and_exports, assert_loops_agree, draw
from tests.strategies import attention_pools, cases, gated_attention_pools

LOOPS = {
    setfold.AttentionPool: reference.attention_pool,
    setfold.GatedAttentionPool: reference.gated_attention_pool,
}
either = st.one_of(attention_pools(), gated_attention_pools())


def make(seed=0, **changes):
    torch.manual_seed(seed)
    chosen = {"dim_in": 3, "num_queries": 4, "dim_out": 6, "num_heads": 2} | changes
    return setfold.AttentionPool(**chosen).double()


def make_gated(**changes):
    torch.manual_seed(0)
    chosen = {"dim_in": 3, "dim_hidden": 5, "num_branches": 2} | changes
    return setfold.GatedAttentionPool(**chosen).double()


def loops_of(encoder):
    return lambda rows: LOOPS[type(encoder)](encoder, rows)


@settings(max_examples=60)
@given(encoder=either, case=cases(), tracked=st.booleans(), masked=st.booleans())
def test_it_is_what_the_loops_say(encoder, case, tracked, masked):
    encoder = encoder.double()
    with torch.set_grad_enabled(tracked):
        mask = case.mask if masked else None
        assert_loops_agree(encoder, loops_of(encoder), case.elements, mask)


@given(encoder=either, case=cases(), tracked=st.booleans())
def test_chunks_are_what_the_loops_say_of_all_of_them(encoder, case, tracked):
    encoder, state = encoder.double(), None
    with torch.set_grad_enabled(tracked):
        state = encoder.initial_state(case.batch_size)
        for chunk in case.chunks:
            state = encoder.update(state, chunk)
        found = encoder.readout(state).detach()
    for number, rows in enumerate(case.elements):
        expected = loops_of(encoder)(rows) if len(rows) else np.zeros(found.shape[1:])
        np.testing.assert_allclose(found[number], expected, rtol=1e-11, atol=1e-12)


# ---- torch.nn.MultiheadAttention ---------------------------------------------------------------


@pytest.mark.parametrize("num_heads", [1, 2, 3])
@pytest.mark.parametrize("dim_in", [3, 6])  # theirs keeps its weights apart, or in one matrix
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_torchs_attention(num_heads, dim_in, masked):
    encoder, elements = make(dim_in=dim_in, num_heads=num_heads), draw(3, 10, dim_in)
    mask = torch.arange(10) % torch.tensor([[2], [3], [5]]) == 0 if masked else None
    theirs = peers.multihead(encoder, dim_in)
    queries = encoder.queries.expand(3, -1, -1)
    hidden = None if mask is None else ~mask
    expected, weights = theirs(queries, elements, elements, key_padding_mask=hidden)
    assert_close(encoder(elements, mask), expected, **TIGHT)
    if not masked:
        state = encoder.update(encoder.initial_state(3), elements)
        assert_close(encoder.weights(state, elements), weights.transpose(1, 2), **TIGHT)


def test_its_gradients_are_those_of_torchs_attention():
    encoder, elements = make(), draw(2, 10, 3).requires_grad_()
    theirs, slope = peers.multihead(encoder, 3), draw(2, 4, 6, seed=1)
    expected = theirs(encoder.queries.expand(2, -1, -1), elements, elements)[0]
    wanted = elements, encoder.queries
    by_them = torch.autograd.grad((expected * slope).sum(), wanted)
    by_us = torch.autograd.grad((encoder(elements) * slope).sum(), wanted)
    assert_close(by_us, by_them, **TIGHT)


# ---- weights -----------------------------------------------------------------------------------


@pytest.mark.parametrize("encoder", [make(), make_gated(), make_gated(gated=False)])
def test_weights_of_some_elements_are_relative_to_all_of_them(encoder):
    elements = draw(2, 12, 3)
    state = encoder.update(encoder.initial_state(2), elements)
    parts = [encoder.weights(state, part) for part in elements.split(5, 1)]
    weights = torch.cat(parts, 1)
    assert_close(weights.sum(1), torch.ones_like(weights[:, 0]), **TIGHT)
    assert (weights > 0).all()
    if isinstance(encoder, setfold.GatedAttentionPool):
        assert_close(torch.einsum("bnk,bnd->bkd", weights, elements), encoder(elements), **TIGHT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_of_huge_logits_are_none_or_all(dtype):
    encoder = setfold.AttentionPool(1, num_queries=1, dim_out=1, bias=False).to(dtype)
    with torch.no_grad():
        encoder.queries.fill_(1)
        encoder.to_key.weight.fill_(1e4)
    elements = torch.tensor([[[-1.0], [1.0], [0.999]]], dtype=dtype)
    state = encoder.update(encoder.initial_state(1), elements)
    expected = torch.softmax(1e4 * elements[..., 0], 1).unsqueeze(-1)
    assert_close(encoder.weights(state, elements), expected, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(
    "encoder", [setfold.SlotSetEncoder(3, 4, 5, 6), setfold.AttentionPool(3, 4, 6)]
)
def test_weights_of_logits_that_overflow(encoder):
    encoder.eval()
    elements = 1e3 * torch.randn(1, 5, 3)
    with torch.no_grad():
        encoder.to_key.weight.mul_(1e3)
        state = encoder.update(encoder.initial_state(1), elements)
        with torch.autocast("cpu", torch.float16):  # beyond float16
            found = encoder.weights(state, elements)
        assert_close(found, encoder.weights(state, elements), rtol=1e-5, atol=1e-6)
        with pytest.raises(setfold.NonFiniteError, match="their weight is not"):
            encoder.weights(state, 3e37 * elements.sign())
        elements[0, 2, 1] = torch.nan
        with pytest.raises(setfold.NonFiniteError, match=r"elements\[0, 2, 1\] is nan"):
            encoder.weights(state, elements)


# ---- complaints and compiled programs ----------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_queries": 0}, "num_queries must be an integer of at least 1; got 0"),
        ({"dim_out": 1.5}, "dim_out must be an integer of at least 1"),
        ({"num_heads": 4}, "num_heads must divide dim_out=6; got 4"),
    ],
)
def test_bad_settings_say_what_is_allowed(changes, message):
    with pytest.raises(setfold.InputError, match=message):
        make(**changes)
    with pytest.raises(setfold.InputError, match="dim_hidden must be an integer of at least 1"):
        make_gated(dim_hidden=0)


def test_elements_cannot_be_removed():
    encoder, elements = make(), draw(1, 5, 3)
    state = encoder.update(encoder.initial_state(), elements)
    with pytest.raises(setfold.NotRemovableError, match="Softmax cannot remove elements"):
        encoder.remove(state, elements)


@pytest.mark.parametrize("encoder", [make(), make_gated()])
def test_compiled_and_exported_forwards_agree(encoder):
    assert_compiles_and_exports(encoder)


def test_elements_whose_logits_overflow_do_not_pass_for_an_empty_set():
    encoder = setfold.AttentionPool(3, 1, 1)
    with torch.no_grad():
        encoder.to_key.weight.fill_(-1)
        encoder.queries.fill_(1e4)
    with pytest.raises(setfold.NonFiniteError, match="the field 'softmax'"):
        encoder(torch.full((1, 5, 3), 1e38))


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("build", [setfold.AttentionPool, setfold.SeedAttention])
def test_values_that_overflow_on_the_way_are_right(build, tracked):
    torch.manual_seed(0)
    encoder = build(3, 2, 1)
    layer = encoder.to_value if build is setfold.AttentionPool else encoder.block.to_value
    with torch.no_grad():
        encoder.first_weight.zero_()
        layer.weight.copy_(torch.tensor([1.0, 1.0, -1.0]))
    elements = torch.full((1, 1, 3), 2e38)
    with torch.set_grad_enabled(tracked):
        found = encoder(elements)
        assert_close(encoder.readout(encoder.update(encoder.initial_state(), elements)), found)
    assert_close(found, encoder.double()(elements.double()).float(), rtol=1e-4, atol=1e-4)
    assert found.isfinite().all()


def test_values_that_do_not_fit_are_infinite():
    encoder = setfold.AttentionPool(3, 2, 1)
    with torch.no_grad():
        encoder.to_value.weight.fill_(-1)
    assert (encoder(torch.full((1, 1, 3), 2e38)) == -torch.inf).all()
