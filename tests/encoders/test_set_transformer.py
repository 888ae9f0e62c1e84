"""The Set Transformer's blocks against plain loops and PyTorch Geometric's, and what is their own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import setfold
from tests import memory, peers, reference
from tests.small import (
    TIGHT,
    assert_compiles_and_exports,
    assert_layer_agrees,
    assert_loops_agree,
    draw,
    moved,
)
from tests.strategies import DIM_IN, cases, seed_attentions, seeded, set_transformers

NORMS = pytest.mark.parametrize("layer_norm", [True, False], ids=["norms", "bare"])
MASKS = pytest.mark.parametrize("masked", [False, True], ids=["dense", "masked"])


def make(kind, *arguments, **options):
    torch.manual_seed(0)
    return moved(kind(*arguments, **options))


def some_hidden(length, sets=3):
    """Masks of which none hides a whole set."""
    return torch.arange(length) % torch.arange(1, sets + 1)[:, None] == 0


@st.composite
def blocks(draw, kind):
    seeded(draw)
    sizes = (draw(st.integers(1, 3)),) if kind is setfold.ISAB else ()
    heads, norms = draw(st.sampled_from([1, 3])), draw(st.booleans())
    return moved(kind(DIM_IN, *sizes, heads, norms))


@st.composite
def full_set_transformers(draw):
    seeded(draw)
    heads, layers, seeds = (draw(st.sampled_from([1, 2])) for _ in range(3))
    decoder, norms = draw(st.integers(0, 1)), draw(st.booleans())
    return setfold.FullSetTransformer(DIM_IN, 4, heads, layers, seeds, decoder, norms)


# ---- plain loops -------------------------------------------------------------------------------


@given(block=blocks(setfold.MAB), case=cases(), number=st.integers(1, 3), masked=st.booleans())
def test_mab_is_what_the_loops_say(block, case, number, masked):
    queries = draw(number, DIM_IN, seed=case.seed)

    def attend(elements, mask):
        return block(queries.expand(len(elements), -1, -1), elements, mask)

    if case.elements.shape[1] and (case.mask.any(1).all() or not masked):
        mask = case.mask if masked else None
        loops = lambda rows: reference.mab(block, queries.numpy(), rows.numpy())  # noqa: E731
        assert_loops_agree(attend, loops, case.elements, mask)


@pytest.mark.parametrize("kind", [setfold.SAB, setfold.ISAB])
def test_layers_are_what_the_loops_say(kind):
    loops = {setfold.SAB: reference.sab, setfold.ISAB: reference.isab}[kind]

    @given(layer=blocks(kind), case=cases(), masked=st.booleans())
    def holds(layer, case, masked):
        mask = case.mask if masked else None
        assert_layer_agrees(layer, lambda rows: loops(layer, rows), case.elements, mask)

    holds()


@pytest.mark.parametrize("kind", [setfold.SeedAttention, setfold.PMA])
def test_pools_are_what_the_loops_say(kind):
    loops = {setfold.SeedAttention: reference.seed_attention, setfold.PMA: reference.pma}[kind]

    @given(encoder=seed_attentions(kind), case=cases(), tracked=st.booleans(), masked=st.booleans())
    def holds(encoder, case, tracked, masked):
        encoder, mask = moved(encoder), case.mask if masked else None
        with torch.set_grad_enabled(tracked):
            assert_loops_agree(encoder, lambda rows: loops(encoder, rows), case.elements, mask)

    holds()


@settings(max_examples=30)
@given(
    encoder=st.one_of(set_transformers(), full_set_transformers()),
    case=cases(),
    masked=st.booleans(),
)
def test_the_whole_is_what_the_loops_say(encoder, case, masked):
    encoder, mask = moved(encoder), case.mask if masked else None
    loops = lambda rows: reference.set_transformer(encoder, rows)  # noqa: E731
    assert_loops_agree(encoder, loops, case.elements, mask, rtol=1e-10, atol=1e-11)


# ---- PyTorch Geometric and torch ---------------------------------------------------------------


@NORMS
@MASKS
def test_mab_is_pygs(layer_norm, masked):
    block = make(setfold.MAB, 6, 2, layer_norm)
    queries, elements = draw(3, 4, 6), draw(3, 10, 6, seed=1)
    mask = some_hidden(10) if masked else None
    expected = peers.mab(block)(queries, elements, y_mask=mask)
    assert_close(block(queries, elements, mask), expected, **TIGHT)


@NORMS
@MASKS
@pytest.mark.parametrize("kind", [setfold.SAB, setfold.ISAB])
def test_layers_are_pygs(kind, layer_norm, masked):
    sizes = () if kind is setfold.SAB else (4,)
    layer, theirs = make(kind, 6, *sizes, 2, layer_norm), {setfold.SAB: peers.sab}
    elements, mask = draw(3, 10, 6), some_hidden(10) if masked else None
    expected = theirs.get(kind, peers.isab)(layer)(elements, mask)
    found = layer(elements, mask)
    if masked:
        assert not found[~mask].any()
        found, expected = found[mask], expected[mask]
    assert_close(found, expected, **TIGHT)


@NORMS
@MASKS
def test_pma_is_pygs(layer_norm, masked):
    encoder = make(setfold.PMA, 6, 3, 2, layer_norm)
    elements, mask = draw(3, 10, 6), some_hidden(10) if masked else None
    assert_close(encoder(elements, mask), peers.pma(encoder)(elements, mask), **TIGHT)


@NORMS
@pytest.mark.parametrize("num_decoder_layers", [0, 2])
def test_the_full_set_transformer_is_pygs(layer_norm, num_decoder_layers):
    sizes = {"num_heads": 2, "num_layers": 2, "num_seeds": 3}
    encoder = make(
        setfold.FullSetTransformer,
        *(6, 6),
        **sizes,
        num_decoder_layers=num_decoder_layers,
        layer_norm=layer_norm,
        head=nn.Flatten(),
    )
    nn.init.eye_(encoder.features.weight)  # theirs begins with the elements themselves
    nn.init.zeros_(encoder.features.bias)
    rows, index = draw(14, 6), torch.tensor([0] * 3 + [1] * 10 + [3])
    expected = peers.set_transformer(encoder)(rows, index, dim_size=4)
    found = encoder(rows, index=index, batch_size=4)
    there = [0, 1, 3]
    assert_close(found[there], expected[there], **TIGHT)
    assert not found[2].any()  # theirs makes something of a set of which there is nothing


@NORMS
def test_gradients_are_those_of_pyg(layer_norm):
    encoder = make(setfold.PMA, 6, 3, 2, layer_norm)
    theirs, elements = peers.pma(encoder), draw(2, 10, 6).requires_grad_()
    slope = draw(2, 3, 6, seed=1)
    (theirs(elements) * slope).sum().backward()
    expected = elements.grad.clone(), theirs.seed.grad[0], theirs.lin.weight.grad
    elements.grad = None
    (encoder(elements) * slope).sum().backward()
    inner = encoder.encoder
    assert_close((elements.grad, inner.seeds.grad, encoder.features[0].weight.grad), expected)
    by_them, by_us = theirs.mab, inner.block
    assert_close(by_us.feed.weight.grad, by_them.lin.weight.grad, **TIGHT)
    projected = torch.cat(
        [getattr(by_us, f"to_{n}").weight.grad for n in ("query", "key", "value")]
    )
    assert_close(projected, by_them.attn.in_proj_weight.grad, rtol=1e-10, atol=1e-12)


@MASKS
def test_mabs_attention_is_torchs(masked):
    block = make(setfold.MAB, 6, 3, layer_norm=False)
    nn.init.zeros_(block.feed.weight)
    nn.init.constant_(block.feed.bias, -1)  # what the relu makes of it is nothing
    queries, elements = draw(3, 4, 6), draw(3, 10, 6, seed=1)
    mask = some_hidden(10) if masked else None
    hidden = ~mask if masked else None
    theirs = peers.multihead(block, 6, block.to_query)
    expected, _ = theirs(queries, elements, elements, key_padding_mask=hidden)
    assert_close(block(queries, elements, mask), queries + expected, **TIGHT)


# ---- equivariance and masks --------------------------------------------------------------------


@pytest.mark.parametrize("layer", [make(setfold.SAB, 4, 2), make(setfold.ISAB, 4, 3, 2)])
def test_padding_may_hold_anything_and_leaves_no_trace_in_gradients(layer):
    elements, mask = draw(3, 5, 4), torch.tensor([[1, 1, 0, 1, 0], [0] * 5, [1] * 5]).bool()
    found = []
    for padding in (0.0, torch.nan):
        layer.zero_grad()
        leaf = elements.masked_fill(~mask.unsqueeze(-1), padding).requires_grad_()
        layer(leaf, mask).square().sum().backward()
        found.append([leaf.grad, *(p.grad for p in layer.parameters())])
    assert_close(found[1], found[0], **TIGHT)
    assert not found[1][0][~mask].any()
    assert all(gradient.isfinite().all() for gradient in found[1])


def test_mab_does_not_see_what_is_hidden():
    block, queries, elements = make(setfold.MAB, 4, 2), draw(2, 3, 4), draw(2, 5, 4)
    mask = torch.tensor([[1, 1, 0, 1, 0], [1] * 5]).bool()
    hidden = elements.masked_fill(~mask.unsqueeze(-1), torch.nan)
    found = block(queries, hidden, mask)
    assert_close(found[:1], block(queries[:1], elements[:1, mask[0]]), **TIGHT)


# ---- memory ------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Notes the most numbers that any tensor holds; what a kernel does inside, it does not see."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        stored = [t.untyped_storage().nbytes() // t.element_size() for t in tensors]
        self.numbers = max([self.numbers, *stored])
        return made


def largest(encoder, elements, mask, tracked):
    with torch.set_grad_enabled(tracked), Largest() as seen:
        encoding = encoder(elements, mask)
        if tracked:
            encoding.sum().backward()
    return seen.numbers


@MASKS
@pytest.mark.parametrize("tracked", [False, True])
def test_no_tensor_has_a_number_for_every_pair(tracked, masked):
    length = 2000
    encoder = setfold.FullSetTransformer(3, 8, num_heads=2, num_layers=1)
    elements, mask = torch.randn(1, length, 3), some_hidden(length, 2)[1:] if masked else None
    assert largest(encoder, elements, mask, tracked) < 20 * length
    with sdpa_kernel(SDPBackend.MATH):  # the textbook's way, which this test would notice
        assert largest(encoder, elements, mask, tracked) >= length**2


ATTEND = """
encoder = setfold.FullSetTransformer(3, 16, num_heads=4, num_layers=1)

def step(length):
    mask = torch.rand(1, length) < 0.7
    encoder(torch.randn(1, length, 3), mask).sum().backward()
"""


@memory.linux_only
def test_nor_does_the_kernel_under_a_mask():
    assert memory.peak(ATTEND, 4000) < 100e6  # 7 MB; at least 256 MB for every pair and head


# ---- precision, programs and complaints --------------------------------------------------------


@NORMS
@pytest.mark.parametrize("kind", [setfold.SetTransformer, setfold.FullSetTransformer])
def test_autocast_rounds_and_does_not_refuse(kind, layer_norm):
    encoder = make(kind, 3, 8, num_heads=2, layer_norm=layer_norm).float()
    elements = draw(2, 10, 3).float()
    with torch.autocast("cpu", torch.bfloat16):
        found = encoder(elements)
    assert found.dtype == torch.float32
    assert_close(found, encoder(elements), rtol=0.1, atol=0.1)
    found.sum().backward()
    assert all(p.grad.isfinite().all() for p in encoder.parameters())


def test_compiled_and_exported_forwards_agree():
    assert_compiles_and_exports(make(setfold.FullSetTransformer, 3, 4, num_heads=2, num_layers=1))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: setfold.MAB(8, 3), "num_heads must divide dim=8; got 3"),
        (lambda: setfold.SAB(8, 0), "num_heads must be an integer of at least 1"),
        (lambda: setfold.ISAB(8, 0, 2), "num_inducing must be an integer of at least 1"),
        (lambda: setfold.PMA(8, 0), "num_seeds must be an integer of at least 1"),
        (
            lambda: setfold.SetTransformer(3, 8, num_layers=0),
            "num_layers must be an integer of at least 1",
        ),
        (lambda: setfold.FullSetTransformer(0, 8), "dim_in must be an integer of at least 1"),
    ],
)
def test_bad_settings_say_what_is_allowed(build, message):
    with pytest.raises(setfold.InputError, match=message):
        build()
