"""Encoders of several passes: a fold over any chunks is the whole set, and so are its gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import setfold
from tests import memory
from tests.small import TIGHT, draw, gradients


class Gate(nn.Module):
    """Weigh the elements by the readout of random slots, which have a frame of their own."""

    def forward(self, elements, summary):
        return elements * summary.mean((1, 2))[:, None, None].tanh()


def slot_layers():
    encoder = setfold.SlotSetEncoder(
        3, num_slots=4, dim_slot=5, dim_out=3, aggregate="weighted_mean"
    )
    return setfold.LayeredSetEncoder(
        [setfold.Layer(encoder, Gate())], setfold.Pool(3, ["max", "mean"])
    )


ENCODERS = {
    "isab": partial(setfold.SetTransformer, 3, 8, num_heads=2, num_inducing=3, num_layers=2),
    "isab, decoder": partial(
        setfold.SetTransformer,
        *(3, 8, 2, 3, 1),
        num_seeds=2,
        num_decoder_layers=1,
        layer_norm=False,
        head=nn.Sequential(nn.Flatten(), nn.Linear(16, 2)),
    ),
    "max": partial(setfold.EquivariantDeepSets, 3, [5, 4], head=nn.Linear(4, 2)),
    "mean, two matrices": partial(
        setfold.EquivariantDeepSets, 3, [5, 4], "mean", shared=False, aggregate=["mean", "min"]
    ),
    "set norm": lambda: setfold.LayeredSetEncoder(
        [setfold.SetNorm(3), setfold.SetNorm(3, over="set")], setfold.Pool(3, "max")
    ),
    "slot attention": partial(setfold.SlotAttention, 3, num_slots=3, dim=6, dim_hidden=7),
    "slots": slot_layers,
}
PARTITIONS = ([20], [1] * 20, [0, 7, 0, 12, 1])


@pytest.fixture(params=ENCODERS)
def encoder(request):
    torch.manual_seed(0)
    return ENCODERS[request.param]().double().eval()


@pytest.mark.parametrize("lengths", PARTITIONS, ids=str)
def test_a_fold_is_the_whole_set(encoder, lengths):
    elements = draw(2, 20, 3)
    with torch.no_grad():
        assert_close(setfold.fold(encoder, elements.split(lengths, 1)), encoder(elements), **TIGHT)


@pytest.mark.parametrize("lengths", PARTITIONS, ids=str)
def test_gradients_of_a_fold_are_those_of_the_whole_set(encoder, lengths):
    elements = draw(2, 20, 3).requires_grad_()
    wanted = [elements, *encoder.parameters()]
    expected = gradients(encoder(elements), wanted)
    assert expected[0].abs().max() > 1e-6
    found = gradients(setfold.fold(encoder, elements.split(lengths, 1)), wanted)
    scale = max(float(e.abs().max()) for e in expected)
    assert_close(found, expected, rtol=1e-10, atol=1e-12 * max(1.0, scale))


def test_gradients_without_those_of_the_elements(encoder):
    elements, wanted = draw(2, 20, 3), list(encoder.parameters())
    expected = gradients(encoder(elements), wanted)
    found = gradients(setfold.fold(encoder, elements.split(6, 1)), wanted)
    assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_training_mode_draws_slots_once_for_all_passes():
    torch.manual_seed(0)
    encoder, elements = ENCODERS["slots"]().double().train(), draw(2, 20, 3)
    torch.manual_seed(3)
    found = setfold.fold(encoder, elements.split(7, 1))
    torch.manual_seed(3)
    assert_close(found, encoder(elements), **TIGHT)


def test_a_fold_reads_the_chunks_once_per_pass(encoder):
    reads = []

    class Chunks:
        def __iter__(self):
            reads.append(1)
            return iter(draw(1, 10, 3).split(4, 1))

    with torch.no_grad():
        setfold.fold(encoder, Chunks())
    assert len(reads) == encoder.passes > 1


def test_a_stream_that_can_be_read_once_is_refused(encoder):
    chunks = (draw(1, 5, 3) for _ in range(3))
    with pytest.raises(setfold.InputError, match=r"reads its chunks \d times.*only once"):
        setfold.fold(encoder, chunks)
    assert next(chunks) is not None  # it was not touched


def test_a_function_may_open_the_stream_again(encoder):
    elements = draw(1, 12, 3)
    with torch.no_grad():
        found = setfold.fold(encoder, lambda: iter(elements.split(5, 1)))
        assert_close(found, encoder(elements), **TIGHT)


def changing(*lengths):
    """A stream that is something else whenever it is opened."""
    left = iter(lengths)

    def stream():
        yield draw(1, next(left), 3)

    return stream


@pytest.mark.parametrize("grad", [True, False])
def test_chunks_that_change_between_passes_are_noticed(encoder, grad):
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(setfold.InputError, match="has changed since it was first read"),
    ):
        setfold.fold(encoder, changing(10, *[9] * 5))


def test_chunks_that_change_before_the_backward_pass_are_noticed(encoder):
    encoding = setfold.fold(encoder, changing(*[10] * encoder.passes, *[9] * encoder.passes))
    with pytest.raises(setfold.InputError, match="has changed since it was first read"):
        encoding.sum().backward()


def test_an_encoder_that_cannot_be_folded_says_why():
    with pytest.raises(setfold.InputError, match=r"FullSetTransformer cannot be folded \(self-att"):
        setfold.fold(setfold.FullSetTransformer(3, 8), [draw(1, 5, 3)])


def test_batch_norm_is_refused_in_training():
    layer = nn.BatchNorm1d(3)
    encoder = setfold.LayeredSetEncoder([setfold.SetNorm(3)], setfold.Pool(3), features=layer)
    chunks = [torch.randn(1, 5, 3)]
    with pytest.raises(setfold.InputError, match="BatchNorm1d in training mode"):
        setfold.fold(encoder.train(), chunks)
    assert setfold.fold(encoder.eval(), chunks).shape == (1, 3)


class Recorded(nn.Module):
    """Features that draw, and remember what they made."""

    def __init__(self):
        super().__init__()
        self.made = []

    def forward(self, rows):
        found = nn.functional.dropout(rows, 0.5, self.training)
        self.made.append(found.detach())
        return found


@pytest.mark.parametrize("grad", [True, False])
def test_an_element_is_the_same_in_every_pass_though_layers_draw(grad):
    features = Recorded()
    encoder = setfold.LayeredSetEncoder([setfold.SetNorm(3)], setfold.Pool(3), features=features)
    chunks = [torch.ones(1, 50, 3) for _ in range(2)]
    with torch.set_grad_enabled(grad):
        encoding = setfold.fold(encoder.train(), chunks)
        if grad:
            encoding.sum().backward()
    first, second, *again = features.made
    assert not torch.equal(first, second)
    assert 0.2 < (first == 0).float().mean() < 0.8
    for number, made in enumerate(again):
        assert torch.equal(made.flatten(), (first, second)[number % 2].flatten())


def test_dropout_in_the_head_is_nobodys_business():
    encoder = setfold.EquivariantDeepSets(3, [4], head=nn.Dropout(0.5)).train()
    assert setfold.fold(encoder, [torch.randn(1, 5, 3)]).shape == (1, 4)


def test_masks_and_ragged_batches_are_sets_of_their_own(encoder):
    elements, counts = draw(3, 8, 3), [8, 0, 3]
    mask = torch.arange(8) < torch.tensor(counts)[:, None]
    alone = torch.cat([encoder(elements[i : i + 1, :n]) for i, n in enumerate(counts)])
    hidden = elements.masked_fill(~mask.unsqueeze(-1), torch.nan)
    assert_close(encoder(hidden, mask), alone, **TIGHT)
    index = torch.arange(3)[:, None].expand(3, 8)[mask]
    order = torch.randperm(len(index))
    ragged = encoder(elements[mask][order], index=index[order], batch_size=3)
    assert_close(ragged, alone, **TIGHT)


def test_a_fold_refuses_what_the_whole_refuses(encoder):
    for chunk in (draw(2, 5, 4), draw(2, 5, 3).float(), draw(2, 5, 3) * torch.nan):
        with pytest.raises(setfold.InputError) as by_whole:
            encoder(chunk)
        with pytest.raises(setfold.InputError) as by_fold:
            setfold.fold(encoder, [draw(2, 5, 3), chunk])
        assert str(by_fold.value)[:16] == str(by_whole.value)[:16]


def test_a_fold_of_nothing_but_empty_chunks_is_the_empty_set(encoder):
    nothing = [draw(2, 0, 3), draw(2, 0, 3)]
    assert torch.equal(setfold.fold(encoder, nothing), encoder(nothing[0]))


def test_layers_that_do_not_fit_are_refused():
    with pytest.raises(setfold.InputError, match=r"width 8, but Pool.* has dim_in=4"):
        setfold.LayeredSetEncoder([setfold.ISAB(8, 2, 2)], setfold.Pool(4))
    with pytest.raises(setfold.InputError, match=r"setfold\.Layer"):
        setfold.LayeredSetEncoder([nn.Linear(3, 3)], setfold.Pool(3))
    with pytest.raises(setfold.InputError, match="streaming"):
        setfold.Layer(nn.Linear(3, 3), nn.Identity())


def test_weights_that_two_layers_share_count_once():
    torch.manual_seed(0)
    layer, elements = setfold.ISAB(3, 2, 1), draw(2, 20, 3)
    layer.look = layer.pool.block  # what elements look with is what the points look with
    encoder = setfold.LayeredSetEncoder([layer, layer], setfold.Pool(3)).double()
    wanted = list(encoder.parameters())
    expected = gradients(encoder(elements), wanted)
    assert_close(gradients(setfold.fold(encoder, elements.split(7, 1)), wanted), expected, **TIGHT)


def test_autocast_rounds_and_does_not_refuse(encoder):
    encoder, elements = encoder.float(), draw(2, 20, 3).float()
    with torch.autocast("cpu", torch.bfloat16):
        whole, chunks = encoder(elements), setfold.fold(encoder, elements.split(7, 1))
    assert_close([whole.float(), chunks.float()], [encoder(elements)] * 2, rtol=0.1, atol=0.1)
    for encoding in (whole, chunks):
        found = torch.autograd.grad(encoding.sum(), list(encoder.parameters()), allow_unused=True)
        assert all(gradient is None or gradient.isfinite().all() for gradient in found)


STREAMED = """
encoder = setfold.SetTransformer(4, 32, num_layers=2)

def step(length):
    def stream():
        draw = torch.Generator().manual_seed(0)
        for _ in range(length // 1000):
            yield torch.randn(1, 1000, 4, generator=draw)
    setfold.fold(encoder, stream).sum().backward()
"""


@memory.linux_only
def test_a_fold_is_trained_in_the_memory_of_one_chunk():
    many = memory.peak(STREAMED, 50_000, small=3000)
    assert many < 30e6  # 7 MB; the graph of all chunks takes 260 MB
