"""The streaming softmax against torch's, in every way that it may be computed."""

from __future__ import annotations

import itertools
from functools import reduce

import pytest
import torch
from torch.testing import assert_close

from setfold.core.statistic import Softmax
from setfold.kernels import softmax, tiles
from setfold.kernels.scores import FoldedScores, GatedScores, KeyScores
from setfold.native import library
from tests.small import TIGHT, draw

WIDTH, LOGITS, HIDDEN = 5, 4, 3
FORMS = ("folded", "key", "gated", "gated, no bias", "tanh")
SHAPES = [(1, 1), (1, 29), (3, 4), (2, 17), (7, 1)]


def make_scores(form):
    seeds = itertools.count(10)

    def normal(*shape):
        return draw(*shape, seed=next(seeds)).requires_grad_()

    if form == "folded":
        return FoldedScores(normal(WIDTH + 1, LOGITS))
    if form == "key":
        return KeyScores(normal(HIDDEN, WIDTH), normal(HIDDEN), normal(LOGITS, HIDDEN))
    bias = None if form == "gated, no bias" else normal(HIDDEN)
    gate = (None, None) if form == "tanh" else (normal(HIDDEN, WIDTH), bias)
    return GatedScores(normal(LOGITS, HIDDEN), normal(HIDDEN, WIDTH), bias, *gate)


@pytest.fixture
def tiny_tiles(monkeypatch):
    """Tiles so small that a small input needs many, and no shortcut for small inputs."""
    monkeypatch.setattr(tiles, "MIN_ROWS", 1)
    monkeypatch.setattr(tiles, "TILE_BYTES", 400)
    monkeypatch.setattr(softmax, "PLAIN_ROWS", 0)
    monkeypatch.setattr(softmax, "FEW_ROWS", 2)


def literal(elements, mask, scores):
    """Torch's own: the mean element (B, Q, d) and the logarithm of the denominator (B, Q)."""
    logits = scores.logits(elements)
    if mask is not None:
        logits = logits.masked_fill(~mask.unsqueeze(-1), -torch.inf)
    return logits.softmax(1).transpose(1, 2) @ elements, logits.logsumexp(1)


def read(peak, sums):
    """The same from peak and sums."""
    return sums[..., :-1] / sums[..., -1:], peak + sums[..., -1].log()


def gradients(outputs, wanted):
    slopes = [draw(*output.shape, seed=number) for number, output in enumerate(outputs)]
    total = sum((o.double() * s).sum() for o, s in zip(outputs, slopes, strict=True))
    return torch.autograd.grad(total, wanted)


def some_hidden(shape):
    """A mask of which no row hides everything."""
    places = torch.arange(shape[1]) + torch.arange(shape[0])[:, None]
    return (places % 3 != 1) | (torch.arange(shape[1]) == shape[1] - 1)


def assert_like_torch(form, shape, masked):
    elements, scores = draw(*shape, WIDTH).requires_grad_(), make_scores(form)
    mask = some_hidden(shape) if masked else None
    wanted = [tensor for tensor in (elements, *scores) if tensor is not None]
    expected = literal(elements, mask, scores)
    found = read(*softmax.softmax_sums(elements, mask, scores))
    assert_close(found, expected, **TIGHT)
    assert_close(gradients(found, wanted), gradients(expected, wanted), rtol=1e-11, atol=1e-12)
    with torch.no_grad():
        peak, sums = softmax.softmax_sums(elements, mask, scores)
        assert peak.dtype == sums.dtype == torch.float64
        assert_close(read(peak, sums), expected, **TIGHT)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["dense", "masked"])
def test_small_inputs_are_torchs(form, shape, masked):
    assert_like_torch(form, shape, masked)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["dense", "masked"])
@pytest.mark.usefixtures("tiny_tiles")
def test_tiles_are_torchs(form, shape, masked):
    assert_like_torch(form, shape, masked)


@pytest.mark.parametrize("form", ["folded", "gated"])
@pytest.mark.parametrize("shape", [(2, 5003), (900, 7)], ids=str)
def test_large_inputs_are_torchs(form, shape):
    assert_like_torch(form, shape, masked=True)


@pytest.mark.parametrize("form", ["folded", "gated"])
def test_single_precision_is_torchs_in_double(form):
    elements, scores = draw(2, 20_000, WIDTH), make_scores(form)
    expected = literal(elements, None, scores)
    single = type(scores)(*(t.float() for t in scores))
    for tracked in (True, False):
        with torch.set_grad_enabled(tracked):
            found = read(*softmax.softmax_sums(elements.float(), None, single))
        assert_close([f.double() for f in found], list(expected), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", ["folded", "gated"])
@pytest.mark.usefixtures("tiny_tiles")
def test_gradients_are_those_of_finite_differences(form):
    scores = make_scores(form)

    def function(elements, *tensors):
        return read(*softmax.softmax_sums(elements, None, type(scores)(*tensors)))

    assert torch.autograd.gradcheck(function, (draw(2, 6, WIDTH).requires_grad_(), *scores))


# ---- nothing to see ----------------------------------------------------------------------------


def assert_nothing_is_seen(form):
    elements, mask = draw(3, 6, WIDTH).requires_grad_(), torch.zeros(3, 6, dtype=torch.bool)
    mask[1, 2:4] = True  # the other sets show nothing
    scores = make_scores(form)
    peak, sums = softmax.softmax_sums(elements, mask, scores)
    assert (peak[[0, 2]] == -torch.inf).all()
    assert not sums[[0, 2]].any()
    expected = literal(elements[1:2, 2:4], None, scores)
    assert_close(read(peak[1:2], sums[1:2]), expected, **TIGHT)
    wanted = [elements, *(tensor for tensor in scores if tensor is not None)]
    found = torch.autograd.grad(sums.square().sum(), wanted)
    assert all(gradient.isfinite().all() for gradient in found)
    assert not found[0][~mask].any()
    with torch.no_grad():
        again = softmax.softmax_sums(elements, mask, scores)
    assert_close(again, (peak.double(), sums), **TIGHT)


@pytest.mark.parametrize("form", FORMS)
def test_sets_that_show_nothing(form):
    assert_nothing_is_seen(form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("tiny_tiles")
def test_sets_that_show_nothing_in_tiles(form):
    assert_nothing_is_seen(form)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_no_elements_at_all(shape):
    peak, sums = softmax.softmax_sums(draw(*shape, WIDTH), None, make_scores("folded"))
    assert peak.shape == (shape[0], LOGITS)
    assert sums.shape == (shape[0], LOGITS, WIDTH + 1)
    assert (peak == -torch.inf).all()
    assert not sums.any()


# ---- logits of any size ------------------------------------------------------------------------

STEEP = 2.0**14  # a power of two, so that logits of 1e4 and more are exact in float32


def steep_scores(dtype):
    """A first logit of STEEP times the first feature, and a second of the opposite sign."""
    matrix = torch.zeros(WIDTH + 1, 2, dtype=dtype)
    matrix[0, 0], matrix[0, 1] = STEEP, -STEEP
    return FoldedScores(matrix.requires_grad_())


def with_logits(*logits, dtype):
    """One set whose elements have these first logits."""
    elements = draw(1, len(logits), WIDTH).to(dtype)
    elements[0, :, 0] = torch.tensor(logits, dtype=dtype) / STEEP
    return elements


CHUNKS = ([-1e4, 1e4, 9999.0], [0.0, 1e4, -1e4], [9998.0, -9999.0], [-16384.0, 3.0])


def paths():
    """Small and plain, tiled with a graph, tiled without one."""
    for rows, tracked in ((4096, True), (0, True), (0, False)):
        with pytest.MonkeyPatch.context() as patch, torch.set_grad_enabled(tracked):
            patch.setattr(softmax, "PLAIN_ROWS", rows)
            patch.setattr(tiles, "MIN_ROWS", 1)
            patch.setattr(tiles, "TILE_BYTES", 40)
            yield tracked


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_logits_in_any_order_of_chunks(dtype):
    pieces = [with_logits(*logits, dtype=dtype) for logits in CHUNKS]
    scores = steep_scores(dtype)
    whole = torch.cat(pieces, 1).double()
    expected = literal(whole, None, FoldedScores(scores.matrix.double()))
    for tracked in paths():
        found = [softmax.softmax_sums(piece, None, scores) for piece in pieces]
        for order in itertools.permutations(found):
            one_by_one = reduce(Softmax().join, order)
            in_pairs = Softmax().join(Softmax().join(*order[:2]), Softmax().join(*order[2:]))
            for joined in (one_by_one, in_pairs):
                assert_close([r.double() for r in read(*joined)], list(expected))
        if tracked:
            (gradient,) = torch.autograd.grad(one_by_one[1].sum(), scores.matrix)
            assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_huge_logits_are_torchs(dtype):
    scores, elements = steep_scores(dtype), with_logits(*itertools.chain(*CHUNKS), dtype=dtype)
    exact, double = FoldedScores(scores.matrix.detach().double()), elements.double()
    wanted = [double.requires_grad_(), exact.matrix.requires_grad_()]
    expected = gradients(literal(double, None, exact), wanted)
    elements.requires_grad_()
    for tracked in paths():
        if tracked:
            found = read(*softmax.softmax_sums(elements, None, scores))
            by_us = gradients(found, [elements, scores.matrix])
            assert_close([g.double() for g in by_us], list(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_hidden_may_be_far_above_the_peak(dtype):
    elements, scores = with_logits(-1e4, 0.0, -9999.0, 1e4, dtype=dtype), steep_scores(dtype)
    mask = torch.tensor([[True, False, True, False]])
    exact = FoldedScores(scores.matrix.detach().double().requires_grad_())
    expected = literal(elements[:, mask[0]].double(), None, exact)
    (reference,) = gradients(expected, [exact.matrix])
    elements.requires_grad_()
    for tracked in paths():
        found = read(*softmax.softmax_sums(elements, mask, scores))
        assert_close([r.double() for r in found], list(expected))
        if tracked:
            of_elements, of_scores = gradients(found, [elements, scores.matrix])
            assert_close(of_scores.double(), reference, rtol=1e-5, atol=1e-6)
            assert not of_elements[~mask].any()
            assert of_elements.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_logits_after_huge_ones_change_nothing(dtype):
    scores = steep_scores(dtype)
    huge = with_logits(1e4, 9999.0, dtype=dtype)
    for _ in paths():
        state = before = softmax.softmax_sums(huge, None, scores)
        for seed in range(100):
            small = draw(1, 5, WIDTH, seed=seed).to(dtype)
            small[..., 0] = 0
            state = Softmax().join(state, softmax.softmax_sums(small, None, scores))
        assert torch.equal(state[0][:, 0], before[0][:, 0])
        assert torch.equal(state[1][:, 0], before[1][:, 0])  # the first logit does not notice
        assert not torch.equal(state[1][:, 1], before[1][:, 1])  # the second was waiting for it
        assert all(part.isfinite().all() for part in state)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129, 1001])
def test_the_largest_of_many_is_found_wherever_it_is(length):
    logits = draw(2, length, 3)
    for place in {0, length // 2, length - 1}:
        raised = logits.clone()
        raised[:, place] += 10
        assert torch.equal(softmax._largest(raised), raised.amax(1))
    spoiled = logits.clone()
    spoiled[0, -1, 1] = torch.nan
    assert softmax._largest(spoiled)[0, 1].isnan()


@pytest.mark.parametrize("size", [1e4, 1e6, 1e9])
def test_gradients_of_enormous_logits_are_finite(size):
    torch.manual_seed(0)
    matrix = torch.cat([size * torch.randn(WIDTH, LOGITS), torch.zeros(1, LOGITS)]).requires_grad_()
    elements = torch.randn(1, 20_000, WIDTH, requires_grad=True)
    _, sums = softmax.softmax_sums(elements, None, FoldedScores(matrix))
    means = sums[..., :-1] / sums[..., -1:]
    gradients = torch.autograd.grad(means.square().sum(), (elements, matrix))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert float(sums.detach()[..., -1].min()) >= 1


def test_a_logit_that_is_rounded_to_above_its_peak_does_no_harm():
    elements, matrix = draw(1, 50, WIDTH).float(), draw(WIDTH + 1, LOGITS).float()
    peak = FoldedScores(matrix).logits(elements).amax(1) - 200  # enormous logits are rounded so
    upstream = torch.ones(1, LOGITS, WIDTH + 1)
    found = softmax._folded_gradients(elements, None, peak, matrix, upstream, True)
    assert all(gradient.isfinite().all() for gradient in found)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [softmax.COMPILED_LENGTH - 1, softmax.COMPILED_LENGTH])
def test_first_and_second_derivatives_of_small_inputs(length, masked):
    """In float32, with compiled kernels from a certain length on."""
    mask = some_hidden((2, length)) if masked else None
    found = {}
    for dtype in (torch.float64, torch.float32):
        elements = draw(2, length, WIDTH).to(dtype).requires_grad_()
        matrix = draw(WIDTH + 1, LOGITS, seed=1).to(dtype).requires_grad_()
        means, _ = read(*softmax.softmax_sums(elements, mask, FoldedScores(matrix)))
        loss = means.square().sum()
        plain = torch.autograd.grad(loss, [elements, matrix], retain_graph=True)
        slopes = torch.autograd.grad(loss, [elements, matrix], create_graph=True)
        again = torch.autograd.grad(sum(s.square().sum() for s in slopes), [elements, matrix])
        found[dtype] = [tensor.detach().double() for tensor in (*plain, *slopes, *again)]
    for rounded, exact in zip(found[torch.float32], found[torch.float64], strict=True):
        assert_close(rounded, exact, rtol=0, atol=1e-4 * float(exact.abs().max()))


def test_small_inputs_are_compiled_from_a_certain_length_on(monkeypatch):
    calls = []
    apply = softmax._Streamed.apply
    monkeypatch.setattr(softmax._Streamed, "apply", lambda *args: calls.append(1) or apply(*args))
    scores = FoldedScores(draw(WIDTH + 1, LOGITS).float().requires_grad_())
    for length in (softmax.COMPILED_LENGTH - 1, softmax.COMPILED_LENGTH):
        for isa in (None, *library.available()):
            with library.using(isa):
                softmax.softmax_sums(draw(1, length, WIDTH).float(), None, scores)
    assert len(calls) == len(library.available())
