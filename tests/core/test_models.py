from __future__ import annotations

import inspect
import random

import numpy as np
import pytest
import torch
from torch import nn

import setfold
from setfold.laws.wrong_way import ChunkAverage, PublishedSlotSetEncoder
from tests.small import draw

# ---- models of every kind ------------------------------------------------------------------


class Scaled(nn.Module):
    """A module of the user's own, as it should be."""

    def __init__(self, width, scale=1.0, inner=None):
        super().__init__()
        self.width, self.scale, self.inner = width, scale, inner
        self.linear = nn.Linear(width, width)

    def forward(self, elements):
        found = self.scale * self.linear(elements)
        return found if self.inner is None else self.inner(found)


class Forgetful(nn.Module):
    """One that does not keep its argument."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)


class Other(Scaled):
    """One that keeps something else than it was given."""

    def __init__(self, width):
        super().__init__(width)
        self.width = width + 1


class Applied(nn.Module):
    """One that takes a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function


SCALED = f"{Scaled.__module__}.Scaled"
# Shown for being wrong, these are not public: a file that names them is loaded only if allowed.
WRONG_WAYS = {
    "published": PublishedSlotSetEncoder,
    "averaged": ChunkAverage,
}


def allowed(name):
    kind = WRONG_WAYS.get(name)
    return [] if kind is None else [f"{kind.__module__}.{kind.__name__}"]


def slot_set(dim_in=3, **options):
    return setfold.SlotSetEncoder(dim_in, 4, 6, 5, **options)


def grid():
    return setfold.Grid((0, -1), (1, 1), (3, 4))


MODELS = {
    "slot set": slot_set,
    "slot set, no bias": lambda: slot_set(bias=False, aggregate=["weighted_mean", "max", "mass"]),
    "learned, softmax": lambda: slot_set(slots="learned", attention="softmax", aggregate="sum"),
    "cosine": lambda: slot_set(similarity="cosine", aggregate=["min"]),
    "hierarchy": lambda: setfold.HierarchicalSlotSetEncoder([slot_set(), slot_set(5)]),
    "mixed hierarchy": lambda: setfold.HierarchicalSlotSetEncoder(
        [slot_set(), slot_set(5, slots="learned")], nn.Tanh()
    ),
    "bare hierarchy": lambda: setfold.HierarchicalSlotSetEncoder(
        [slot_set(), slot_set(5)], nn.Identity()
    ),
    "pool": lambda: setfold.Pool(3, ["mean", "max"]),
    "deep sets": lambda: setfold.DeepSets(nn.Linear(3, 4), 4, "max", nn.Linear(4, 2)),
    "no head": lambda: setfold.DeepSets(nn.Sequential(nn.Linear(3, 4), nn.GELU("tanh")), 4),
    "composition": lambda: setfold.Composition(
        slot_set(8),
        nn.Sequential(
            nn.Linear(3, 8, bias=False),
            nn.BatchNorm1d(8, eps=0.1, momentum=None),
            nn.LeakyReLU(0.3),
            nn.Dropout(0.4),
            nn.LayerNorm(8, elementwise_affine=False),
        ),
        nn.Sequential(nn.Flatten(), nn.LayerNorm(20, eps=1e-3, bias=False), nn.Linear(20, 2)),
    ),
    "nested": lambda: setfold.Composition(
        setfold.Composition(slot_set(), nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ELU(0.5)))),
        nn.Linear(3, 3),
        nn.Flatten(),
    ),
    "slot pool": lambda: setfold.Composition(
        slot_set(aggregate="max"), None, setfold.SlotPool("sum")
    ),
    "attention": lambda: setfold.AttentionPool(3, 4, 6, num_heads=2, bias=False),
    "gated attention": lambda: setfold.GatedAttentionPool(3, 4, num_branches=2),
    "concat": lambda: setfold.Concat([setfold.Pool(3, "max"), slot_set()]),
    "zoom": lambda: setfold.Composition(
        setfold.Concat([setfold.PlacedSlotEncoder(3, grid()), setfold.Pool(3, ["max", "min"])]),
        head=setfold.Zoom(grid(), 3, (2, 2), position=(0, 1)),
    ),
    "placed slots": lambda: setfold.PlacedSlotEncoder(
        3, grid(), aggregate=["density", "max"], reach=2.5
    ),
    "learned places": lambda: setfold.PlacedSlotEncoder(
        3,
        setfold.Places([[0.0, 0.25], [1.0, 0.5]], learned=True),
        width=[0.5, 1.5],
        values=["offsets", "squares"],
        position=(2, 0),
        attention="kernel",
        outside="drop",
        learn_width=True,
    ),
    "unit box": lambda: setfold.LayeredSetEncoder(
        [setfold.UnitBox(3, position=(0, 2))],
        setfold.PlacedSlotEncoder(3, setfold.Grid((-1, -1), (1, 1), (2, 2)), position=(0, 2)),
    ),
    "slot grid": lambda: setfold.Composition(
        setfold.PlacedSlotEncoder(3, setfold.Grid((0, 0), (1, 1), (4, 4))),
        head=nn.Sequential(setfold.SlotGrid((4, 4)), nn.Conv2d(1, 2, 3)),
    ),
    "grid head": lambda: setfold.Composition(
        setfold.Concat(
            [
                setfold.Pool(3),
                setfold.PlacedSlotEncoder(3, setfold.Grid((0, 0), (1, 1), (4, 4))),
            ]
        ),
        head=setfold.GridHead(dim_linear=3, channels=1, shape=(4, 4), dim_out=2),
    ),
    "concat by name": lambda: setfold.Concat({"pool": setfold.Pool(3), "slots": slot_set()}),
    "plain attention": lambda: setfold.GatedAttentionPool(3, 4, gated=False, bias=False),
    "set transformer": lambda: setfold.SetTransformer(
        3, 4, 2, 3, num_seeds=2, num_decoder_layers=1, head=nn.Flatten()
    ),
    "full set transformer": lambda: setfold.FullSetTransformer(3, 4, 2, layer_norm=False),
    "constant memory": lambda: setfold.ConstantMemoryEncoder(3, 4, 2, 3, num_heads=2),
    "equivariant": lambda: setfold.EquivariantDeepSets(
        3, [4, 5], "mean", False, ["max", "sum"], nn.ELU(), nn.Linear(10, 2)
    ),
    "equivariant, as it comes": lambda: setfold.EquivariantDeepSets(3, [4]),
    "layers": lambda: setfold.LayeredSetEncoder(
        [
            setfold.SetNorm(4, over="set", epsilon=1e-3),
            setfold.Layer(setfold.SeedAttention(4, 2, 2), setfold.MAB(4, 2)),
        ],
        setfold.PMA(4, 2, 1),
        features=nn.Linear(3, 4),
        head=nn.Flatten(),
    ),
    "moments": lambda: setfold.Moments(3),
    "covariance": lambda: setfold.Covariance(3),
    "statistics": lambda: setfold.SummaryStatistics(3),
    "table": lambda: setfold.Composition(
        setfold.Concat([setfold.SummaryStatistics(9), setfold.Pool(9)]),
        setfold.Columns(
            [
                setfold.CategoryColumn("k", ["a", "b"], dim=3),
                setfold.TimeColumn("t", 10**15, age=True),
            ]
        ),
        nn.Sequential(
            setfold.Standardize(46),
            setfold.ResidualHead(46, 37, 2),
            setfold.Classes("kind", ["a", "b"]),
        ),
    ),
    "relative": lambda: setfold.LayeredSetEncoder(
        [setfold.RelativeLayer(3, center=[0], latest=[1])],
        setfold.Pool(3, "max"),
        setfold.Columns(
            [
                setfold.NumberColumn("x", 1.5, 2.0, log=True),
                setfold.VectorColumn("v", [1.0, 2.0], [1.0, 2.0]),
            ]
        ),
        head=nn.Sequential(nn.Linear(3, 1), setfold.Quantity("age", 40.0, 10.0)),
    ),
    "slot attention": lambda: setfold.SlotAttention(3, 4, 6, num_iterations=2, dim_hidden=5),
    "sorting": lambda: setfold.FSPool(3, num_pieces=4),
    "pairs": lambda: setfold.JanossyPool(nn.Sequential(nn.Flatten(), nn.Linear(6, 2)), 3),
    "published": lambda: PublishedSlotSetEncoder(slot_set(), "max", 4, redraw=True),
    "averaged": lambda: ChunkAverage(setfold.FSPool(3), 4),
}
IMAGES = {
    "conv": lambda: setfold.Composition(
        slot_set(6),
        nn.Sequential(
            nn.Conv2d(1, 6, 3, stride=2, padding=1, groups=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 6, (1, 2), padding="same", padding_mode="circular"),
            nn.GroupNorm(2, 6),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        ),
        nn.Flatten(),
    )
}


def trained(build, dtype, elements):
    """A model whose weights and running statistics are not those of a new one."""
    torch.manual_seed(0)
    model = build().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, dtype=dtype))
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        model.train()(elements)
    return model.eval()


def test_every_exported_module_is_among_them():
    exported = {getattr(setfold, name) for name in setfold.__all__}
    wanted = {k for k in exported if inspect.isclass(k) and issubclass(k, nn.Module)}
    made = {type(module) for build in MODELS.values() for module in build().modules()}
    assert {kind for kind in wanted if not inspect.isabstract(kind)} <= made


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


# ---- round trips ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", [*MODELS, *IMAGES])
def test_a_loaded_model_gives_the_same_bits(path, name, dtype):
    elements = (draw(2, 5, 1, 8, 8) if name in IMAGES else draw(2, 5, 3)).to(dtype)
    model = trained({**MODELS, **IMAGES}[name], dtype, elements)
    setfold.save(model, path)
    torch.manual_seed(77)
    loaded = setfold.load(str(path), allow=allowed(name))
    assert type(loaded) is type(model)
    assert str(loaded) == str(model)
    assert {t.dtype for t in loaded.parameters()} == {t.dtype for t in model.parameters()}
    assert torch.equal(loaded(elements), model(elements))
    if not isinstance(model, setfold.StreamingSetEncoder):
        return
    here = model.update(model.initial_state(2), elements)
    there = loaded.update(loaded.initial_state(2), elements)
    assert torch.equal(loaded.readout(there.merge(here)), model.readout(here.merge(there)))


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, build in MODELS.items()
        if isinstance(model := build(), setfold.StreamingSetEncoder) and model.slot_dims
    ],
)
def test_slots_do_not_depend_on_the_day(path, name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    setfold.save(model, path)
    torch.manual_seed(123)
    loaded = setfold.load(path)
    for found, slots in zip(loaded.initial_state().frame, model.initial_state().frame, strict=True):
        assert torch.equal(found, slots)


@pytest.mark.parametrize("num_slots", [1, 3, 4, 17])
def test_another_number_of_slots_is_the_same_draw_everywhere(path, num_slots):
    model = slot_set().eval()
    setfold.save(model, path)
    here = model.initial_state(num_slots=num_slots)
    there = setfold.load(path).initial_state(num_slots=num_slots)
    assert here.slots.shape == (1, num_slots, 6)
    assert torch.equal(here.slots, there.slots)
    assert len(here.merge(there)) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_detour_through_another_precision_does_not_change_the_slots(path, dtype):
    model = slot_set().eval()
    model.to(dtype).float()
    setfold.save(model, path)
    assert torch.equal(setfold.load(path).initial_state().slots, model.initial_state().slots)


def test_a_loaded_model_is_ready_to_evaluate_and_to_train(path):
    model = MODELS["composition"]().train()
    setfold.save(model, path)
    assert model.training
    loaded = setfold.load(path)
    assert not any(module.training for module in loaded.modules())
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    loaded.train()(torch.randn(2, 5, 3)).sum().backward()


def test_saving_and_loading_draw_no_random_numbers(path):
    model = MODELS["composition"]()

    def states():
        numpy_state = np.random.get_state()[1]
        return torch.get_rng_state().tolist(), random.getstate(), numpy_state.tolist()

    before = states()
    setfold.save(model, path)
    setfold.load(path)
    assert states() == before


def test_tied_weights_are_written_under_each_name(path):
    torch.manual_seed(0)
    tied = nn.Linear(3, 3)
    model = setfold.DeepSets(nn.Sequential(tied, nn.Tanh(), tied), 3).eval()
    setfold.save(model, path)
    loaded, elements = setfold.load(path), torch.randn(2, 5, 3)
    assert torch.equal(loaded(elements), model(elements))


@pytest.mark.parametrize("shared", [nn.Tanh(), nn.Dropout(0.1)], ids=str)
def test_a_module_that_is_used_twice_is_rebuilt_twice(path, shared):
    features = nn.Sequential(nn.Linear(3, 3), shared, nn.Linear(3, 3), shared)
    model = setfold.DeepSets(features, 3).eval()
    setfold.save(model, path)
    loaded, elements = setfold.load(path), torch.randn(2, 5, 3)
    assert len(loaded.features) == 4
    assert torch.equal(loaded(elements), model(elements))


def test_a_model_that_cancels_is_loaded_without_another_warning(path):
    with pytest.warns(setfold.CancelledAttentionWarning):
        model = setfold.Composition(slot_set(), None, setfold.SlotPool())
    setfold.save(model, path)
    setfold.load(path)  # a warning would be an error


def test_any_module_may_be_saved(path):
    model = nn.ModuleList([nn.Linear(3, 2), nn.PReLU(2)])
    setfold.save(model, path)
    assert torch.equal(setfold.load(path)[0].weight, model[0].weight)


# ---- classes of the user's own -------------------------------------------------------------


@pytest.mark.parametrize("name", WRONG_WAYS)
def test_a_wrong_way_is_loaded_only_if_allowed(path, name):
    setfold.save(MODELS[name]().eval(), path)
    with pytest.raises(setfold.DescriptionError, match="allow="):
        setfold.load(path)


def test_a_class_of_your_own_is_loaded_only_if_allowed(path):
    model = setfold.DeepSets(Scaled(3, scale=0.5, inner=Scaled(3)), 3).eval()
    setfold.save(model, path)
    for allow in ((), ["Scaled"], [f"{SCALED}x"], ["torch.nn.Linear"]):
        with pytest.raises(setfold.DescriptionError, match=f'allow=\\["{SCALED}"\\]'):
            setfold.load(path, allow=allow)
    loaded, elements = setfold.load(path, allow=[SCALED]), torch.randn(2, 5, 3)
    assert torch.equal(loaded(elements), model(elements))
    assert loaded.features.scale == 0.5


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Forgetful(3), "self.width = width"),
        (Other(3), "cannot be rebuilt.*linear.weight would be"),
        (Applied(torch.tanh), "Applied.function is a builtin"),
        (Applied(lambda x: x), "Applied.function is a function, which cannot be saved"),
        (Applied({"a": 1}), "is a dict"),
        (type("Local", (nn.Module,), {})(), "Local"),
    ],
    ids=["forgets", "keeps something else", "builtin", "lambda", "dict", "local class"],
)
def test_a_model_that_cannot_be_described_is_not_saved(path, module, message):
    model = setfold.Composition(slot_set(), module)
    with pytest.raises(setfold.DescriptionError, match=message):
        setfold.save(model, path)
    assert not path.exists()


def test_a_submodule_that_was_exchanged_is_noticed(path):
    model = slot_set()
    model.to_value = nn.Linear(3, 7)
    with pytest.raises(
        setfold.DescriptionError,
        match=r"to_value\.weight would be \(5, 3\) float32; it is \(7, 3\)",
    ):
        setfold.save(model, path)
    model = slot_set()
    model.extra = nn.Linear(1, 1)
    with pytest.raises(setfold.DescriptionError, match=r"extra\.weight"):
        setfold.save(model, path)
