"""Gradients from a few chunks: right on average, over every outcome of the draws; and what is drawn."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import setfold
from setfold.core.inputs import Chunk
from setfold.folding import source
from setfold.folding.source import Sample
from tests.folding.test_gradients import Dropped, deep_sets, model_of
from tests.small import assert_alike, draw, gradients, make


def outcomes(run):
    """Every sequence of outcomes of the draws that `run` makes, as (probability, what came out)."""
    waiting = [()]
    while waiting:
        told, drawn = waiting.pop(), []

        def randint(high, size, told=told, drawn=drawn):
            assert size == ()
            if high == source.SEEDS:  # of which there is no end, and on which nothing here depends
                return torch.randint(high, size)
            drawn.append((told[len(drawn)] if len(drawn) < len(told) else 0, high))
            return torch.tensor(drawn[-1][0])

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(source, "torch", SimpleNamespace(**vars(torch) | {"randint": randint}))
            found = run()
        taken = tuple(outcome for outcome, _ in drawn)
        for place in range(len(told), len(drawn)):
            waiting += [(*taken[:place], other) for other in range(1, drawn[place][1])]
        yield math.prod(1 / high for _, high in drawn), found


# ---- the sample ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("seen", [0, 1, 4, 5])
def test_every_sample_is_as_likely_as_any_other(seen, size):
    def run():
        sample = Sample(size)
        for number in range(seen):
            sample.offer(number, Chunk(torch.tensor([number])))
        assert all(int(chunk.elements) == number for number, chunk in sample.kept)
        return frozenset(number for number, _ in sample.kept)

    likely = Counter()
    for probability, kept in outcomes(run):
        likely[kept] += probability
    subsets = [frozenset(s) for s in combinations(range(seen), min(size, seen))]
    assert dict(likely) == pytest.approx(dict.fromkeys(subsets, 1 / len(subsets)))


# ---- unbiased --------------------------------------------------------------------------------


class Beside(nn.Module):
    """A head that looks at weights of the encoder, past the state."""

    def __init__(self, encoder):
        super().__init__()
        self.shared = [encoder]  # in a list, so that it is registered once

    def forward(self, encoding):
        (encoder,) = self.shared
        return encoder.to_value(encoding[..., :3].tanh()) * encoder.slot_mean.exp().sum()


def with_a_head_beside(aggregate):
    encoder = make(aggregate=aggregate)
    return setfold.Composition(encoder, nn.Linear(3, 3), Beside(encoder)).double().eval()


def hierarchy():
    second = setfold.SlotSetEncoder(5, 2, 6, 4, aggregate="max")
    return setfold.HierarchicalSlotSetEncoder([make(aggregate="weighted_mean"), second])


def layered(pool):
    return setfold.LayeredSetEncoder([setfold.SetNorm(3)], pool, features=nn.Linear(3, 3))


ONE_PASS = {
    **{
        str(aggregate): partial(model_of, aggregate)
        for aggregate in ("sum", "mean", "weighted_mean", "max", "min", ["mass", "mean", "max"])
    },
    "learned, cosine": partial(
        make, slots="learned", similarity="cosine", aggregate=["min", "sum"]
    ),
    "head beside, sums": partial(with_a_head_beside, "mean"),
    "head beside, max": partial(with_a_head_beside, "max"),
    "hierarchy": hierarchy,
    "attention": lambda: setfold.AttentionPool(3, 2, 4, 2),
    "gated": lambda: setfold.GatedAttentionPool(3, 4, 2),
    "seeds": lambda: setfold.PMA(3, 2, 1),
    "moments": lambda: setfold.Composition(setfold.Moments(3), nn.Linear(3, 3)),
}
MORE_PASSES = {
    "isab": lambda: setfold.SetTransformer(3, 4, 2, 2, num_layers=1),
    "moments, max": lambda: layered(setfold.Pool(3, ["max", "mean"])),
    "moments, slots": lambda: layered(make()),
    "max": lambda: setfold.EquivariantDeepSets(3, [4], "max", aggregate="sum"),
    "iterations": lambda: setfold.SlotAttention(3, 3, 4, num_iterations=2, dim_hidden=5),
}


def built(recipe):
    torch.manual_seed(0)
    return recipe().double().eval()


def assert_right_on_average(model, chunks, whole, elements, samples, **told):
    """Over every outcome, the gradients average to those of the whole set; none need be them."""
    wanted = [elements, *model.parameters()]
    encoding = model(elements, **whole)
    expected = gradients(encoding, wanted)
    scale = max(float(e.abs().max()) for e in expected)
    assert scale > 1e-3
    mean, total, furthest = [torch.zeros_like(w) for w in wanted], 0.0, 0.0

    def run():
        found = setfold.fold(model, chunks, gradient="unbiased", samples=samples, **told)
        assert_alike([found], [encoding])
        return gradients(found, wanted)

    for probability, found in outcomes(run):
        total += probability
        mean = [m + probability * f for m, f in zip(mean, found, strict=True)]
        off = max(float((f - e).abs().max()) for f, e in zip(found, expected, strict=True))
        furthest = max(furthest, off)
    assert total == pytest.approx(1)
    assert_alike(mean, expected)
    assert furthest > 1e-3 * scale if samples < len(chunks) else furthest <= 1e-12 * scale


@pytest.mark.parametrize("samples", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("name", ONE_PASS)
def test_unbiased_gradients_are_right_on_average(name, samples):
    model, elements = built(ONE_PASS[name]), draw(2, 9, 3).requires_grad_()
    assert_right_on_average(model, elements.split([2, 4, 0, 3], 1), {}, elements, samples)


@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize("name", MORE_PASSES)
def test_unbiased_gradients_are_right_on_average_in_several_passes(name, samples):
    model, elements = built(MORE_PASSES[name]), draw(2, 7, 3).requires_grad_()
    assert_right_on_average(model, elements.split([1, 4, 2], 1), {}, elements, samples)


def test_unbiased_gradients_of_three_passes():
    model = built(lambda: setfold.SetTransformer(3, 4, 2, 2, num_layers=2))
    elements = draw(1, 5, 3).requires_grad_()
    assert_right_on_average(model, elements.split([3, 2], 1), {}, elements, 1)


@pytest.mark.parametrize("name", ["mean", "['mass', 'mean', 'max']", "attention", "moments"])
def test_unbiased_gradients_of_ragged_chunks(name):
    model, rows = built(ONE_PASS[name]), draw(9, 3).requires_grad_()
    index = torch.tensor([0, 2, 2, 0, 0, 2, 0, 2, 2])
    chunks = list(zip(rows.split([2, 4, 3]), index.split([2, 4, 3]), strict=True))
    whole = {"index": index, "batch_size": 3}
    assert_right_on_average(model, chunks, whole, rows, 1, batch_size=3)


@pytest.mark.parametrize("aggregate", ["max", "min"])
def test_unbiased_gradients_of_elements_that_tie(aggregate):
    elements = torch.tensor([0.0, 1, 1, 0, 1, 0]).double().reshape(1, 6, 1).requires_grad_()
    pool = setfold.Pool(1, aggregate).double().eval()
    assert_right_on_average(pool, elements.split([1, 3, 2], 1), {}, elements, 1)


def test_a_stream_is_read_once_and_may_use_its_memory_again():
    model, elements = model_of(["mean", "max"]), draw(1, 12, 3)
    wanted, buffer = list(model.parameters()), torch.empty(1, 3, 3, dtype=torch.float64)

    def reused():
        for chunk in elements.split(3, 1):
            yield buffer.copy_(chunk)
        buffer.zero_()

    def estimate(chunks):
        torch.manual_seed(7)
        found = setfold.fold(model, chunks, gradient="unbiased", samples=2)
        assert_alike([found], [model(elements)])
        return gradients(found, wanted)

    expected = estimate(elements.split(3, 1))
    assert_alike(estimate(reused()), expected)
    assert_alike(estimate(iter(elements.split(3, 1))), expected)


@pytest.mark.parametrize("form", [list, iter], ids=["list", "iterator"])
@pytest.mark.parametrize("samples", [1, 3])
def test_dropout_drops_the_same_for_the_chunks_that_were_kept(samples, form):
    dropped, chunks = Dropped(), [draw(1, n, 3, seed=n) for n in (5, 2, 3)]
    model = deep_sets(dropped).train()
    linear, wanted = model.features[0], list(model.features[0].parameters())
    encoding = setfold.fold(model, form(chunks), gradient="unbiased", samples=samples)
    shares = [
        (linear(chunk[0]) * kept).sum(0) for chunk, kept in zip(chunks, dropped.kept, strict=True)
    ]
    assert_alike(encoding, sum(shares).unsqueeze(0))
    found = gradients(encoding, wanted)
    candidates = [sum(shares)] if samples == 3 else [3 * share for share in shares]
    expected = [gradients(c.unsqueeze(0), wanted) for c in candidates]
    assert any(all(torch.allclose(a, b) for a, b in zip(found, e, strict=True)) for e in expected)


# ---- subset ----------------------------------------------------------------------------------


class Read(list):
    """A list that tells which of its items were read."""

    def __init__(self, items):
        super().__init__(items)
        self.read = []

    def __getitem__(self, number):
        self.read.append(number)
        return super().__getitem__(number)

    def __iter__(self):
        raise AssertionError("all were read")


SUBSET = {
    "mean": partial(model_of, "mean"),
    "max": partial(model_of, "max"),
    "two passes": MORE_PASSES["isab"],
}


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("name", SUBSET)
def test_a_subset_stands_in_for_the_set(name, samples):
    model, seen = built(SUBSET[name]), set()
    chunks = [draw(2, n, 3, seed=n).requires_grad_() for n in (1, 4, 2)]
    wanted = [*chunks, *model.parameters()]
    for seed in range(25):
        torch.manual_seed(seed)
        given = Read(chunks)
        found = setfold.fold(model, given, gradient="subset", samples=samples)
        drawn = frozenset(given.read)
        assert len(given.read) == len(drawn) == samples  # no others were looked at
        if drawn not in seen:
            expected = model(torch.cat([chunks[i] for i in drawn], 1))
            assert_alike([found], [expected])
            assert_alike(gradients(found, wanted), gradients(expected, wanted))
            seen.add(drawn)
    assert len(seen) == 3  # each chunk, or each pair of them


@pytest.mark.parametrize("form", [iter, lambda chunks: lambda: iter(chunks)], ids=["once", "again"])
def test_a_subset_of_a_stream(form):
    model, network = model_of(), nn.Linear(3, 3).double()
    parts = [draw(1, n, 3, seed=n) for n in (1, 4, 2, 3)]
    wanted = [*network.parameters(), *model.parameters()]
    likely = Counter()

    def run():
        found = setfold.fold(model, form([network(p) for p in parts]), gradient="subset")
        alone = [model(network(part)) for part in parts]
        (number,) = (i for i, one in enumerate(alone) if torch.allclose(found, one, rtol=1e-10))
        assert_alike(gradients(found, wanted), gradients(alone[number], wanted))
        return number

    for probability, number in outcomes(run):
        likely[number] += probability
    assert dict(likely) == pytest.approx(dict.fromkeys(range(4), 1 / 4))


def test_a_subset_of_ragged_chunks_may_leave_sets_empty():
    model = model_of()
    index = [torch.tensor([0, 0, 1]), torch.tensor([2, 1]), torch.tensor([1, 1, 1, 0])]
    chunks = [(draw(len(i), 3, seed=len(i)), i) for i in index]
    expected = [model(rows, index=i, batch_size=3) for rows, i in chunks]
    for _ in range(8):
        found = setfold.fold(model, chunks, gradient="subset", batch_size=3)
        assert sum(torch.allclose(found, e, rtol=1e-10) for e in expected) == 1


def test_a_subset_of_everything_is_everything():
    model, elements = model_of(), draw(2, 9, 3)
    found = setfold.fold(model, elements.split(4, 1), gradient="subset", samples=7)
    assert_alike([found], [model(elements)])


def test_in_every_pass_of_a_subset_an_element_is_the_same():
    dropped = Dropped()
    model = setfold.LayeredSetEncoder([setfold.SetNorm(3)], setfold.Pool(3), features=dropped)
    chunks = (draw(1, 50, 3, seed=i) for i in range(3))
    setfold.fold(model.double().train(), chunks, gradient="subset", samples=2)
    first, second, *again = dropped.kept
    assert not torch.equal(first, second)
    assert [torch.equal(a, b) for a, b in zip((first, second), again, strict=True)] == [True] * 2
