"""Gradients from a few chunks: right on average, over every outcome of the draws; and what is drawn."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
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


# ---- reading again ---------------------------------------------------------------------------


def reader(chunks, again=True, draws=False, **options):
    return source.Source(chunks, like=None, again=again, draws=draws, **options)


def read(chunks):
    """The numbers of all chunks of a source, read to the end."""
    return [number for number, _ in chunks.read()]


DTYPES = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


@st.composite
def chunks_of_two_sets(draw_from, least=1):
    """A chunk of two sets: dense, masked or ragged."""
    dtype = draw_from(st.sampled_from(list(DTYPES)))
    length, seed = draw_from(st.integers(least, 9)), draw_from(st.integers(0, 99))
    form = draw_from(st.sampled_from(["dense", "masked", "ragged"]))
    if form == "ragged":
        index = draw(length, seed=seed + 1).gt(0).long()
        return Chunk(draw(length, 3, seed=seed).to(dtype), None, index)
    mask = draw(2, length, seed=seed + 1) > 0 if form == "masked" else None
    return Chunk(draw(2, length, 3, seed=seed).to(dtype), mask)


def pair(chunk):
    """A chunk as users pass it."""
    beside = chunk.mask if chunk.index is None else chunk.index
    return chunk.elements if beside is None else (chunk.elements, beside)


def assert_told_apart(first, second):
    """A second read in which a chunk differs raises, and names the chunk and what to do."""
    before = Chunk(draw(2, 1, 3))
    turns = iter([[before, first], [before, second]])
    found = reader(lambda: (pair(chunk.clone()) for chunk in next(turns)), batch_size=2)
    assert read(found) == [0, 1]
    with pytest.raises(setfold.InputError, match=r"chunk 1 has changed.*shuffle=False"):
        read(found)


@given(chunk=chunks_of_two_sets())
def test_a_chunk_with_the_same_bytes_is_the_same(chunk):
    found = reader(lambda: iter([pair(chunk.clone())]), batch_size=2)
    for _ in range(3):
        assert read(found) == [0]


def visible(chunk):
    """The elements, with zeros for padding."""
    if chunk.mask is None:
        return chunk.elements
    return chunk.elements.masked_fill(~chunk.mask.unsqueeze(-1), 0)


@given(data=st.data(), chunk=chunks_of_two_sets())
def test_any_bit_that_changes_is_noticed(data, chunk):
    place = tuple(data.draw(st.integers(0, size - 1)) for size in chunk.elements.shape)
    assume(chunk.mask is None or bool(chunk.mask[place[:2]]))  # padding may be anything
    bits = chunk.elements.view(DTYPES[chunk.elements.dtype]).clone()
    width = 8 * bits.element_size()
    bit = data.draw(st.integers(0, width - 1))
    bits[place] ^= (1 << bit) - (1 << width if bit == width - 1 else 0)
    assert_told_apart(chunk, Chunk(bits.view(chunk.elements.dtype), chunk.mask, chunk.index))


@given(data=st.data(), chunk=chunks_of_two_sets(least=2))
def test_elements_in_another_order_are_noticed(data, chunk):
    axis = 0 if chunk.mask is None and chunk.index is not None else 1
    order = torch.tensor(data.draw(st.permutations(range(chunk.elements.shape[axis]))))
    parts = (chunk.elements, chunk.mask, chunk.index)
    moved = Chunk(*(None if part is None else part.index_select(axis, order) for part in parts))
    if not torch.equal(visible(moved), visible(chunk)):
        assert_told_apart(chunk, moved)


@given(data=st.data(), chunk=chunks_of_two_sets(least=2))
def test_another_mask_index_or_set_is_noticed(data, chunk):
    elements = chunk.elements
    if chunk.index is not None:
        index = chunk.index.clone()
        index[data.draw(st.integers(0, len(index) - 1))] ^= 1
        assert_told_apart(chunk, Chunk(elements, None, index))
    elif chunk.mask is not None:
        mask = chunk.mask.clone()
        mask[tuple(data.draw(st.integers(0, size - 1)) for size in mask.shape)] ^= True
        assert_told_apart(chunk, Chunk(elements, mask))
        assert_told_apart(chunk, Chunk(elements))
    else:
        assert_told_apart(chunk, Chunk(elements.flip(0)))
        assert_told_apart(chunk, Chunk(elements, torch.ones(elements.shape[:2], dtype=torch.bool)))


def test_another_shape_or_dtype_of_the_same_bytes_is_noticed():
    zeros = torch.zeros(2, 6, 4)
    for other in (zeros.reshape(2, 4, 6), zeros.reshape(4, 3, 4), zeros[:, :5]):
        assert_told_apart(Chunk(zeros), Chunk(other))


def test_another_dtype_with_the_same_shape_and_bytes_is_noticed():
    bits = torch.full((1, 4, 3), 1.5, dtype=torch.float16)
    assert_told_apart(Chunk(bits), Chunk(bits.view(torch.bfloat16)))


def test_more_or_fewer_chunks_are_noticed():
    chunks = [draw(1, 2, 3, seed=seed) for seed in range(3)]
    for again in ([*chunks, chunks[0]], [*chunks, chunks[0][:, :0]]):
        turns = iter([chunks, again])
        found = reader(lambda turns=turns: iter(next(turns)))
        assert read(found) == [0, 1, 2]
        with pytest.raises(setfold.InputError, match="chunk 3 has changed"):
            read(found)
    for again in (chunks[:2], []):
        turns = iter([chunks, again])
        found = reader(lambda turns=turns: iter(next(turns)))
        assert read(found) == [0, 1, 2]
        with pytest.raises(setfold.InputError, match=f"3 chunks were read first, now {len(again)}"):
            read(found)


def test_a_first_read_that_is_interrupted_does_not_count():
    chunks = [draw(1, 2, 3, seed=seed) for seed in range(3)]
    found = reader(lambda: iter(chunks))
    next(iter(found.read()))
    assert read(found) == [0, 1, 2]
    assert read(found) == [0, 1, 2]


CHANGES_OF_A_LIST = {
    "written in place": lambda chunks: chunks[1].add_(1),
    "replaced by a copy with other numbers": lambda chunks: chunks.__setitem__(1, chunks[1] + 1),
    "exchanged": lambda chunks: chunks.reverse(),
    "appended": lambda chunks: chunks.append(chunks[0]),
    "shortened": lambda chunks: chunks.pop(),
    "narrowed": lambda chunks: chunks.__setitem__(1, chunks[1][:, :1]),
}


@pytest.mark.parametrize("change", CHANGES_OF_A_LIST.values(), ids=CHANGES_OF_A_LIST)
def test_tensors_of_a_list_are_known_by_their_memory(change):
    chunks = [draw(1, 2, 3, seed=seed) for seed in range(3)]
    found = reader(chunks)
    assert read(found) == [0, 1, 2] == read(found)
    change(chunks)
    with pytest.raises(setfold.InputError, match=r"chunk \d has changed|chunks were read first"):
        read(found)


def test_a_tensor_of_a_list_that_is_freed_is_not_mistaken_for_another():
    """The memory of a freed tensor is given to the next one of its size."""
    chunks = [draw(1, 50, 3, seed=0)]
    found = reader(chunks)
    read(found)
    for seed in range(1, 20):
        chunks[0] = None
        chunks[0] = draw(1, 50, 3, seed=seed)
        with pytest.raises(setfold.InputError, match="chunk 0 has changed"):
            read(found)


def test_a_mask_or_index_of_a_list_that_is_written_to_is_noticed():
    mask = torch.ones(1, 2, dtype=torch.bool)
    found = reader([(draw(1, 2, 3), mask)])
    read(found)
    mask[0, 0] = False
    with pytest.raises(setfold.InputError, match="chunk 0 has changed"):
        read(found)


@pytest.mark.parametrize(
    "form", [list, lambda arrays: lambda: iter(arrays)], ids=["list", "stream"]
)
def test_arrays_that_are_written_to_are_noticed(form):
    arrays = [draw(1, 2, 3, seed=seed).numpy() for seed in range(3)]
    found = reader(form(arrays))
    assert read(found) == [0, 1, 2] == read(found)
    arrays[2][0, 1, 2] += 1
    with pytest.raises(setfold.InputError, match="chunk 2 has changed"):
        read(found)


def test_chunks_that_are_read_once_are_not_compared():
    turns = iter([[draw(1, 2, 3)], [draw(1, 3, 3)]])
    found = reader(lambda: next(turns), again=False)
    assert read(found) == [0] == read(found)


def test_chunks_that_lie_in_memory_in_other_ways_are_the_same():
    chunk = draw(2, 4, 3)
    views = [chunk, chunk.transpose(0, 1).contiguous().transpose(0, 1), chunk.clone()]
    turns = iter(views)
    found = reader(lambda: iter([next(turns)]))
    for _ in views:
        assert read(found) == [0]


def test_tensors_without_values_are_known_by_their_shapes():
    turns = iter([torch.ones(2, n, 3, device="meta") for n in (4, 4, 5)])
    found = reader(lambda: iter([next(turns)]))
    assert read(found) == [0] == read(found)
    with pytest.raises(setfold.InputError, match="chunk 0 has changed"):
        read(found)


@pytest.mark.parametrize("draws", [True, False])
def test_a_chunk_meets_the_same_random_numbers_each_time(draws):
    chunks, drawn = reader([draw(1, 2, 3)], draws=draws), []
    for number in (0, 1, 0):
        with chunks.same_draws(number, torch.device("cpu")):
            drawn.append(float(torch.rand(())))
    assert (drawn[0] == drawn[2]) is draws
    assert drawn[0] != drawn[1]


def test_processes_meet_different_random_numbers():
    drawn = set()
    for rank in range(5):
        torch.manual_seed(0)
        chunks = reader([draw(1, 2, 3)], draws=True, rank=rank)
        with chunks.same_draws(0, torch.device("cpu")):
            drawn.add(float(torch.rand(())))
    assert len(drawn) == 5
