"""What a state keeps: laws of joining, the way back by autograd, and the values themselves."""

from __future__ import annotations

from functools import reduce
from itertools import permutations

import pytest
import torch
from torch.testing import assert_close

import setfold
from setfold.core import statistic
from setfold.core.statistic import REDUCTIONS, STATISTICS
from tests.small import TIGHT, draw

WIDTH = 3
CPU = torch.device("cpu")


def softmax_of(values):
    """The parts of the softmax statistic, of logits that are the first feature, times 20."""
    logits = 20 * values[..., :1]  # (B, n, 1)
    peak = logits.detach().amax(1)
    padded = torch.cat([values, torch.ones_like(logits)], -1)
    return peak, torch.exp(logits - peak.unsqueeze(1)).transpose(1, 2) @ padded


def empty(name, sets=2):
    shapes = {"softmax": [(sets, 1), (sets, 1, WIDTH + 1)], "moments": [(sets, WIDTH)] * 3}
    return STATISTICS[name].identity(*shapes.get(name, [(sets, WIDTH)]), device=CPU)


def parts_of(name, values):
    if values.shape[1] == 0:
        return empty(name, values.shape[0])
    return softmax_of(values) if name == "softmax" else REDUCTIONS[name].absorb(values, None)


def pieces(name, lengths=(4, 1, 7)):
    values = draw(2, sum(lengths), WIDTH).split(lengths, 1)
    return [parts_of(name, value) for value in values]


@pytest.fixture(params=STATISTICS)
def name(request):
    return request.param


# ---- joining -----------------------------------------------------------------------------------


def test_every_order_and_grouping_is_the_statistic_of_all(name):
    join, values = STATISTICS[name].join, draw(2, 12, WIDTH)
    expected = parts_of(name, values)
    for one, two, three in permutations(pieces(name)):
        assert_close(join(join(one, two), three), expected, **TIGHT)
        assert_close(join(one, join(two, three)), expected, **TIGHT)


def test_an_empty_set_adds_exactly_nothing(name):
    join, nothing = STATISTICS[name].join, empty(name)
    for parts in (*pieces(name), nothing):
        for joined in (join(parts, nothing), join(nothing, parts)):
            assert all(map(torch.equal, joined, parts))


def test_some_sets_may_be_empty_and_others_not(name):
    one, two = pieces(name, (5, 6))
    nothing = empty(name)
    mixed = tuple(torch.stack([e[0], p[1]]) for e, p in zip(nothing, two, strict=True))
    joined, both = STATISTICS[name].join(one, mixed), STATISTICS[name].join(one, two)
    for found, alone, together in zip(joined, one, both, strict=True):
        assert torch.equal(found[0], alone[0])
        assert torch.equal(found[1], together[1])


@pytest.mark.parametrize("name", REDUCTIONS)
def test_what_is_hidden_is_not_absorbed(name):
    values, mask = draw(3, 8, WIDTH), torch.zeros(3, 8, dtype=torch.bool)
    mask[0, ::3], mask[1] = True, True  # the last set shows nothing
    found = REDUCTIONS[name].absorb(values, mask)
    for number in range(2):
        alone = REDUCTIONS[name].absorb(values[number : number + 1, mask[number]], None)
        assert_close(tuple(part[number : number + 1] for part in found), alone, **TIGHT)
    assert_close(tuple(part[2:] for part in found), empty(name, 1), **TIGHT)


def test_what_is_absorbed_is_what_torch_says():
    values = draw(2, 9, WIDTH)
    expected = {
        "sum": (values.sum(1),),
        "max": (values.amax(1),),
        "min": (values.amin(1),),
        "moments": (
            torch.full((2, WIDTH), 9.0, dtype=torch.float64),
            values.mean(1),
            9 * values.var(1, correction=0),
        ),
    }
    for name, reduction in REDUCTIONS.items():
        assert_close(reduction.absorb(values, None), expected[name], **TIGHT)


def test_elements_leave_a_sum_and_nothing_else(name):
    one, two = pieces(name, (5, 6))
    kept = STATISTICS[name]
    if kept.removable:
        assert_close(kept.remove(kept.join(one, two), two), one, **TIGHT)
    else:
        with pytest.raises(setfold.NotRemovableError, match=kept.keeps):
            kept.remove(one, two)


# ---- the way back ------------------------------------------------------------------------------


def differentiable(name, parts):
    """The parts that gradients flow through: not a count, nor a peak, which is a constant."""
    return {"softmax": parts[1:], "moments": parts[1:]}.get(name, parts)


def detached(parts):
    return tuple(part.detach() for part in parts)


def with_leaves(name, parts):
    leaves = tuple(part.clone() for part in detached(parts))
    for leaf in differentiable(name, leaves):
        leaf.requires_grad_()
    return leaves


@pytest.mark.parametrize("lengths", [(4, 1, 7), (5,), (0, 6, 0, 1), (2, 2, 0, 8, 3)], ids=str)
def test_pull_is_autograd_through_join(name, lengths):
    kept = STATISTICS[name]
    leaves = [with_leaves(name, piece) for piece in pieces(name, lengths)]
    joined = reduce(kept.join, leaves)
    slopes = tuple(draw(*part.shape, seed=9) for part in joined)
    expected = torch.autograd.grad(
        differentiable(name, joined),
        [leaf for parts in leaves for leaf in differentiable(name, parts)],
        differentiable(name, slopes),
    )
    found, whole, before = [], detached(joined), empty(name)
    for parts in leaves:
        mine, after = slopes, kept.join(before, detached(parts))
        if kept.picks:  # a piece gets what it was the last to change
            others = reduce(kept.join, map(detached, leaves[len(found) + 1 :]), after)
            won = (after[0] != before[0]) & (others[0] == after[0])
            mine = (slopes[0].where(won, 0),)
        found += differentiable(name, kept.pull(mine, whole, detached(parts)))
        before = after
    assert_close(tuple(found), expected, **TIGHT)


def test_pull_of_all_statistics_is_that_of_each():
    whole = {name: parts_of(name, draw(2, 5, WIDTH)) for name in STATISTICS}
    piece = {name: parts_of(name, draw(2, 5, WIDTH)[:, :2]) for name in STATISTICS}
    grads = {name: tuple(draw(*p.shape, seed=4) for p in ps) for name, ps in whole.items()}
    own = statistic.pull(grads, whole, piece)
    for name, kept in STATISTICS.items():
        expected = kept.pull(grads[name], whole[name], piece[name])
        assert_close(own[name], expected, rtol=0, atol=0)


# ---- numbers of any size -----------------------------------------------------------------------


def test_moments_far_from_zero_join_without_cancellation():
    moments, values = REDUCTIONS["moments"], 1e8 + draw(1, 2000, WIDTH)
    exact = REDUCTIONS["moments"].absorb(values - 1e8, None)
    for size in (1, 10, 700):
        joined = reduce(moments.join, (moments.absorb(v, None) for v in values.split(size, 1)))
        assert_close(joined[1] - 1e8, exact[1], rtol=0, atol=1e-6)
        assert_close(joined[2], exact[2], rtol=1e-7, atol=0)  # squares less squares would lose all


def test_moments_of_one_number_have_no_spread():
    moments = REDUCTIONS["moments"]
    values = torch.full((1, 5, 1), 0.1, dtype=torch.float64)
    joined = reduce(moments.join, (moments.absorb(v, None) for v in values.split(1, 1)))
    assert joined[2].item() == 0


def test_a_softmax_of_peaks_far_apart_is_that_of_the_larger():
    join = STATISTICS["softmax"].join
    low = torch.tensor([[-1e4]]), torch.tensor([[[7.0, 2.0]]])
    high = torch.tensor([[1e4]]), torch.tensor([[[3.0, 1.0]]])
    for joined in (join(low, high), join(high, low)):
        assert all(map(torch.equal, joined, high))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_refused_wherever_it_is(name, wrong):
    for place, part in enumerate(empty(name)):
        parts = [p.clone() for p in pieces(name)[0]]
        parts[place][(1,) + (0,) * (part.dim() - 1)] = wrong
        if wrong == STATISTICS[name].empty[place]:  # an empty set
            statistic.refuse_non_finite({name: tuple(parts)})
        else:
            with pytest.raises(setfold.NonFiniteError, match=name):
                statistic.refuse_non_finite({name: tuple(parts)})
