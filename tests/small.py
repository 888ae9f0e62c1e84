"""A small encoder, small inputs, and what it means to be the same: as a state, or as plain loops."""

from __future__ import annotations

import numpy as np
import torch
from torch.testing import assert_close

import setfold

TIGHT = {"rtol": 1e-12, "atol": 1e-12}
AGGREGATES = ("sum", "mean", "weighted_mean", "max", "min", ["mean", "max"])


def make(seed=0, **options):
    """A Slot Set Encoder (3 -> 4 slots of 6 -> 5) in float64 and evaluation mode."""
    torch.manual_seed(seed)
    return setfold.SlotSetEncoder(3, 4, 6, 5, **options).double().eval()


class Contextual(setfold.SlotSetEncoder):
    """One that could look at a context."""

    def featurize(self, elements, mask, context):
        return elements


def contextual():
    return Contextual(3, 4, 6, 5).double().eval()


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moved(module):
    """In float64 and evaluation mode, with weights that are not those of a new one."""
    with torch.no_grad():
        for number, parameter in enumerate(module.double().eval().parameters()):
            parameter.add_(0.2 * draw(*parameter.shape, seed=number))
    return module


def assert_same_state(found, expected):
    assert found.fields == expected.fields
    assert found.count.tolist() == expected.count.tolist()
    assert found.statistics.keys() == expected.statistics.keys()
    for name, parts in expected.statistics.items():
        assert_close(found.statistics[name], parts, **TIGHT)
    for slots, wanted in zip(found.frame, expected.frame, strict=True):
        assert torch.equal(slots, wanted)


def assert_loops_agree(encoder, loops, elements, mask=None, rtol=1e-11, atol=1e-12):
    """Each set's encoding is what plain loops make of its elements; that of an empty one is zeros."""
    found = encoder(elements, mask).detach()
    for number, rows in enumerate(elements):
        rows = rows if mask is None else rows[mask[number]]
        expected = loops(rows) if len(rows) else np.zeros(found.shape[1:])
        np.testing.assert_allclose(found[number], expected, rtol=rtol, atol=atol)


def assert_layer_agrees(layer, loops, elements, mask=None, rtol=1e-11, atol=1e-12):
    """Each set's elements become what plain loops make of them; what is hidden becomes zeros."""
    found = layer(elements, mask).detach()
    mask = torch.ones(elements.shape[:2], dtype=torch.bool) if mask is None else mask
    assert not found[~mask].any()
    for shown, rows, made in zip(mask, elements, found, strict=True):
        if shown.any():
            np.testing.assert_allclose(made[shown], loops(rows[shown]), rtol=rtol, atol=atol)


def assert_compiles_and_exports(encoder):
    """Compiled and exported it gives what it gives, with a mask that leaves one set empty."""
    torch._dynamo.reset()
    elements, mask = draw(3, 12, 3), torch.arange(12) < torch.tensor([[12], [5], [0]])
    expected = encoder(elements, mask)
    compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager")
    assert_close(compiled(elements, mask), expected, **TIGHT)
    exported = torch.export.export(encoder, (elements, mask)).module()
    assert_close(exported(elements, mask), expected, **TIGHT)


def assert_ragged_is_dense(encoder, sets):
    """A shuffled ragged batch, whose set i has i elements, is what its sets are one by one."""
    rows, order = draw(sets * (sets - 1) // 2, 3), torch.Generator().manual_seed(0)
    index = torch.arange(sets).repeat_interleave(torch.arange(sets))
    shuffled = torch.randperm(len(index), generator=order)
    found = encoder(rows[shuffled], index=index[shuffled], batch_size=sets)
    for number in range(sets):
        alone = encoder(rows[index == number].unsqueeze(0))
        assert_close(found[number : number + 1], alone, **TIGHT)


def gradients(encoding, wanted, **options):
    """The gradients of one number made of the encoding; zeros where there is none."""
    if not encoding.requires_grad:
        return [torch.zeros_like(w) for w in wanted]
    loss = (encoding * draw(*encoding.shape, seed=5)).sum()
    found = torch.autograd.grad(loss, wanted, allow_unused=True, **options)
    return [torch.zeros_like(w) if g is None else g for g, w in zip(found, wanted, strict=True)]


def assert_alike(found, expected):
    scale = max([1.0, *(float(e.detach().abs().max()) for e in expected if e.numel())])
    assert_close(list(found), list(expected), rtol=1e-12, atol=1e-12 * scale)
