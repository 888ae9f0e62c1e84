from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import setfold
from experiments.tasks import sets


def elements():
    return torch.randn(2, 40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_elements_are_drawn_without_replacement_and_evenly():
    torch.manual_seed(0)
    found = sets.drawn(4000, 10, 4)
    assert found.shape == (4000, 4)
    assert all(len(set(row)) == 4 for row in found.tolist())
    for place in found.T:  # 400 of each number are expected, with a deviation of 19
        assert (place.bincount(minlength=10) - 400).abs().max() < 80


def test_what_is_drawn_follows_from_the_generator():
    few, more = (sets.drawn(3, 10, n, torch.Generator().manual_seed(1)) for n in (4, 10))
    assert torch.equal(few, more[:, :4])
    assert not torch.equal(few, sets.drawn(3, 10, 4, torch.Generator().manual_seed(2)))


@pytest.mark.parametrize("count", [0, 11])
def test_more_than_there_is_cannot_be_drawn(count):
    with pytest.raises(setfold.InputError, match=rf"{count} elements from sets of 10"):
        sets.drawn(2, 10, count)


def test_numbers_of_elements_have_uniform_logarithms():
    torch.manual_seed(0)
    found = torch.tensor([sets.some_number(10, 100) for _ in range(4000)])
    assert (int(found.min()), int(found.max())) == (10, 100)
    assert abs(int((found < 32).sum()) - 2000) < 150  # half are below the middle, 31.6
    assert {sets.some_number(7, 7) for _ in range(9)} == {7}


@pytest.mark.parametrize(("fewest", "most"), [(0, 5), (6, 5)])
def test_numbers_need_a_range(fewest, most):
    with pytest.raises(setfold.InputError, match=f"fewest={fewest}, most={most}"):
        sets.some_number(fewest, most)


def test_chunks_are_the_first_elements():
    whole = elements()
    assert [c.shape[1] for c in sets.chunked(whole, 7, 3)] == [7, 7, 7]
    assert torch.equal(torch.cat(sets.chunked(whole, 7, 3), 1), whole[:, :21])
    with pytest.raises(setfold.InputError, match="42 elements, but the sets have only 40"):
        sets.chunked(whole, 7, 6)


@pytest.mark.parametrize(
    "encoder",
    [
        setfold.SlotSetEncoder(3, 4, 8, 8, aggregate="max"),
        setfold.SetTransformer(3, 8, num_heads=2, num_inducing=4),
    ],
    ids=["one pass", "several"],
)
@torch.no_grad()
def test_streamed_encodings_are_those_of_what_was_seen(encoder):
    encoder, whole = encoder.double().eval(), elements()
    chunks = sets.chunked(whole, 10, 4)
    for step, found in enumerate(sets.streamed(encoder, chunks), start=1):
        assert_close(found, encoder(whole[:, : 10 * step]), rtol=1e-11, atol=1e-12)
    assert step == 4
    assert sets.consistency_error(encoder, chunks) < 1e-11


@torch.no_grad()
def test_an_error_is_relative_to_the_encoding():
    class Forgetful(setfold.Pool):
        """Whose states miss a tenth of what they see."""

        def readout(self, state):
            return 0.9 * super().readout(state)

    found = sets.consistency_error(Forgetful(3, "mean").double(), sets.chunked(elements(), 10, 4))
    assert found == pytest.approx(0.1)
