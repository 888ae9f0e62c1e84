"""What a replay takes for granted, and what happens where it may not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import dropout
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import setfold
from setfold.core import absorb as absorbing
from setfold.kernels import sums
from tests.small import TIGHT, assert_alike, draw, gradients, make

CHANGES = {
    "negated": torch.neg,
    "turned round": lambda chunk: chunk.flip(-1),
    "columns exchanged": lambda chunk: chunk[..., [1, 0, 2]],
    "doubled": lambda chunk: 2 * chunk,
}


def on_features(*layers, width=3, aggregate="sum"):
    torch.manual_seed(0)
    return setfold.DeepSets(nn.Sequential(nn.Linear(3, width), *layers), width, aggregate).double()


def changing(change, chunks=4):
    """A stream whose chunks are changed whenever it is opened again."""
    opened = []

    def stream():
        opened.append(1)
        for number in range(chunks):
            chunk = draw(1, 512, 3, seed=number)
            yield chunk if len(opened) == 1 else change(chunk)

    return stream


# ---- the elements --------------------------------------------------------------------------------


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("aggregate", ["mean", "max", "weighted_mean"])
def test_elements_that_all_change_alike_are_noticed(aggregate, change):
    """Sums of bits may not tell: half of them cancel, or nothing but their order changes."""
    encoding = setfold.fold(make(aggregate=aggregate), changing(change))
    with pytest.raises(setfold.InputError, match="has changed since it was first read"):
        encoding.sum().backward()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("aggregate", ["mean", "max"])
def test_tensors_of_a_list_that_are_written_to_are_noticed(aggregate, change):
    encoder, chunks = make(aggregate=aggregate), list(draw(1, 60, 3).split(20, 1))
    encoding = setfold.fold(encoder, chunks)
    chunks[2].copy_(change(chunks[2]).clone())
    with pytest.raises(setfold.InputError, match="has changed since it was first read"):
        encoding.sum().backward()


@pytest.mark.parametrize("aggregate", ["mean", "max"])
def test_later_elements_that_change_alike_are_noticed(aggregate):
    chunks = [draw(1, 512, 3, seed=number) for number in range(4)]
    turns = iter([chunks, [chunks[0], *(-chunk for chunk in chunks[1:])]])
    encoding = setfold.fold(make(aggregate=aggregate), lambda: next(turns))
    with pytest.raises(setfold.InputError, match="has changed since it was first read"):
        encoding.sum().backward()


def test_tensors_of_a_list_that_are_replaced_are_noticed():
    encoder, chunks = make(), [draw(1, 20, 3, seed=number) for number in range(3)]
    encoding = setfold.fold(encoder, chunks)
    chunks[1] = -chunks[1]
    with pytest.raises(setfold.InputError, match="has changed since it was first read"):
        encoding.sum().backward()


KINDS = {"one-hot": torch.eye(3), "signs": 1 - 2 * torch.eye(3)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("aggregate", ["mean", "max", ["min", "sum"]], ids=str)
def test_chunks_of_few_different_numbers_are_told_apart(aggregate, kind):
    """They hold the same numbers in another order."""
    draws = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, (1, 6), generator=draws) for _ in range(5)]
    chunks = [KINDS[kind].double()[row] for row in rows]
    turns = iter([chunks, [chunks[0], *reversed(chunks[1:])]])
    encoding = setfold.fold(make(aggregate=aggregate), lambda: next(turns))
    with pytest.raises(setfold.InputError, match="chunk 1 has changed"):
        encoding.sum().backward()


@pytest.mark.parametrize("name", ["SetTransformer", "SlotAttention"])
@pytest.mark.parametrize("grad", [True, False])
def test_shuffled_chunks_raise_in_the_second_pass(name, grad):
    torch.manual_seed(0)
    kinds = {
        "SetTransformer": lambda: setfold.SetTransformer(3, 8, num_heads=2, num_inducing=3),
        "SlotAttention": lambda: setfold.SlotAttention(3, num_slots=3, dim=6, dim_hidden=7),
    }
    model, elements = kinds[name]().double().eval(), draw(1, 60, 3)
    loader = DataLoader(list(elements.split(7, 1)), batch_size=None, shuffle=True)
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(setfold.InputError, match=r"has changed.*shuffle=False"),
    ):
        setfold.fold(model, loader)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("grad", [True, False])
def test_changes_between_passes_are_noticed(change, grad):
    model = setfold.SetTransformer(3, 4, 2, 2).double()
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(setfold.InputError, match="has changed since it was first read"),
    ):
        setfold.fold(model, changing(change))


@pytest.mark.parametrize("aggregate", ["mean", "max"])
def test_gradients_of_elements_are_not_given_to_others(aggregate):
    """The same elements in another order are the same set, but not the same places."""
    chunks = [draw(1, 5, 3, seed=number).requires_grad_() for number in range(2)]
    turns = iter([chunks, [chunk.flip(1) for chunk in chunks]])
    encoding = setfold.fold(make(aggregate=aggregate), lambda: next(turns))
    with pytest.raises(setfold.InputError, match="chunk 0 has changed since it was first read"):
        encoding.sum().backward()


@pytest.mark.parametrize("gradient", ["unbiased", "autograd"])
def test_a_shuffling_loader_may_be_read_once(gradient):
    torch.manual_seed(0)
    model, rows = on_features(nn.Tanh(), aggregate="mean"), draw(100, 3)
    wanted = list(model.parameters())
    loader = DataLoader(TensorDataset(rows), batch_size=7, shuffle=True)
    encoding = setfold.fold(model, loader, batch_size=1, gradient=gradient, samples=100)
    assert_close(encoding, model(rows[None]), **TIGHT)
    assert_close(gradients(encoding, wanted), gradients(model(rows[None]), wanted), **TIGHT)


@pytest.mark.parametrize("layer", [nn.Tanh(), nn.Dropout(0.5)], ids=["tanh", "dropout"])
@pytest.mark.parametrize("aggregate", ["mean", "max"])
def test_a_shuffling_loader_raises_in_the_backward_pass(aggregate, layer):
    model = on_features(layer, aggregate=aggregate).train()
    loader = DataLoader(TensorDataset(draw(100, 3)), batch_size=7, shuffle=True)
    encoding = setfold.fold(model, loader, batch_size=1)
    with pytest.raises(setfold.InputError, match=r"has changed.*shuffling"):
        encoding.sum().backward()


# ---- what the elements meet ----------------------------------------------------------------------


class Inner(nn.Module):
    """An encoder as a feature: each element is a set of its own."""

    def __init__(self):
        super().__init__()
        self.encoder = setfold.SlotSetEncoder(3, 4, 5, 2, slots="learned")

    def forward(self, rows):
        return self.encoder(rows).flatten(1).tanh()


def test_sums_inside_features_are_made():
    torch.manual_seed(0)
    outer = setfold.SlotSetEncoder(8, 4, 5, 6)
    model = setfold.Composition(outer, Inner()).double().eval()
    elements = draw(1, 90, 150, 3)  # many inner elements, so that they are summed tile by tile
    wanted = list(model.parameters())
    found = gradients(setfold.fold(model, elements.split(30, 1)), wanted)
    assert_close(found, gradients(model(elements), wanted), **TIGHT)


@pytest.mark.parametrize("ragged", [False, True])
def test_what_is_dropped_of_a_large_chunk_is_dropped_again(monkeypatch, ragged):
    """Features see a large chunk in pieces, and draw for one piece after the other."""
    monkeypatch.setattr(absorbing, "FEATURE_ROWS", 16)
    layers = nn.Dropout(0.5), nn.Linear(3, 3, bias=False), nn.Dropout(0.5)
    model = on_features(*layers).train()
    pieces = [torch.ones(2, 40, 3, dtype=torch.float64) for _ in range(2)]
    if ragged:
        index = torch.arange(2).repeat(40)
        pieces = [(piece.reshape(-1, 3), index) for piece in pieces]
    encoding = setfold.fold(model, pieces, batch_size=2 if ragged else None)
    (weight,) = torch.autograd.grad(encoding.sum(), model.features[2].weight)
    assert_close((weight * model.features[2].weight).sum(), encoding.sum(), **TIGHT)  # it is linear


class DropsAlways(nn.Module):
    def forward(self, rows):
        return dropout(rows, 0.5, training=True)


def test_what_is_drawn_in_evaluation_is_drawn_again():
    model = on_features(DropsAlways()).eval()
    chunks = [torch.ones(1, 50, 3, dtype=torch.float64) for _ in range(3)]
    encoding = setfold.fold(model, chunks)
    (bias, weight) = torch.autograd.grad(encoding.sum(), [*model.features[0].parameters()][::-1])
    linear = model.features[0]
    assert_close((bias * linear.bias).sum() + (weight * linear.weight).sum(), encoding.sum())
    assert not torch.equal(setfold.fold(model, chunks), setfold.fold(model, chunks))


class DrawsElsewhere(nn.Module):
    def forward(self, rows):
        return rows * torch.from_numpy(np.random.default_rng().integers(2, size=rows.shape))


def test_what_is_drawn_elsewhere_is_noticed():
    model = on_features(DrawsElsewhere())
    with pytest.raises(setfold.InputError, match="computed other statistics than the fold"):
        setfold.fold(model, list(draw(1, 60, 3).split(20, 1))).sum().backward()


class DrawsLater(nn.Module):
    """Is another one for chunks of three elements."""

    def forward(self, rows):
        return rows * (np.random.default_rng().random() if len(rows) == 3 else 1.0)


def test_what_is_drawn_for_a_later_chunk_is_noticed():
    model = on_features(DrawsLater())
    with pytest.raises(setfold.InputError, match="computed other statistics than the fold"):
        setfold.fold(model, list(draw(1, 13, 3).split(5, 1))).sum().backward()


def test_weights_that_are_cached_are_refused():
    model = on_features(nn.Tanh())
    nn.utils.parametrizations.weight_norm(model.features[0])
    chunks = list(draw(1, 13, 3).split(5, 1))
    with nn.utils.parametrize.cached():
        with pytest.raises(setfold.InputError, match="cached"):
            setfold.fold(model, chunks)
        setfold.fold(model, chunks, gradient="autograd").sum().backward()
    model.zero_grad()
    setfold.fold(model, chunks).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_setting_that_was_changed_is_noticed():
    model = on_features(nn.LeakyReLU(0.1))
    encoding = setfold.fold(model, list(draw(1, 60, 3).split(20, 1)))
    model.features[1].negative_slope = 0.9
    with pytest.raises(setfold.StateMismatchError, match="changed between the fold and its back"):
        encoding.sum().backward()


class Conditioned(nn.Module):
    def __init__(self, condition):
        super().__init__()
        self.linear = nn.Linear(3, 3).double()
        self.condition = condition

    def forward(self, rows):
        return self.linear(rows).tanh() * self.condition


@pytest.mark.parametrize("leaf", [True, False])
def test_a_tensor_that_requires_gradients_and_is_no_parameter_raises(leaf):
    condition = draw(3).requires_grad_()
    model = setfold.DeepSets(Conditioned(condition if leaf else condition.exp()), 3)
    chunks = list(draw(1, 20, 3).split(5, 1))
    with pytest.raises(
        setfold.InputError, match=r"tensor \(3,\).*not one of its parameters.*autograd"
    ):
        setfold.fold(model, chunks).sum().backward()
    setfold.fold(model, chunks, gradient="autograd").sum().backward()
    assert condition.grad.abs().max() > 0


def test_hooks_on_gradients_see_the_sum_over_all_chunks():
    model, elements = on_features(nn.Tanh()), draw(1, 30, 3)
    weight, seen = model.features[0].weight, []
    (expected,) = gradients(model(elements), [weight])

    def halve(grad):
        seen.append(grad.clone())
        return grad / 2

    handle = weight.register_hook(halve)
    encoding = setfold.fold(model, elements.split(7, 1))
    (encoding * draw(*encoding.shape, seed=5)).sum().backward()
    assert_close(seen, [expected], **TIGHT)
    assert_close(weight.grad, expected / 2, **TIGHT)
    handle.remove()
    assert not weight._backward_hooks


class Prepares(setfold.Pool):
    """A pool whose elements are scaled by something that is derived from a weight beforehand."""

    def __init__(self, form):
        super().__init__(3, "sum")
        self.scale = nn.Parameter(draw(3))
        self.form = form

    def prepare(self, frame):
        return self.form(self.scale.exp())

    def absorb(self, elements, mask, prepared):
        (scale,) = prepared.values() if isinstance(prepared, dict) else prepared
        return super().absorb(elements * scale, mask, None)


FORMS = {"dict": lambda t: {"scale": t}, "list": lambda t: [t], "tuple": lambda t: (t,)}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_what_is_prepared_may_be_put_in_order(form):
    model, elements = Prepares(form), draw(2, 12, 3)
    found = gradients(setfold.fold(model, elements.split(4, 1)), [model.scale])
    assert_close(found, gradients(model(elements), [model.scale]), **TIGHT)


# ---- errors ------------------------------------------------------------------------------------


def test_second_derivatives_raise_and_are_not_left_out():
    model, chunks = on_features(nn.Tanh()), [draw(1, 5, 3).requires_grad_() for _ in range(2)]
    encoding = setfold.fold(model, chunks)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(encoding.sum(), chunks, create_graph=True)
    encoding = setfold.fold(model, chunks, gradient="autograd")
    slopes = torch.autograd.grad(encoding.sum(), chunks, create_graph=True)
    sum(slope.square().sum() for slope in slopes).backward()
    assert model.features[0].weight.grad.abs().max() > 0


@pytest.mark.parametrize("dim_out", [1, 5])  # sums of elements, sums of values
@pytest.mark.parametrize("aggregate", ["mean", "weighted_mean", ["sum", "max"]], ids=str)
def test_second_derivatives_of_large_sets_are_right_or_raise(aggregate, dim_out, monkeypatch):
    torch.manual_seed(0)
    encoder = setfold.SlotSetEncoder(3, 4, 6, dim_out, aggregate).double().eval()
    elements = draw(1, 5000, 3).requires_grad_()

    def second():
        (slope,) = gradients(encoder(elements).square(), [elements], create_graph=True)
        return gradients(slope.square(), [elements, *encoder.parameters()])

    try:
        found = second()
    except RuntimeError as error:
        if "second derivatives" not in str(error):
            raise
        return
    monkeypatch.setattr(sums, "PLAIN_ROWS", 10_000)
    assert_alike(found, second())


def test_batch_norm_without_running_statistics_is_refused_in_evaluation_too():
    model = on_features(nn.BatchNorm1d(3, track_running_stats=False)).eval()
    with pytest.raises(setfold.InputError, match="without running statistics"):
        setfold.fold(model, [draw(1, 5, 3)])


def test_lazy_layers_must_have_seen_something():
    model = setfold.DeepSets(nn.LazyLinear(3), 3)
    with pytest.raises(setfold.InputError, match="lazy"):
        setfold.fold(model, [torch.randn(1, 5, 4)])
    model(torch.randn(1, 5, 4))
    assert setfold.fold(model, [torch.randn(1, 5, 4)]).shape == (1, 3)


def test_of_a_compiled_model_the_encoder_is_folded():
    with pytest.raises(setfold.InputError, match=r"OptimizedModule.*encoder inside"):
        setfold.fold(torch.compile(make(), backend="eager"), [draw(1, 5, 3)])


def test_parameters_that_are_frozen_meanwhile_are_named():
    model = on_features(nn.Tanh())
    encoding = setfold.fold(model, list(draw(1, 20, 3).split(5, 1)))
    model.features[0].weight.requires_grad_(False)
    with pytest.raises(setfold.InputError, match="requires_grad was changed"):
        encoding.sum().backward()


def test_one_set_is_not_given_twice():
    with pytest.raises(setfold.InputError, match=r"rows \(N, d\).*Leave batch_size out"):
        setfold.fold(make(), [draw(1, 5, 3)], batch_size=1)
