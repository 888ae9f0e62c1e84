"""The wrong ways are wrong in the way that they say: against plain loops, and against the right one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

import setfold
from setfold.laws.wrong_way import ChunkAverage, PublishedSlotSetEncoder
from tests import reference
from tests.small import TIGHT, assert_loops_agree, draw
from tests.strategies import cases, slot_set_encoders

PUBLISHED = ("sum", "mean", "max", "min")


def slot_set(seed=0, **options):
    torch.manual_seed(seed)
    return setfold.SlotSetEncoder(3, 4, 6, 5, **options).double().eval()


def slots_of(encoder, chunks, redraw=False):
    """What the slots are when each chunk comes."""
    if not redraw:
        return [encoder.initial_state(1).slots[0]] * chunks
    generators = (torch.Generator().manual_seed(number) for number in range(chunks))
    return [encoder.initial_state(1, generator=g).slots[0] for g in generators]


# ---- plain loops -------------------------------------------------------------------------------


@given(
    encoder=slot_set_encoders(),
    case=cases(),
    aggregate=st.sampled_from(PUBLISHED),
    size=st.integers(1, 6),
    options=st.tuples(st.booleans(), st.booleans()),
)
def test_the_published_way_is_what_the_loops_say(encoder, case, aggregate, size, options):
    masked, redraw = options
    encoder, redraw = encoder.double().eval(), redraw and encoder.slots == "random"
    wrong = PublishedSlotSetEncoder(encoder, aggregate, size, redraw)
    slots = slots_of(encoder, 12, redraw)
    loops = lambda rows: reference.published_slot_set(encoder, aggregate, rows, slots, size)  # noqa: E731
    mask = case.mask if masked else None
    assert_loops_agree(wrong, loops, case.elements, mask, rtol=1e-10)


@given(case=cases(), size=st.integers(1, 6), masked=st.booleans())
def test_chunk_average_is_what_the_loops_say(case, size, masked):
    torch.manual_seed(0)
    encoder = setfold.AttentionPool(3, num_queries=2, dim_out=4).double()
    wrong, mask = ChunkAverage(encoder, size), case.mask if masked else None

    def loops(rows):
        return reference.chunk_average(
            lambda chunk: reference.attention_pool(encoder, chunk), rows, size
        )

    assert_loops_agree(wrong, loops, case.elements, mask)


# ---- how wrong ---------------------------------------------------------------------------------


def test_only_a_sum_of_chunks_is_that_of_the_elements():
    elements = draw(2, 20, 3)
    for aggregate in PUBLISHED:
        encoder = slot_set(aggregate=aggregate)
        wrong = PublishedSlotSetEncoder(encoder, aggregate, chunk_size=7)
        error = (wrong(elements) - encoder(elements)).abs().max()
        assert (error < 1e-12) == (aggregate == "sum")


def test_slots_drawn_for_every_chunk_spoil_even_a_sum():
    encoder, elements = slot_set(aggregate="sum"), draw(2, 20, 3)
    wrong = PublishedSlotSetEncoder(encoder, "sum", chunk_size=7, redraw=True)
    assert (wrong(elements) - encoder(elements)).abs().max() > 1e-3


def test_an_average_of_means_is_the_mean_and_of_maxima_is_nothing():
    elements = draw(2, 20, 3)
    means, maxima = (setfold.Pool(3, name).double() for name in ("mean", "max"))
    assert_close(ChunkAverage(means, 7)(elements), means(elements), **TIGHT)
    error = ChunkAverage(maxima, 7)(elements) - maxima(elements)
    assert error.abs().max() > 0.1


@pytest.mark.parametrize(
    "wrong",
    [
        ChunkAverage(setfold.Pool(3, "max").double(), 2),
        PublishedSlotSetEncoder(slot_set(), "mean", 3, redraw=True),
        PublishedSlotSetEncoder(slot_set(), "max", 2),
    ],
)
def test_what_is_hidden_takes_no_place_in_a_chunk(wrong):
    elements = draw(2, 6, 3)
    mask = torch.tensor([[1, 0, 1, 0, 1, 1], [0, 0, 0, 1, 1, 0]]).bool()
    hidden = elements.masked_fill(~mask.unsqueeze(-1), torch.nan)
    found = wrong(hidden, mask)
    for number in range(2):
        alone = wrong(elements[number : number + 1, mask[number]])
        assert_close(found[number : number + 1], alone, **TIGHT)


@pytest.mark.parametrize("aggregate", PUBLISHED)
def test_gradients_of_hidden_elements_are_zero_and_all_are_finite(aggregate):
    wrong = PublishedSlotSetEncoder(slot_set(), aggregate, 2)
    elements, mask = draw(2, 6, 3).requires_grad_(), torch.ones(2, 6, dtype=torch.bool)
    mask[0, 1:4] = False
    wrong(elements, mask).square().sum().backward()
    assert not elements.grad[~mask].any()
    assert elements.grad[mask].abs().min() > 0 or aggregate in ("max", "min")
    used = [p.grad for p in wrong.parameters() if p.grad is not None]
    assert all(gradient.isfinite().all() for gradient in used)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: ChunkAverage(nn.Linear(3, 3), 5),
            "encoder must be a set encoder; got Lin",
        ),
        (lambda: ChunkAverage(slot_set(), 0), "chunk_size must be an integer of at least 1"),
        (lambda: PublishedSlotSetEncoder(setfold.Pool(3)), "a SlotSetEncoder; got Pool"),
        (lambda: PublishedSlotSetEncoder(slot_set(), "mass"), "aggregate must be one of"),
        (
            lambda: PublishedSlotSetEncoder(slot_set(slots="learned"), redraw=True),
            "redraw=True needs an encoder with slots",
        ),
    ],
)
def test_bad_settings_say_what_is_allowed(build, message):
    with pytest.raises(setfold.InputError, match=message):
        build()
