from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import setfold
from experiments.pools import (
    PMA,
    Attention,
    Combine,
    DeepSets,
    Gated,
    Hierarchy,
    LinearMean,
    Slots,
    SlottedPool,
    Transformer,
    Universal,
)

ONE_PASS = [
    DeepSets(),
    DeepSets(("max", "mean")),
    LinearMean(12),
    Slots(4, 8),
    Slots(4, 8, ("weighted_mean", "max"), slots="learned", similarity="cosine"),
    Slots(4, 8, ("max", "mass"), attention="softmax"),
    Hierarchy((Slots(4, 8), Slots(2, 16, "max"))),
    Slots(4, 8, width=6),
    Universal(Slots(4, 8, width=6), Transformer(num_layers=1, num_inducing=4)),
    Attention(4, num_heads=2),
    Gated(4),
    PMA(num_heads=2),
    PMA(num_heads=2, num_seeds=4),
    PMA(num_heads=2, num_seeds=4, width=8),
]
AS_PRINTED = [
    *(Slots(4, 8, g, apart=False) for g in ("sum", "mean", "max", "min")),
    *(Slots(4, 8, apart=False, combine=how) for how in Combine),
    Slots(1, 8, apart=False),
    Hierarchy((Slots(1, 8, apart=False), Slots(1, 16, apart=False)), activation=False),
]
SEVERAL_PASSES = [
    Transformer(num_inducing=4, dropout=0.5),
    Transformer(num_layers=1, num_inducing=4, num_heads=2, last=DeepSets("max"), dim=8),
    Transformer(num_layers=1, num_inducing=4, num_heads=2, last=Slots(4)),
]
ALL = [*ONE_PASS, *AS_PRINTED, *SEVERAL_PASSES]
DIM = 16


def build(pool, dim_out=DIM):
    torch.manual_seed(0)
    return pool.build(8, dim_out, nn.Sequential(nn.Linear(3, 8), nn.Tanh()))


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("pool", ALL, ids=str)
def test_every_pool_encodes_sets_as_so_many_numbers(pool):
    found = build(pool)(torch.randn(5, 30, 3))
    assert found.shape == (5, DIM)
    found.square().sum().backward()


@pytest.mark.parametrize("pool", [*ONE_PASS, *SEVERAL_PASSES], ids=str)
def test_gradients_reach_every_parameter(pool):
    encoder = build(pool)
    encoder(torch.randn(5, 30, 3)).square().sum().backward()
    missed = [name for name, p in encoder.named_parameters() if p.grad is None or not p.grad.any()]
    # a softmax over elements does not see what is added to all logits
    assert [name for name in missed if "to_key.bias" not in name] == []


@pytest.mark.parametrize("pool", ALL, ids=str)
def test_every_pool_folds(pool):
    encoder, elements = build(pool).double().eval(), draw(3, 40, 3)
    assert encoder.passes == (1 if pool in ONE_PASS + AS_PRINTED else pool.num_layers + 1)
    with torch.no_grad():
        found = setfold.fold(encoder, elements.split([7, 1, 32], 1))
        assert_close(found, encoder(elements), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("pool", [ONE_PASS[3], ONE_PASS[5]], ids=str)
def test_the_laws_hold(pool):
    assert setfold.check(build(pool).eval(), 3, processes=False).passed


@pytest.mark.parametrize("pool", ALL, ids=str)
def test_pools_need_no_features_and_take_elements_of_another_width(pool):
    assert pool.build(3, DIM)(torch.randn(5, 30, 3)).shape == (5, DIM)


@pytest.mark.parametrize("pool", [p for p in ALL if isinstance(p, SlottedPool)], ids=str)
def test_kept_slots_are_those_that_become_the_encoding(pool):
    torch.manual_seed(0)
    slots = pool.build_slots(3, DIM).eval()
    torch.manual_seed(0)
    whole, elements = pool.build(3, DIM).eval(), torch.randn(5, 30, 3)
    kept = slots(elements)
    assert kept.shape[::2] == (5, pool.dim_of_slots(DIM))
    assert_close(whole.head(kept), whole(elements))


def test_slots_apart_share_the_numbers_of_one_vector():
    encoder = Slots(4, 8, "max").build(3, DIM)
    assert (encoder.encoder.num_slots, encoder.encoder.dim_out) == (4, 4)
    beside = Slots(2, 8, ("max", "weighted_mean", "mass"), slots="learned").build(3, 18)
    assert beside.encoder.dim_out == 4  # 2 slots of 4 + 4 + 1


def test_printed_slots_are_combined_as_asked():
    elements = draw(2, 30, 3)
    for how in Combine:
        torch.manual_seed(0)
        encoder = Slots(4, 8, "max", apart=False, combine=how).build(3, DIM).double().eval()
        slots = encoder.encoder(elements)  # (2, 4, 16)
        assert slots.shape == (2, 4, DIM)
        assert_close(
            encoder(elements), getattr(torch, f"a{how}" if how == "max" else how)(slots, 1)
        )


def test_as_printed_attention_cancels():
    """A mean over slots of means is the mean of the values over K, whatever the slots are."""
    encoder, elements = Slots(4, 8, apart=False).build(3, DIM).double().eval(), draw(2, 30, 3)
    assert_close(encoder(elements), encoder.encoder.to_value(elements.mean(1)) / 4)


def test_only_what_is_printed_may_cancel_quietly():
    with pytest.warns(setfold.CancelledAttentionWarning):
        Slots(1, 8).build(3, DIM)
    with pytest.warns(setfold.CancelledAttentionWarning):
        Hierarchy((Slots(1, 8), Slots(2, 8))).build(3, DIM)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Slots(1, 8, apart=False).build(3, DIM)
        with pytest.raises(setfold.CancelledAttentionWarning):  # as before
            Slots(1, 8).build(3, DIM)


def test_a_transformer_is_the_set_transformer():
    ours = Transformer(2, num_inducing=4, num_heads=2, last=PMA(num_heads=2)).build(3, DIM).double()
    theirs = setfold.SetTransformer(3, DIM, num_heads=2, num_inducing=4, num_layers=2).double()
    with torch.no_grad():
        for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
            its.copy_(mine)
    elements = draw(2, 30, 3)
    assert_close(ours(elements), theirs(elements).flatten(1))


def test_dropout_is_between_the_layers_and_the_pool():
    pool = Transformer(1, num_inducing=4, num_heads=2, last=DeepSets("mean"), dropout=0.5)
    encoder, elements = build(pool), torch.randn(2, 30, 3)
    assert not torch.equal(encoder(elements), encoder(elements))
    encoder.eval()
    assert torch.equal(encoder(elements), encoder(elements))


@pytest.mark.parametrize(
    ("pool", "dim_out"),
    [
        (Slots(3, 8), 16),
        (Slots(4, 8, ("mean", "max", "min")), 16),
        (Slots(16, 8, ("mean", "mass")), 16),
        (Slots(4, 8, "mass"), 16),
        (Hierarchy((Slots(4, 8), Slots(3, 8))), 16),
        (DeepSets(("mean", "max", "min")), 16),
        (Attention(3), 16),
        (PMA(num_seeds=3), 16),
    ],
    ids=str,
)
def test_numbers_that_do_not_divide_are_refused(pool, dim_out):
    with pytest.raises(setfold.InputError, match=r"divide|no room"):
        pool.build(3, dim_out)


def test_pools_are_values():
    pool = Slots(4, 8)
    assert replace(pool, num_slots=8) == Slots(8, 8)
    assert len({pool, Slots(4, 8), DeepSets()}) == 2
