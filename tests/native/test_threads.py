"""Several threads, several processes, and the same bits every time."""

from __future__ import annotations

import sys

import pytest
import torch

import setfold
from setfold.native import dispatch, placed, threads
from tests.native.cases import assert_close, make_case
from tests.native.test_placed import make, near_of
from tests.torchrun import finish, fork

pytestmark = pytest.mark.usefixtures("isa")


def all_results(case):
    values = torch.linspace(-1, 1, (case.matrix.shape[0]) * 3).view(-1, 3)
    upstream = torch.linspace(-1, 1, case.elements.shape[0] * case.matrix.numel())
    upstream = upstream.view(case.elements.shape[0], case.matrix.shape[1], -1)
    peaks, sums = dispatch.softmax(*case)
    highest = peaks.clamp_min(torch.finfo(torch.float64).min)
    arguments = make((6, 7), batch=case.elements.shape[0], length=case.elements.shape[1])
    near = near_of(arguments)
    return [
        dispatch.sums(*case, "sigmoid"),
        dispatch.sums(*case, "softmax"),
        *dispatch.gradients(*case, "sigmoid", upstream, None, True),
        *dispatch.gradients(*case, "exponential", upstream, highest, True),
        *(peaks, sums),
        *dispatch.extrema(*case, "sigmoid", values, True, True),
        *dispatch.extrema(*case, "sigmoid", values, False, True),
        placed.placed_sums(*arguments[:3], near, ("features", "offsets"), True),
        placed.placed_extrema(*arguments[:3], near, ("features",), False),
    ]


@pytest.mark.parametrize("mask", ["all", "some", "one hidden"])
@pytest.mark.parametrize("shape", [(1, 1, 3, 4), (1, 2, 3, 4), (1, 301, 5, 7), (3, 40, 5, 7)])
def test_two_threads_find_what_one_finds(request, shape, mask):
    case = make_case(shape, mask)
    alone = all_results(case)
    request.getfixturevalue("many_threads")
    for found, expected in zip(all_results(case), alone, strict=True):
        if found.dtype == torch.long:  # winners
            assert torch.equal(found, expected)
        else:
            assert_close(found, expected, 1e-5, floor=1e-3)


@pytest.mark.parametrize("threaded", [False, True])
def test_results_repeat_bit_by_bit(request, threaded):
    if threaded:
        request.getfixturevalue("many_threads")
    case = make_case((2, 700, 5, 7), "some")
    first = all_results(case)
    for _ in range(3):
        assert all(map(torch.equal, all_results(case), first))


@pytest.mark.usefixtures("many_threads")
def test_a_bad_number_in_one_part_is_seen_by_all():
    for place in (0, 99):
        case = make_case((1, 100, 3, 4))
        case.elements[0, place, 0] = torch.nan
        assert dispatch.extrema(*case, "sigmoid", torch.randn(4, 2), True, True) is None
        positions, features, mask, *rest = make((6, 7), batch=1, length=200, masked=False)
        near = near_of((positions, features, mask, *rest))
        features[0, place] = torch.inf
        assert placed.placed_sums(positions, features, mask, near, ("features",), False) is None


@pytest.mark.usefixtures("many_threads")
def test_parts_that_still_run_keep_their_elements(monkeypatch):
    """An interrupted call must not leave a thread that reads freed memory."""
    seen = []

    def interrupted(run, *_):
        seen.append(run)
        raise KeyboardInterrupt

    monkeypatch.setattr(dispatch, "_in_parts", interrupted)
    case = make_case((1, 50, 3, 4), "some")
    with pytest.raises(KeyboardInterrupt):
        dispatch.sums(case.elements.clone(), case.mask.clone(), case.matrix, "sigmoid")
    held = [cell.cell_contents for cell in seen[0].__closure__]
    batch = next(value for value in held if isinstance(value, dispatch.Batch))
    assert torch.equal(batch.tensors[0], case.elements)
    assert torch.equal(batch.tensors[1], case.mask)


@pytest.mark.skipif(sys.platform == "win32", reason="fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("many_threads")
def test_a_forked_process_has_threads_of_its_own():
    case = make_case((1, 200, 3, 4))
    expected = dispatch.sums(*case, "sigmoid")

    def check():
        assert torch.equal(dispatch.sums(*case, "sigmoid"), expected)

    assert finish([fork(check)]) == [0]


def test_large_work_is_divided_and_small_work_is_not(monkeypatch):
    parts = []

    def run(sets, rows):
        parts.append((sets, rows))
        return torch.zeros(1)

    monkeypatch.setattr(threads.torch, "get_num_threads", lambda: 2)
    threads.over_threads(run, (1, 1 << 20, 4), 4, torch.add, torch.cat)
    assert len(parts) == 2
    parts.clear()
    threads.over_threads(run, (1, 100, 4), 4, torch.add, torch.cat)
    assert parts == [(slice(0, 1), slice(0, 100))]


def test_an_encoder_is_the_same_with_two_threads(request):
    encoder = setfold.SlotSetEncoder(3, 4, 6, 5, aggregate=["mean", "max"]).eval()
    elements = torch.randn(2, 300, 3)
    with torch.no_grad():
        expected = encoder(elements)
        request.getfixturevalue("many_threads")
        assert_close(encoder(elements), expected)
