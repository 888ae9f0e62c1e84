"""Training by folds: what would not be exact is refused, and all else works as it does elsewhere."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import setfold
from setfold.folding.api import GRADIENTS
from tests.folding.test_gradients import deep_sets, model_of
from tests.small import assert_alike, draw, gradients, make

# ---- what would not be exact is refused ------------------------------------------------------


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_batch_norm_may_train_in_a_head_only(gradient):
    norm, chunks = nn.BatchNorm1d(4), [draw(2, 5, 3), draw(2, 4, 3)]
    fold = partial(setfold.fold, chunks=chunks, gradient=gradient)
    inside = deep_sets(norm), setfold.EquivariantDeepSets(3, [4]).double()
    inside[1].layers[0].look.register_module("norm", norm)
    for model in inside:
        with pytest.raises(setfold.InputError, match="BatchNorm1d in training mode normalizes"):
            fold(model.train())
        assert fold(model.eval()).shape == (2, 4)
    norm.train()
    heads = deep_sets(head=norm), setfold.EquivariantDeepSets(3, [4], head=norm).double()
    for model in heads:
        assert fold(model.train()).requires_grad


def one_number(chunks):
    chunks[1][0][1, 1, 0] *= 2


def one_missing(chunks):
    del chunks[1]


def one_more(chunks):
    chunks.append((draw(2, 1, 3), None))


def an_empty_one_instead(chunks):
    chunks[1] = tuple(part[:, :0] for part in chunks[1])


def other_sets(chunks):
    chunks[1][0].copy_(chunks[1][0].flip(0).clone())


def mask_shows_more(chunks):
    chunks[1][1].fill_(True)


def mask_moved(chunks):
    chunks[1][1].logical_not_()


@pytest.mark.parametrize(
    "change",
    [
        one_number,
        one_missing,
        one_more,
        an_empty_one_instead,
        other_sets,
        mask_shows_more,
        mask_moved,
    ],
)
@pytest.mark.parametrize("aggregate", ["mean", "max"])
def test_other_chunks_in_the_backward_pass_are_noticed(aggregate, change):
    mask = torch.tensor([[True, False, True, False], [False, True, True, False]])
    chunks = [(draw(2, 4, 3, seed=i).round(decimals=1), mask.clone()) for i in range(3)]
    encoding = setfold.fold(
        make(aggregate=aggregate), lambda: (c if c[1] is not None else c[:1] for c in chunks)
    )
    change(chunks)
    with pytest.raises(setfold.InputError, match="has changed since it was first read"):
        encoding.sum().backward()


@pytest.mark.parametrize("index", [[1, 0, 1, 0], [0, 1, 1, 1]], ids=["swapped", "other"])
def test_another_index_in_the_backward_pass_is_noticed(index):
    chunks = [(draw(4, 3, seed=i), torch.tensor([0, 1, 0, 1])) for i in range(3)]
    encoding = setfold.fold(make(), chunks, batch_size=2)
    chunks[1][1].copy_(torch.tensor(index))
    with pytest.raises(setfold.InputError, match="has changed since it was first read"):
        encoding.sum().backward()


def test_what_the_mask_hides_may_change():
    mask = torch.tensor([[True, False, True]])
    encoder, chunks = make(), [(draw(1, 3, 3, seed=i), mask) for i in range(2)]
    wanted = list(encoder.parameters())
    expected = gradients(encoder(torch.cat([c for c, _ in chunks], 1)[:, [0, 2, 3, 5]]), wanted)
    encoding = setfold.fold(encoder, lambda: iter(chunks))  # a list's tensors may not be written to
    for elements, _ in chunks:
        elements[:, 1] = torch.nan
    assert_alike(gradients(encoding, wanted), expected)


def test_a_stream_that_can_be_read_once():
    model, chunks = model_of(head=nn.Flatten()), [draw(1, 5, 3, seed=i) for i in range(3)]
    model.head.weight = nn.Parameter(draw(1))
    expected = model(torch.cat(chunks, 1))
    with pytest.raises(setfold.InputError) as refused:
        setfold.fold(model, iter(chunks))
    for way in ("a list", "no_grad", 'gradient="unbiased"', 'gradient="autograd"', "only once"):
        assert way in str(refused.value)
    with torch.no_grad():
        assert_alike([setfold.fold(model, iter(chunks))], [expected])
    model.requires_grad_(False)
    assert_alike([setfold.fold(model, iter(chunks))], [expected])
    model.head.requires_grad_()  # which only sees what was folded
    assert_alike([setfold.fold(model, iter(chunks))], [expected])


def test_second_derivatives_are_kept_or_raise():
    model, elements = deep_sets(nn.Tanh()), draw(1, 12, 3).requires_grad_()

    def penalty(encoding):
        (slope,) = torch.autograd.grad(encoding.pow(2).sum(), elements, create_graph=True)
        return torch.autograd.grad(slope.pow(2).sum(), list(model.parameters()))

    expected, chunks = penalty(model(elements)), elements.split(5, 1)
    assert all(g.abs().max() > 1e-3 for g in expected)
    assert_alike(penalty(setfold.fold(model, chunks, gradient="autograd")), expected)
    with pytest.raises(RuntimeError, match=r"second derivatives.*autograd"):
        penalty(setfold.fold(model, chunks))


# ---- what it works with ----------------------------------------------------------------------


def test_gradients_accumulate_over_folds_and_backward_passes():
    model, sets = model_of(["mean", "max"]), [draw(1, 20, 3, seed=i) for i in range(3)]
    wanted = list(model.parameters())
    expected = gradients(sum(model(s) for s in sets) + model(sets[0]), wanted)
    folds = [setfold.fold(model, s.split(6, 1)) for s in sets]
    weight = draw(*folds[0].shape, seed=5)
    (folds[0] * weight).sum().backward(retain_graph=True)
    for encoding in folds:
        (encoding * weight).sum().backward()
    assert_alike([p.grad for p in wanted], expected)


def test_one_loss_of_two_folds():
    model, left, right = model_of("max"), draw(2, 20, 3), draw(2, 11, 3, seed=1)
    wanted = list(model.parameters())
    expected = gradients(model(left) * model(right).tanh() + model(left).exp(), wanted)
    one, two = setfold.fold(model, left.split(7, 1)), setfold.fold(model, right.split(4, 1))
    assert_alike(gradients(one * two.tanh() + one.exp(), wanted), expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_without_gradients_every_way_is_the_whole_set(gradient, mode):
    for model in (model_of(), setfold.SetTransformer(3, 4, num_layers=1).double().eval()):
        elements = draw(2, 20, 3)
        with mode():
            found = setfold.fold(model, elements.split(3, 1), gradient=gradient)
            assert_alike([found], [model(elements)])
        assert not found.requires_grad


def test_weights_that_are_frozen_get_nothing_and_disturb_nobody():
    model = model_of(["mean", "max"], head=nn.Sequential(nn.Flatten(), nn.Linear(40, 2)))
    elements, named = draw(2, 20, 3), dict(model.named_parameters())
    expected = gradients(model(elements), list(named.values()))
    assert not setfold.fold(model.requires_grad_(False), elements.split(6, 1)).requires_grad
    for name, wanted in zip(named, expected, strict=True):
        model.requires_grad_(False).get_parameter(name).requires_grad_()
        assert_alike(gradients(setfold.fold(model, elements.split(6, 1)), [named[name]]), [wanted])


OPTIMISERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "fused": partial(torch.optim.Adam, lr=0.01, fused=True),
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_training_by_folds_is_training_on_whole_sets(name):
    sets, ends = [draw(2, 20, 3, seed=i) for i in range(5)], []
    for encode in (lambda m, s: m(s), lambda m, s: setfold.fold(m, s.split([9, 0, 1, 10], 1))):
        model = model_of(["weighted_mean", "max"]).train()
        start = [p.detach().clone() for p in model.parameters()]
        optimiser = OPTIMISERS[name](model.parameters())
        for number, elements in enumerate(sets):
            optimiser.zero_grad()
            torch.manual_seed(number)  # of the slots
            (encode(model, elements) - 1).pow(2).sum().backward()
            optimiser.step()
        assert all(not torch.equal(a, b) for a, b in zip(start, model.parameters(), strict=True))
        ends.append([p.detach() for p in model.parameters()])
    assert_close(ends[1], ends[0], rtol=1e-10, atol=1e-10)


class Watched(nn.Module):
    """Features that tell in what precision they came out."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.seen = []

    def forward(self, rows):
        made = self.linear(rows)
        self.seen.append(made.dtype)
        return made.tanh()


def test_autocast_is_in_the_replay_what_it_was_in_the_fold():
    watched, elements = Watched(), draw(2, 60, 3).float()
    model = model_of(features=watched).float()
    wanted = list(model.parameters())
    for folded, replayed in ((True, False), (False, True)):
        watched.seen.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=folded):
            found, expected = setfold.fold(model, elements.split(25, 1)), model(elements)
        with torch.autocast("cpu", torch.bfloat16, enabled=replayed):
            found = torch.autograd.grad(found.sum(), wanted)
        assert set(watched.seen) == {torch.bfloat16 if folded else torch.float32}
        assert len(watched.seen) == 7
        expected = torch.autograd.grad(expected.sum(), wanted)
        scale = max(float(e.abs().max()) for e in expected)
        assert_close(found, expected, rtol=0.05, atol=0.02 * scale)


def test_a_loss_that_is_scaled_is_scaled_back():
    steps = []
    for scale in (None, 1024.0):
        model, elements = model_of().float(), draw(2, 20, 3).float()
        optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        scaler.scale(setfold.fold(model, elements.split(6, 1)).pow(2).sum()).backward()
        scaler.step(optimiser)
        scaler.update()
        steps.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*steps, strict=True))  # by a power of two


class Checkpointed(nn.Module):
    def __init__(self, layers, **options):
        super().__init__()
        self.layers = layers
        self.options = options

    def forward(self, rows):
        if not torch.is_grad_enabled():
            return self.layers(rows)
        return checkpoint(self.layers, rows, **self.options)


def test_features_may_be_checkpointed():
    elements, found = draw(1, 20, 3), []
    for wrap in (lambda layers: layers, partial(Checkpointed, use_reentrant=False)):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 4))
        model = setfold.DeepSets(wrap(layers), 4, ["mean", "max"]).double().train()
        torch.manual_seed(1)
        found.append(gradients(setfold.fold(model, elements.split(6, 1)), [*model.parameters()]))
    assert_alike(found[1], found[0])


def test_a_checkpoint_that_cannot_is_not_passed_over():
    layers = Checkpointed(nn.Linear(3, 4), use_reentrant=True)
    model = setfold.DeepSets(layers, 4).double()
    chunks = [draw(1, 5, 3).requires_grad_(), draw(1, 4, 3).requires_grad_()]
    encoding = setfold.fold(model, chunks)
    with pytest.raises(RuntimeError, match="use_reentrant"):
        encoding.sum().backward()


def test_a_fold_that_is_forgotten_lets_go_of_its_chunks():
    chunks = [draw(1, 5, 3, seed=i) for i in range(3)]
    held, encoding = [weakref.ref(c) for c in chunks], setfold.fold(make(), chunks)
    encoding.sum().backward()
    del chunks, encoding
    gc.collect()
    assert all(ref() is None for ref in held)
