from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import setfold
from setfold.folding.api import GRADIENTS
from tests.small import AGGREGATES, TIGHT, draw, make


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("aggregate", AGGREGATES, ids=str)
def test_fold_of_chunks_is_the_encoding_of_the_whole_set(aggregate, grad):
    encoder, elements = make(aggregate=aggregate), draw(2, 50, 3)
    with torch.set_grad_enabled(grad):
        for lengths in ([50], [1] * 50, [0, 20, 0, 29, 1]):
            found = setfold.fold(encoder, elements.split(lengths, 1))
            assert_close(found, encoder(elements), **TIGHT)


def test_fold_takes_any_streaming_model():
    torch.manual_seed(0)
    model = setfold.DeepSets(nn.Linear(3, 4), 4, head=nn.Linear(4, 2)).double()
    chunks = [draw(2, 5, 3, seed=i) for i in range(3)]
    assert_close(setfold.fold(model, chunks), model(torch.cat(chunks, 1)), **TIGHT)


def test_fold_reads_a_stream_once_and_one_chunk_at_a_time():
    encoder, alive = make(), []

    def stream():
        for seed in range(5):
            chunk = draw(1, 4000, 3, seed=seed)
            alive.append(weakref.ref(chunk))
            yield chunk
            del chunk
            assert sum(ref() is not None for ref in alive) <= 1

    with torch.no_grad():
        found = setfold.fold(encoder, stream())
    whole = torch.cat([draw(1, 4000, 3, seed=seed) for seed in range(5)], 1)
    assert_close(found, encoder(whole), **TIGHT)
    assert len(alive) == 5


def test_fold_draws_the_slots_once():
    encoder, elements = make().train(), draw(1, 50, 3)
    torch.manual_seed(3)
    found = setfold.fold(encoder, elements.split(7, 1))
    torch.manual_seed(3)
    assert_close(found, encoder(elements), **TIGHT)


@pytest.mark.parametrize("aggregate", AGGREGATES, ids=str)
def test_gradients_of_a_fold_are_those_of_the_whole_set(aggregate):
    encoder, elements = make(aggregate=aggregate), draw(2, 20, 3).requires_grad_()
    wanted = [elements, *encoder.parameters()]

    def gradients(encoding):
        found = torch.autograd.grad(encoding.pow(2).sum(), wanted, allow_unused=True)
        return [torch.zeros(1) if g is None else g for g in found]

    expected = gradients(encoder(elements))
    assert expected[0].abs().max() > 1e-6
    assert_close(gradients(setfold.fold(encoder, elements.split(3, 1))), expected, **TIGHT)


@pytest.mark.parametrize("trained", ["slot_mean", "to_value.weight", "elements"])
@pytest.mark.parametrize("aggregate", ["max", ["mean", "min"]], ids=str)
def test_gradients_of_a_fold_of_which_little_is_trained(aggregate, trained):
    encoder, elements = make(aggregate=aggregate).requires_grad_(False), draw(2, 20, 3)
    wanted = elements if trained == "elements" else encoder.get_parameter(trained)
    wanted.requires_grad_()

    def gradient(encoding):
        return torch.autograd.grad(encoding.pow(2).sum(), wanted)[0]

    expected = gradient(encoder(elements))
    assert expected.abs().max() > 1e-6
    assert_close(gradient(setfold.fold(encoder, elements.split(3, 1))), expected, **TIGHT)


def test_equal_elements_in_different_chunks_share_one_gradient():
    encoder, one = make(aggregate="max"), draw(1, 1, 3)
    wanted = list(encoder.to_value.parameters())
    once, twice = (
        torch.autograd.grad(setfold.fold(encoder, [one] * times).sum(), wanted) for times in (1, 2)
    )
    assert_close(twice, once, **TIGHT)


class Noisy(nn.Module):
    """Dropout that no one can see from outside."""

    def forward(self, rows):
        return nn.functional.dropout(rows, 0.5, self.training)


def test_layers_that_draw_draw_the_same_in_the_replay():
    torch.manual_seed(0)
    pool = setfold.Pool(3, "sum")
    model = setfold.Composition(pool, nn.Sequential(nn.Linear(3, 3), Noisy())).double().train()
    chunks = [torch.ones(1, 1, 3, dtype=torch.float64) for _ in range(50)]
    encoding = setfold.fold(model, chunks)
    (bias,) = torch.autograd.grad(encoding.sum(), model.features[0].bias)
    kept = (encoding[0] / model.features[0](chunks[0])[0, 0] / 2).detach()  # of 50, by feature
    assert 5 < kept.min() <= kept.max() < 45
    assert_close(bias, 2 * kept, **TIGHT)  # what was dropped is dropped in the backward pass too


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("chunks", [list, lambda: iter([])], ids=["list", "function"])
def test_fold_of_nothing_says_what_an_empty_set_is(chunks, gradient):
    with pytest.raises(setfold.InputError, match=r"at least one chunk.*initial_state\(1\)"):
        setfold.fold(make(), chunks() if chunks is list else chunks, gradient=gradient)


def test_chunks_of_other_sets_are_refused():
    with pytest.raises(setfold.InputError, match=r"got \(3, 5, 3\)"):
        setfold.fold(make(), [draw(2, 5, 3), draw(3, 5, 3)])


@pytest.mark.parametrize("chunk", [[[1.0, 2.0, 3.0]], 3, None], ids=["list", "number", "none"])
def test_chunks_that_are_no_tensors_are_refused(chunk):
    with pytest.raises(setfold.InputError, match="tensor"):
        setfold.fold(make(), [chunk])


# ---- what may happen between a fold and its backward pass -----------------------------------


def test_chunks_may_be_computed_by_a_network_that_is_trained():
    torch.manual_seed(0)
    encoder, network, elements = make(), nn.Linear(3, 3).double(), draw(2, 20, 3)
    wanted = [*network.parameters(), *encoder.parameters()]

    def gradients(encoding):
        return torch.autograd.grad(encoding.pow(2).sum(), wanted)

    expected = gradients(encoder(network(elements)))
    source = lambda: (network(chunk) for chunk in elements.split(6, 1))  # noqa: E731
    assert_close(gradients(setfold.fold(encoder, source)), expected, **TIGHT)


@pytest.mark.parametrize("wanting", [True, False])
def test_chunks_in_another_order_in_the_backward_pass_raise(wanting):
    chunks = [chunk.clone().requires_grad_(wanting) for chunk in draw(2, 20, 3).split(5, 1)]
    turns = iter([chunks, chunks[::-1]])
    encoding = setfold.fold(make(), lambda: next(turns))
    with pytest.raises(setfold.InputError, match=r"chunk 0 has changed.*shuffle=False"):
        encoding.pow(2).sum().backward()


@pytest.mark.parametrize("aggregate", ["mean", "max"])
def test_chunks_that_were_overwritten_are_noticed(aggregate):
    encoder, chunks = make(aggregate=aggregate), [draw(1, 5, 3, seed=i) for i in range(3)]
    encoding = setfold.fold(encoder, chunks)
    chunks[1].normal_()
    with pytest.raises(setfold.InputError, match="chunk 1 has changed since it was first read"):
        encoding.sum().backward()


def test_a_mode_that_was_switched_meanwhile_does_not_matter():
    torch.manual_seed(0)
    model = setfold.Composition(setfold.Pool(3, "sum"), nn.Sequential(nn.Linear(3, 3), Noisy()))
    chunks = [torch.ones(1, 20, 3)] * 2

    def gradient(switch):
        torch.manual_seed(1)
        encoding = setfold.fold(model.train(), chunks)
        if switch:
            model.eval()
        return torch.autograd.grad(encoding.sum(), model.features[0].bias)[0]

    assert torch.equal(gradient(switch=False), gradient(switch=True))
    assert not model.training


def test_a_step_before_the_backward_pass_is_named():
    encoder = make()
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    encoder(draw(1, 5, 3)).sum().backward()
    encoding = setfold.fold(encoder, [draw(1, 5, 3)] * 2)
    optimizer.step()
    with pytest.raises(setfold.StateMismatchError, match="before the optimizer's step"):
        encoding.sum().backward()


class Folds(nn.Module):
    def __init__(self, gradient="exact"):
        super().__init__()
        self.encoder = make()
        self.gradient = gradient

    def forward(self, chunks):
        return setfold.fold(self.encoder, chunks, gradient=self.gradient)


def test_weights_that_were_swapped_are_not_forgotten():
    module = Folds()
    other = {n: p.detach().clone().requires_grad_() for n, p in module.named_parameters()}
    chunks = [draw(1, 5, 3), draw(1, 4, 3)]
    encoding = torch.func.functional_call(module, other, (chunks,))
    with pytest.raises(setfold.InputError, match="functional_call"):
        encoding.sum().backward()
    module.gradient = "autograd"
    encoding = torch.func.functional_call(module, other, (chunks,))
    assert torch.autograd.grad(encoding.pow(2).sum(), other["encoder.to_key.weight"])[0].any()


def test_what_was_not_used_gets_no_gradient():
    encoder = setfold.AttentionPool(3, 2, 4).double()
    model = setfold.Composition(encoder, features=nn.ModuleList([nn.Linear(3, 3)])[0].double())
    unused = nn.Linear(2, 2).double()
    model.features.register_module("unused", unused)
    setfold.fold(model, [draw(1, 5, 3)]).sum().backward()
    assert model.features.weight.grad is not None
    assert unused.weight.grad is None


def test_an_empty_second_reading_is_named():
    stream = iter([draw(1, 5, 3).float()])
    with pytest.raises(setfold.InputError, match="1 chunks were read first, now 0"):
        setfold.fold(setfold.SetTransformer(3, 4).eval(), lambda: stream)


def test_what_can_be_iterated_over_is_not_called():
    chunks = nn.ParameterList([draw(1, 5, 3), draw(1, 4, 3)])
    assert setfold.fold(make(), chunks).shape[0] == 1


@pytest.mark.parametrize("aggregate", ["max", "min"])
def test_equal_elements_have_the_gradient_of_the_whole_set(aggregate):
    pool = setfold.Pool(1, aggregate)
    elements = torch.tensor([1.0, 1, 1, 0, 0]).reshape(1, 5, 1).requires_grad_()

    def gradient(encoding):
        return torch.autograd.grad(encoding.sum(), elements)[0]

    expected = gradient(pool(elements))
    assert expected.sum() == 1
    assert torch.equal(gradient(setfold.fold(pool, elements.split(1, 1))), expected)
    kept = setfold.fold(pool, elements.split(2, 1), gradient="autograd")
    assert torch.equal(gradient(kept), expected)
