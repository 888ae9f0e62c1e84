"""Constant Memory Attention Blocks against plain loops, and against whole sets in plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import setfold
from tests import reference
from tests.small import (
    TIGHT,
    assert_compiles_and_exports,
    assert_loops_agree,
    assert_ragged_is_dense,
    draw,
    gradients,
    moved,
)
from tests.strategies import cases, constant_memory_encoders

NORMS = pytest.mark.parametrize("layer_norm", [True, False], ids=["norms", "bare"])


def make(**options):
    torch.manual_seed(0)
    return moved(setfold.ConstantMemoryEncoder(3, 8, num_latents=4, num_block_latents=5, **options))


def whole(encoder, elements):
    """The blocks one after the other, each with the whole set."""
    sets, head = len(elements), encoder.head
    elements, latents = encoder.features(elements), head.latents.expand(sets, -1, -1)
    for pool, update in zip(encoder.encoder.encoders.values(), head.updates, strict=True):
        attended = pool.block(pool.seeds.expand(sets, -1, -1), elements)
        latents = update(latents, attended)
    return latents


@settings(max_examples=40)
@given(
    encoder=constant_memory_encoders(), case=cases(), tracked=st.booleans(), masked=st.booleans()
)
def test_the_encoding_is_what_the_loops_say(encoder, case, tracked, masked):
    encoder, mask = moved(encoder), case.mask if masked else None
    loops = lambda rows: reference.constant_memory(encoder, rows)  # noqa: E731
    with torch.set_grad_enabled(tracked):
        assert_loops_agree(encoder, loops, case.elements, mask, rtol=1e-9, atol=1e-10)


def test_ragged_batches_are_their_sets():
    assert_ragged_is_dense(make(), 100)


@NORMS
def test_gradients_are_those_of_whole_sets(layer_norm):
    encoder, elements = make(layer_norm=layer_norm), draw(2, 300, 3).requires_grad_()
    wanted = [elements, *encoder.parameters()]
    expected = gradients(whole(encoder, elements), wanted)
    assert all(gradient.any() for gradient in expected)
    chunked = setfold.fold(encoder, elements.split([100, 1, 0, 199], 1))
    for encoding in (encoder(elements), chunked):
        assert_close(gradients(encoding, wanted), expected, rtol=1e-9, atol=1e-11)


def test_padding_leaves_no_trace_in_gradients():
    encoder, elements = make(), draw(2, 5, 3)
    mask = torch.tensor([[1, 0, 1, 1, 0], [0] * 5]).bool()
    leaf = elements.masked_fill(~mask.unsqueeze(-1), torch.nan).requires_grad_()
    encoder(leaf, mask).pow(3).sum().backward()
    alone = elements[:1, mask[0]].clone().requires_grad_()
    (expected,) = torch.autograd.grad(encoder(alone).pow(3).sum(), alone)
    assert_close(leaf.grad[mask], expected[0], rtol=1e-10, atol=1e-12)
    assert not leaf.grad[~mask].any()
    assert all(p.grad.isfinite().all() for p in encoder.parameters())


def test_logits_far_from_zero_do_not_overflow():
    encoder, elements = make(), 1e5 + 1e4 * draw(1, 50, 3)
    found = setfold.fold(encoder, elements.split(7, 1))
    assert_close(found, encoder(elements), rtol=1e-9, atol=1e-9)
    assert_loops_agree(
        encoder, lambda rows: reference.constant_memory(encoder, rows), elements, rtol=1e-7
    )


def test_every_block_sees_the_elements():
    """Also the last one, whose latents could depend on the elements through earlier blocks only."""
    encoder, elements = make(num_blocks=3), draw(1, 20, 3)
    before = encoder(elements).detach()
    for pool in encoder.encoder.encoders.values():
        kept = pool.seeds.detach().clone()
        with torch.no_grad():
            pool.seeds.add_(1.0)
        assert (encoder(elements) - before).abs().max() > 1e-3
        with torch.no_grad():
            pool.seeds.copy_(kept)


@pytest.mark.parametrize("length", [1, 10, 1000])
def test_a_state_is_as_large_as_its_page_says(length):
    encoder = make(num_blocks=3, num_heads=2)
    state = encoder.update(encoder.initial_state(), draw(1, length, 3))
    parts = [part for several in state.statistics.values() for part in several]
    assert sum(part.numel() for part in parts) == 3 * 2 * 5 * (8 + 2)


def test_weights_are_those_of_the_latents_of_each_block():
    encoder, elements = make(), draw(2, 9, 3)
    state = encoder.update(encoder.initial_state(2), elements)
    weights = encoder.weights(state, elements)
    assert weights.shape == (2, 9, 2 * 5)
    assert_close(weights.sum(1), torch.ones(2, 10, dtype=torch.float64), **TIGHT)


@NORMS
def test_autocast_rounds_and_does_not_refuse(layer_norm):
    encoder, elements = make(layer_norm=layer_norm).float(), draw(2, 10, 3).float()
    with torch.autocast("cpu", torch.bfloat16):
        found = encoder(elements)
    assert found.dtype == torch.float32
    assert_close(found, encoder(elements), rtol=0.1, atol=0.2)


def test_what_overflows_is_an_error():
    encoder = make(layer_norm=False).float()
    with torch.no_grad():
        encoder.head.latents.mul_(1e38)
    with pytest.raises(setfold.NonFiniteError):
        encoder(draw(1, 10, 3).float())


def test_compiled_and_exported_forwards_agree():
    assert_compiles_and_exports(make(num_heads=2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 3}, "num_heads must divide dim=8; got 3"),
        ({"num_blocks": 0}, "num_blocks must be an integer of at least 1; got 0"),
    ],
)
def test_bad_settings_say_what_is_allowed(options, message):
    with pytest.raises(setfold.InputError, match=message):
        make(**options)
