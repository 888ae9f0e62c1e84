"""Chunks that are read again: they are the same chunks, or an error."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import setfold
from setfold.core.inputs import Chunk
from setfold.folding import source
from tests.small import draw


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
