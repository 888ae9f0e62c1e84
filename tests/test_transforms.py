"""Function transforms, forward-mode AD, compilers and replicas: the plain result, or advice."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap
from torch.testing import assert_close

import setfold
from tests.core.test_absorb import ENCODERS as STREAMING
from tests.core.test_whole import ENCODERS as WHOLE
from tests.core.test_whole import WRONG_WAYS
from tests.small import TIGHT, draw, moved

NEAR = {"rtol": 1e-8, "atol": 1e-9}
RELATIVE = {
    "slots, relative": lambda: setfold.SlotSetEncoder(
        3, 4, 6, 5, ["weighted_mean", "mass"], "learned", attention="softmax"
    )
}
ENCODERS = STREAMING | RELATIVE
SEVERAL = {n: b for n, b in WHOLE.items() if not isinstance(b(), WRONG_WAYS) and b().passes != 1}
LENGTHS = [9, 5000]  # below and above the size from which on gradients are recomputed

pytestmark = [
    pytest.mark.filterwarnings("ignore::setfold.CancelledAttentionWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # within torch.func.jvp
]


def built(name, recipes=ENCODERS):
    torch.manual_seed(0)
    return moved(recipes[name]())


def folded(model, elements, mask=None):
    """By the verbs; for encoders without states, the same as a call."""
    if not isinstance(model, setfold.StreamingSetEncoder):
        return model(elements, mask)
    return model.readout(model.update(model.initial_state(len(elements)), elements, mask=mask))


def some_hidden(shape):
    """A mask; the first set is hidden entirely."""
    mask = draw(*shape, seed=3) > 0
    mask[..., 0, :] = False
    mask[..., 1:, 0] = True
    return mask


def slope_of(encoding):
    return draw(*encoding.shape, seed=5)


# ---- torch.func --------------------------------------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ENCODERS | SEVERAL)
def test_vmap(name, length):
    if name in SEVERAL:
        length = min(length, 12)
    encoder, elements = built(name, ENCODERS | SEVERAL), draw(3, 2, length, 3)
    mask = some_hidden((3, 2, length))
    expected = torch.stack([encoder(some) for some in elements])
    masked = torch.stack([encoder(*some) for some in zip(elements, mask, strict=True)])
    for tracked in (True, False):
        with torch.set_grad_enabled(tracked):
            assert_close(vmap(encoder)(elements), expected, **TIGHT)
            if name != "pairs":  # whose number depends on the mask
                assert_close(vmap(encoder)(elements, mask), masked, **TIGHT)
            assert_close(vmap(lambda some: folded(encoder, some))(elements), expected, **TIGHT)
    assert_close(encoder(elements[0]), expected[0], **TIGHT)  # nothing of the transform is kept


# functional_call does not put back the weight of an activation that several layers share
@pytest.mark.parametrize("name", sorted((ENCODERS | SEVERAL).keys() - {"deep sets, mean"}))
def test_gradients_of_each_sample(name):
    encoder, elements = built(name, ENCODERS | SEVERAL), draw(3, 1, 9, 3)
    weights = {name: parameter.detach() for name, parameter in encoder.named_parameters()}
    slope = slope_of(encoder(elements[0]))

    def loss(weights, some):
        return (functional_call(encoder, weights, (some,)) * slope).sum()

    found = vmap(grad(loss, (0, 1)), (None, 0))(weights, elements)
    for number, one in enumerate(elements):
        leaf = one.clone().requires_grad_()
        wanted = [leaf, *encoder.parameters()]
        total = (encoder(leaf) * slope).sum()
        of_leaf, *expected = torch.autograd.grad(total, wanted, allow_unused=True)
        assert_close(found[1][number], of_leaf, **NEAR)
        for path, gradient in zip(weights, expected, strict=True):
            gradient = torch.zeros_like(weights[path]) if gradient is None else gradient
            assert_close(found[0][path][number], gradient, **NEAR)


def tangent(encoder, elements, direction, mask):
    """The directional derivative by reverse mode, as one number."""
    leaf = elements.clone().requires_grad_()
    encoding = encoder(leaf, mask)
    (gradient,) = torch.autograd.grad((encoding * slope_of(encoding)).sum(), leaf)
    return (gradient * direction).sum()


def dual(function, elements, direction):
    with forward_ad.dual_level():
        encoding = function(forward_ad.make_dual(elements, direction))
        return forward_ad.unpack_dual(encoding)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ENCODERS | SEVERAL)
def test_forward_mode(name, length):
    if name in SEVERAL:
        length = min(length, 12)
    encoder = built(name, ENCODERS | SEVERAL)
    elements, direction = draw(2, length, 3), draw(2, length, 3, seed=9)
    for mask in (None, some_hidden((2, length))):
        expected = tangent(encoder, elements, direction, mask)
        for use in (partial(encoder, mask=mask), partial(folded, encoder, mask=mask)):
            _, of_function = jvp(use, (elements,), (direction,))
            assert_close((of_function * slope_of(of_function)).sum(), expected, **NEAR)
            for context in (nullcontext(), torch.no_grad()):
                with context:
                    encoding, found = dual(use, elements, direction)
                assert_close((found * slope_of(found)).sum(), expected, **NEAR)
                assert_close(encoding, encoder(elements, mask), **TIGHT)


@pytest.mark.parametrize("name", ENCODERS)
def test_forward_mode_of_ragged_rows(name):
    encoder, rows, direction = built(name), draw(12, 3), draw(12, 3, seed=9)
    index = torch.tensor([0, 2, 2, 0, 0, 2, 0, 2, 2, 0, 2, 2])

    def use(given):
        return encoder(given, index=index, batch_size=3)

    leaf = rows.clone().requires_grad_()
    slope = slope_of(use(rows))
    (gradient,) = torch.autograd.grad((use(leaf) * slope).sum(), leaf)
    assert_close(grad(lambda given: (use(given) * slope).sum())(rows), gradient, **NEAR)
    for context in (nullcontext(), torch.no_grad()):
        with context:
            _, found = dual(use, rows, direction)
        assert_close((found * slope).sum(), (gradient * direction).sum(), **NEAR)


@pytest.mark.parametrize("name", ENCODERS | SEVERAL)
def test_ragged_rows_are_not_for_vmap(name):
    encoder = built(name, ENCODERS | SEVERAL)
    index = torch.tensor([0, 1, 1, 0])
    with pytest.raises(setfold.InputError, match=r"vmap.*pass a mask"):
        vmap(lambda rows: encoder(rows, index=index, batch_size=2))(draw(3, 4, 3))


@pytest.mark.parametrize("name", ENCODERS)
def test_weights_that_are_passed_in_are_used_and_not_kept(name):
    encoder, elements = built(name), draw(2, 9, 3)
    weights = {name: 1.5 * parameter.detach() for name, parameter in encoder.named_parameters()}
    other = copy.deepcopy(encoder)
    other.load_state_dict(other.state_dict() | weights)
    for tracked in (True, False):
        with torch.set_grad_enabled(tracked):
            before = encoder(elements)
            assert_close(functional_call(encoder, weights, (elements,)), other(elements), **TIGHT)
            assert_close(encoder(elements), before, **TIGHT)


@pytest.mark.parametrize("gradient", ["exact", "unbiased"])
def test_chunks_are_not_read_again_by_a_transform(gradient):
    encoder, elements = built("slots, mean"), draw(1, 9, 3)
    chunks = elements.split(3, 1)

    def loss(first, way):
        return setfold.fold(encoder, [first, *chunks[1:]], gradient=way).square().sum()

    with pytest.raises(setfold.InputError, match='gradient="autograd"'):
        grad(loss)(chunks[0], gradient)
    with pytest.raises(setfold.InputError, match='gradient="autograd"'):
        jvp(lambda first: loss(first, gradient), (chunks[0],), (chunks[1],))
    leaf = elements.clone().requires_grad_()
    encoder(leaf).square().sum().backward()
    assert_close(grad(loss)(chunks[0], "autograd"), leaf.grad[:, :3], **NEAR)


# ---- compilers and tracers ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ENCODERS)
def test_compiled_and_exported_programs(name):
    torch._dynamo.reset()
    encoder, elements, mask = built(name), draw(3, 9, 3), some_hidden((3, 9)).clone()
    expected = encoder(elements, mask)
    compiled = torch.compile(encoder, fullgraph=True, backend="eager")
    assert_close(compiled(elements, mask), expected, **TIGHT)
    exported = torch.export.export(encoder, (elements, mask)).module()
    assert_close(exported(elements, mask), expected, **TIGHT)


def test_compiled_ragged_rows():
    torch._dynamo.reset()
    encoder, rows, index = built("slots, mean"), draw(12, 3), torch.arange(12) % 3
    compiled = torch.compile(encoder, backend="eager")
    with torch.no_grad():
        expected = encoder(rows, index=index, batch_size=3)
        assert_close(compiled(rows, index=index, batch_size=3), expected, **TIGHT)


def test_a_state_of_a_transform_does_not_know_its_weights():
    encoder, states = built("slots, mean"), []

    def keep(elements):
        states.append(encoder.update(encoder.initial_state(1), elements))
        return encoder.readout(states[-1])

    jvp(keep, (draw(1, 4, 3),), (draw(1, 4, 3),))
    with pytest.raises(setfold.StateMismatchError, match=r"transform of torch\.func"):
        states[0].merge(encoder.initial_state(1))
    known = encoder.update(encoder.initial_state(1), draw(1, 4, 3))
    weights = {name: 2 * parameter.detach() for name, parameter in encoder.named_parameters()}

    def other(weights):
        def use(elements):
            return encoder.readout(encoder.update(known, elements))

        return functional_call(
            _Calls(encoder, use), {f"encoder.{n}": w for n, w in weights.items()}, draw(1, 2, 3)
        )

    with pytest.raises(setfold.StateMismatchError):
        jvp(other, (weights,), (weights,))


class _Calls(nn.Module):
    """A module that calls a function, so that functional_call replaces the weights of another."""

    def __init__(self, encoder, function):
        super().__init__()
        self.encoder = encoder
        self.function = function

    def forward(self, elements):
        return self.function(elements)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", ENCODERS | SEVERAL)
def test_a_trace_is_refused(name):
    encoder = built(name, ENCODERS | SEVERAL)
    for tracked in (True, False):
        for sets in (1, 2):
            with (
                torch.set_grad_enabled(tracked),
                pytest.raises(setfold.InputError, match=r"torch\.export"),
            ):
                torch.jit.trace(encoder, (draw(sets, 9, 3),))


# ---- replicas ----------------------------------------------------------------------------------


def replica_of(module):
    """What nn.DataParallel makes of a module for each device; here on the same one."""
    found = module._replicate_for_data_parallel()
    found._former_parameters = {}
    for name, child in module._modules.items():
        if child is None:
            found._modules[name] = None
        else:
            setattr(found, name, replica_of(child))
    for name, parameter in module._parameters.items():
        if parameter is None:
            found._parameters[name] = None
        else:
            copied = parameter * 1  # not a leaf
            setattr(found, name, copied)
            found._former_parameters[name] = copied
    for name, buffer in module._buffers.items():
        found._buffers[name] = None if buffer is None else buffer.clone()
    return found


@pytest.mark.parametrize("name", ENCODERS | SEVERAL)
def test_replicas_encode_alike_and_train_the_original(name):
    encoder = built(name, ENCODERS | SEVERAL)
    elements, mask = draw(2, 9, 3), some_hidden((2, 9))
    wanted = list(encoder.parameters())
    expected = encoder(elements, mask)
    with torch.no_grad():
        encoder(elements)  # something is kept
        assert_close(replica_of(encoder)(elements, mask), expected, **TIGHT)
        assert_close(replica_of(encoder)(elements[:1]), encoder(elements[:1]), **TIGHT)
    found = replica_of(encoder)(elements, mask)
    assert_close(found, expected, **TIGHT)
    assert_close(folded(replica_of(encoder), elements, mask), expected, **TIGHT)
    if wanted:
        slope = slope_of(expected)
        by_both = [
            torch.autograd.grad((e * slope).sum(), wanted, allow_unused=True)
            for e in (found, expected)
        ]
        assert_close(*by_both, **NEAR)


def test_a_replica_knows_its_weights():
    encoder = built("attention")
    state = encoder.update(encoder.initial_state(1), draw(1, 4, 3))
    replica = replica_of(encoder)
    merged = state.merge(replica.update(replica.initial_state(1), draw(1, 3, 3)))
    assert int(merged.count) == 7
    with pytest.raises(setfold.InputError, match=r"float32.*float64"):
        replica(draw(1, 4, 3).float())
    other = replica_of(built("attention"))
    other.queries = other._former_parameters["queries"] = other.queries + 1
    with pytest.raises(setfold.StateMismatchError):
        other.update(state, draw(1, 4, 3))


def test_replicas_of_features_and_heads():
    model = setfold.Composition(
        built("slots, mean"), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.Flatten()
    )
    model = model.double().eval()
    assert_close(replica_of(model)(draw(2, 9, 3)), model(draw(2, 9, 3)), **TIGHT)


# ---- several gradients at once -----------------------------------------------------------------


def by_torch(encoding, elements, slopes):
    """As for torch.autograd.functional.jacobian(vectorize=True)."""
    (found,) = torch.autograd.grad(encoding, elements, slopes, is_grads_batched=True)
    return found


def by_vmap(encoding, elements, slopes):
    return vmap(lambda slope: torch.autograd.grad(encoding, elements, slope)[0])(slopes)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch's attention
@pytest.mark.parametrize("batched", [by_torch, by_vmap])
@pytest.mark.parametrize("length", [9, 300, 5000])
@pytest.mark.parametrize("name", ENCODERS)
def test_batches_of_gradients_are_each_of_them_alone(name, length, batched):
    """In float32, for which there are compiled kernels."""
    encoder = built(name).float().eval()
    elements = draw(1, length, 3).float().requires_grad_()
    encoding = encoder(elements)
    slopes = draw(2, *encoding.shape, seed=5).float()
    alone = [
        torch.autograd.grad(encoding, elements, slope, retain_graph=True)[0] for slope in slopes
    ]
    found = batched(encoding, elements, slopes)
    assert not found.requires_grad
    assert_close(found, torch.stack(alone), rtol=1e-3, atol=1e-5)
