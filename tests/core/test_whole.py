"""What every exported set encoder promises of whole sets, whether it folds or not."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import setfold
from setfold.kernels import ragged
from setfold.laws.wrong_way import ChunkAverage, PublishedSlotSetEncoder
from tests.small import TIGHT, draw, moved


def slot_set(dim_in=3, **options):
    return setfold.SlotSetEncoder(dim_in, 4, 6, 5, **options)


def features():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh())


def layered(**options):
    layers = [setfold.SetNorm(3), setfold.ISAB(3, 2, 1), setfold.EquivariantLayer(3, 4)]
    return setfold.LayeredSetEncoder(layers, setfold.Pool(4, ["mean", "max"]), **options)


# Small ones of every kind; what is exported and missing here fails a test.
ENCODERS = {
    "slots": slot_set,
    "slots, max": lambda: slot_set(aggregate=["max", "weighted_mean"], similarity="cosine"),
    "hierarchy": lambda: setfold.HierarchicalSlotSetEncoder([slot_set(), slot_set(5)]),
    "pool": lambda: setfold.Pool(3, ["sum", "mean", "max", "min"]),
    "moments": lambda: setfold.Moments(3),
    "covariance": lambda: setfold.Covariance(3),
    "statistics": lambda: setfold.SummaryStatistics(3),
    "deep sets": lambda: setfold.DeepSets(features(), 4, "max", nn.Linear(4, 2)),
    "composition": lambda: setfold.Composition(slot_set(4), features(), nn.Flatten()),
    "attention": lambda: setfold.AttentionPool(3, num_queries=2, dim_out=4, num_heads=2),
    "gated attention": lambda: setfold.GatedAttentionPool(3, dim_hidden=5, num_branches=2),
    "concat": lambda: setfold.Concat(
        {
            "max": setfold.Pool(3, "max"),
            "slots": slot_set(),
            "softmax": setfold.AttentionPool(3, 2, 4),
        }
    ),
    "placed slots": lambda: setfold.PlacedSlotEncoder(
        3, setfold.Grid((-2, -2), (2, 2), (3, 3)), aggregate=["sum", "density", "max"]
    ),
    "seeds": lambda: setfold.SeedAttention(3, num_seeds=2, num_heads=3),
    "pma": lambda: setfold.PMA(3, num_seeds=2, num_heads=1, layer_norm=False),
    "latents": lambda: setfold.ConstantMemoryEncoder(3, 4, 2, 3, num_heads=2),
    "isabs": lambda: setfold.SetTransformer(3, 4, 2, 2, num_layers=1, head=nn.Flatten()),
    "sabs": lambda: setfold.FullSetTransformer(3, 4, 2, num_layers=1, num_decoder_layers=1),
    "sabs, head": lambda: setfold.FullSetTransformer(3, 4, 2, 1, head=nn.Linear(4, 2)),
    "deep sets, max": lambda: setfold.EquivariantDeepSets(3, [4, 4], head=nn.Linear(4, 2)),
    "deep sets, mean": lambda: setfold.EquivariantDeepSets(
        3, (4, 5), "mean", False, ["mean", "min"], activation=nn.PReLU()
    ),
    "slot attention": lambda: setfold.SlotAttention(3, 3, 4, num_iterations=2, dim_hidden=5),
    "layers": layered,
    "sorting": lambda: setfold.FSPool(3, num_pieces=4),
    "pairs": lambda: setfold.JanossyPool(nn.Sequential(nn.Flatten(), nn.Linear(6, 2)), 3),
    "chunk average": lambda: ChunkAverage(setfold.FullSetTransformer(3, 4), 3),
    "published": lambda: PublishedSlotSetEncoder(slot_set(), "max", 3),
}
WRONG_WAYS = ChunkAverage, PublishedSlotSetEncoder  # not public; they cut the set by its order
COUNTS = [4, 0, 6, 1, 4]


def exported(*bases):
    kinds = [getattr(setfold, name) for name in setfold.__all__]
    found = {k for k in kinds if inspect.isclass(k) and issubclass(k, bases)}
    return {kind for kind in found if not inspect.isabstract(kind)}


@pytest.fixture(params=ENCODERS)
def encoder(request):
    torch.manual_seed(0)
    return moved(ENCODERS[request.param]())


def batch():
    """Elements (B, n, d) and a mask that shows some of them, in no order; one set is empty."""
    generator = torch.Generator().manual_seed(3)
    places = torch.rand(len(COUNTS), 8, generator=generator).argsort(1)
    return draw(len(COUNTS), 8, 3), places < torch.tensor(COUNTS)[:, None]


def one_by_one(encoder, elements, mask):
    """Each set encoded alone, with the elements that are shown and no others."""
    sets = zip(elements, mask, strict=True)
    return torch.cat([encoder(rows[shown].unsqueeze(0)) for rows, shown in sets])


def hidden(elements, mask):
    """Elements of which those that the mask hides are NaN."""
    return elements.masked_fill(~mask.unsqueeze(-1), torch.nan)


def test_every_exported_encoder_is_here():
    expected = exported(setfold.SetEncoder)
    assert not expected & set(WRONG_WAYS)
    assert {type(build()) for build in ENCODERS.values()} == expected | set(WRONG_WAYS)


# ---- the set -----------------------------------------------------------------------------------


def test_the_order_of_elements_does_not_matter(encoder):
    elements = draw(2, 8, 3)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    found, expected = encoder(elements[:, order]), encoder(elements)
    if isinstance(encoder, WRONG_WAYS):
        assert (found - expected).abs().max() > 1e-3
    else:
        assert_close(found, expected, **TIGHT)
    assert expected.abs().max() > 1e-3


def test_what_is_hidden_is_absent(encoder):
    elements, mask = batch()
    found = encoder(hidden(elements, mask), mask)
    assert_close(found, one_by_one(encoder, elements, mask), **TIGHT)


@pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
def test_ragged_is_dense(monkeypatch, encoder, padded):
    monkeypatch.setattr(ragged, "MAX_EXACT_LENGTHS", 1 if padded else 48)
    monkeypatch.setattr(ragged, "LADDER", 2.0)
    elements, mask = batch()
    index = torch.arange(len(COUNTS))[:, None].expand_as(mask)[mask]
    order = torch.randperm(len(index), generator=torch.Generator().manual_seed(2))
    rows, index = elements[mask][order], index[order]
    found = encoder(rows, index=index, batch_size=len(COUNTS))
    own = [rows[index == number].unsqueeze(0) for number in range(len(COUNTS))]
    assert_close(found, torch.cat([encoder(one) for one in own]), **TIGHT)


def test_a_set_is_encoded_alike_whoever_is_beside_it(encoder):
    elements = draw(3, 5, 3)
    alone = [encoder(one) for one in elements.split(1)]
    assert_close(encoder(elements), torch.cat(alone), **TIGHT)


# ---- small sets --------------------------------------------------------------------------------


def test_an_empty_set_is_zeros_before_any_head(encoder):
    found = encoder(draw(2, 0, 3))
    assert found.isfinite().all()
    nothing = torch.zeros(2, 4, dtype=torch.bool)
    assert torch.equal(encoder(draw(2, 4, 3), nothing), found)
    rows, index = draw(0, 3), torch.zeros(0, dtype=torch.long)
    assert torch.equal(encoder(rows, index=index, batch_size=2), found)
    head = getattr(encoder, "head", None)
    expected = head.bias if isinstance(head, nn.Linear) else torch.zeros_like(found)
    assert_close(found, expected.expand_as(found), **TIGHT)


def test_one_element_is_a_set(encoder):
    elements = draw(2, 1, 3)
    found = encoder(elements)
    assert found.isfinite().all()
    assert found.abs().max() > 0
    padded = torch.cat([torch.full_like(elements, torch.nan), elements], 1)
    assert_close(encoder(padded, torch.tensor([[False, True]] * 2)), found, **TIGHT)


def test_no_sets_are_no_encodings(encoder):
    shape = encoder(draw(1, 4, 3)).shape[1:]
    assert encoder(draw(0, 4, 3)).shape == (0, *shape)
    assert encoder(draw(0, 4, 3), torch.ones(0, 4, dtype=torch.bool)).shape == (0, *shape)
    rows, index = draw(0, 3), torch.zeros(0, dtype=torch.long)
    assert encoder(rows, index=index, batch_size=0).shape == (0, *shape)


# ---- gradients and precision -------------------------------------------------------------------


def gradients(encoding, wanted):
    slope = draw(*encoding.shape, seed=5)
    found = torch.autograd.grad((encoding * slope).sum(), wanted, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for g, w in zip(found, wanted, strict=True)]


def test_gradients_are_finite_and_those_of_what_is_shown(encoder):
    elements, mask = batch()
    leaf, padded = elements.requires_grad_(), hidden(elements.detach(), mask).requires_grad_()
    parameters = list(encoder.parameters())
    of_rows, *expected = gradients(one_by_one(encoder, leaf, mask), [leaf, *parameters])
    of_padded, *found = gradients(encoder(padded, mask), [padded, *parameters])
    assert all(gradient.isfinite().all() for gradient in (of_padded, *found))
    assert not of_padded[~mask].any()
    assert of_padded[mask].abs().max() > 1e-6
    assert_close([of_padded, *found], [of_rows, *expected], rtol=1e-10, atol=1e-11)


def test_gradients_of_sets_of_one_and_of_equal_elements_are_finite(encoder):
    for elements in (torch.ones(2, 1, 3), torch.ones(2, 5, 3), torch.zeros(2, 5, 3)):
        leaf = elements.double().requires_grad_()
        found = gradients(encoder(leaf), [leaf, *encoder.parameters()])
        assert all(gradient.isfinite().all() for gradient in found)


def test_single_precision_is_double_precision_rounded(encoder):
    elements, mask = batch()
    expected = encoder(elements, mask)
    found = encoder.float()(elements.float(), mask)
    assert found.dtype == torch.float32
    assert_close(found, expected.float(), rtol=1e-3, atol=1e-4)
    leaf = elements.float().requires_grad_()
    encoder(leaf, mask).square().sum().backward()
    assert leaf.grad.isfinite().all()


# ---- complaints --------------------------------------------------------------------------------


def test_elements_of_another_width_are_refused(encoder):
    if encoder.dim_in is not None:
        with pytest.raises(setfold.InputError, match=r"elements must be \(B, n, 3\)"):
            encoder(draw(2, 5, 4))
        with pytest.raises(setfold.InputError, match=r"elements must be \(N, 3\)"):
            encoder(draw(5, 4), index=torch.zeros(5, dtype=torch.long), batch_size=1)


def test_elements_of_another_dtype_are_refused(encoder):
    with pytest.raises(setfold.InputError, match=r"float32.*float64"):
        encoder(draw(2, 5, 3).float())
    with pytest.raises(setfold.InputError, match="floating point"):
        encoder(torch.ones(2, 5, 3, dtype=torch.long))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_elements_that_are_not_finite_are_refused(encoder, wrong):
    elements, mask = batch()
    place = tuple(mask.nonzero()[-1].tolist())
    elements[(*place, 1)] = wrong
    index = torch.arange(len(COUNTS)).repeat_interleave(8)
    with pytest.raises(setfold.NonFiniteError):
        encoder(elements)
    with pytest.raises(setfold.NonFiniteError):
        encoder(elements, mask)
    with pytest.raises(setfold.NonFiniteError):
        encoder(elements.flatten(0, 1), index=index, batch_size=len(COUNTS))


def test_masks_and_indices_that_do_not_fit_are_refused(encoder):
    elements, rows = draw(2, 5, 3), draw(5, 3)
    with pytest.raises(setfold.InputError, match=r"mask must be bool \(2, 5\)"):
        encoder(elements, torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(setfold.InputError, match="mask must be bool"):
        encoder(elements, torch.ones(2, 5))
    with pytest.raises(setfold.InputError, match=r"index must be in 0\.\.1"):
        encoder(rows, index=torch.full((5,), 2), batch_size=2)


# ---- copies ------------------------------------------------------------------------------------


def saved(encoder, folder):
    kind = type(encoder)
    allow = [f"{kind.__module__}.{kind.__name__}"] if kind in WRONG_WAYS else []
    setfold.save(encoder, folder / "encoder.safetensors")
    return setfold.load(folder / "encoder.safetensors", allow=allow)


def pickled(encoder, folder):
    return pickle.loads(pickle.dumps(encoder))


def torch_saved(encoder, folder):
    file = io.BytesIO()
    torch.save(encoder, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", [saved, pickled, torch_saved, lambda e, _: copy.deepcopy(e)])
def test_a_copy_encodes_alike_and_stands_alone(encoder, way, tmp_path):
    elements, mask = batch()
    expected = encoder(elements, mask)
    twin = way(encoder, tmp_path)
    assert torch.equal(twin(elements, mask), expected)
    assert str(twin) == str(encoder)
    assert len(list(twin.parameters())) == len(list(encoder.parameters()))
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.zero_()
    assert torch.equal(twin(elements, mask), expected)


# ---- layers: elements in, elements out ---------------------------------------------------------


class Subtract(nn.Module):
    """The simplest look."""

    def forward(self, elements, summary):
        return elements - summary.unsqueeze(1)


LAYERS = {
    "unit box": lambda: setfold.UnitBox(3),
    "sab": lambda: setfold.SAB(3, 1),
    "isab": lambda: setfold.ISAB(3, 2, 3, layer_norm=False),
    "norm of features": lambda: setfold.SetNorm(3),
    "norm of the set": lambda: setfold.SetNorm(3, over="set"),
    "max": lambda: setfold.EquivariantLayer(3, 4),
    "mean": lambda: setfold.EquivariantLayer(3, 4, "mean", shared=False, activation=nn.Identity()),
    "relative": lambda: setfold.RelativeLayer(3, center=[0], latest=[1]),
    "own": lambda: setfold.Layer(setfold.Pool(3, "min"), Subtract()),
}


@pytest.fixture(params=LAYERS)
def layer(request):
    torch.manual_seed(0)
    return moved(LAYERS[request.param]())


def test_every_exported_layer_is_here():
    assert {type(build()) for build in LAYERS.values()} == exported(setfold.Layer, setfold.SAB)


def test_the_order_of_elements_is_that_of_what_they_become(layer):
    elements, mask = batch()
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    assert_close(layer(elements[:, order]), layer(elements)[:, order], **TIGHT)
    found = layer(elements[:, order], mask[:, order])
    assert_close(found, layer(elements, mask)[:, order], **TIGHT)
    assert layer(elements).std(1).min() > 1e-3


def test_what_is_hidden_from_a_layer_is_absent(layer):
    elements, mask = batch()
    found = layer(hidden(elements, mask), mask)
    assert not found[~mask].any()
    for rows, shown, made in zip(elements, mask, found, strict=True):
        assert_close(made[shown].unsqueeze(0), layer(rows[shown].unsqueeze(0)), **TIGHT)


def test_gradients_of_a_layer_are_those_of_what_is_shown(layer):
    elements, mask = batch()
    padded, leaf = hidden(elements, mask).requires_grad_(), elements.clone().requires_grad_()
    parameters = list(layer.parameters())
    rows = [layer(r[shown].unsqueeze(0))[0] for r, shown in zip(leaf, mask, strict=True)]
    expected = gradients(torch.cat(rows), [leaf, *parameters])
    found = gradients(layer(padded, mask)[mask], [padded, *parameters])
    assert_close(found, expected, rtol=1e-10, atol=1e-11)


def test_a_layer_makes_nothing_of_nothing(layer):
    width = layer(draw(2, 4, 3)).shape[-1]
    assert layer(draw(2, 0, 3)).shape == (2, 0, width)
    assert layer(draw(0, 4, 3)).shape == (0, 4, width)


class Total(setfold.WholeSetEncoder):
    """Relies on it that what is hidden is zero."""

    dim_in = 1

    def encode(self, elements, mask):
        return elements.sum(1)


def test_padding_of_ragged_batches_is_zero_too():
    lengths = torch.arange(3, 183, 3)  # more lengths than are kept apart
    index = torch.arange(len(lengths)).repeat_interleave(lengths)
    found = Total()(torch.ones(len(index), 1), index=index, batch_size=len(lengths))
    assert torch.equal(found.squeeze(1), lengths.float())


def test_a_layer_of_nothing_under_a_mask_is_nothing():
    layer = setfold.ISAB(4, 2, 2)
    assert layer(torch.randn(2, 0, 4), torch.ones(2, 0, dtype=torch.bool)).shape == (2, 0, 4)


@pytest.mark.parametrize("name", ["slots", "attention", "gated attention", "pma", "isabs", "sabs"])
def test_shapes_can_be_asked_of_the_meta_device(name):
    encoder = ENCODERS[name]().eval()
    expected = encoder(torch.randn(2, 5, 3)).shape
    assert encoder.to("meta")(torch.empty(2, 5, 3, device="meta")).shape == expected
