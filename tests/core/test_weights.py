from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import setfold
from setfold.core import weights as core_weights
from tests.small import TIGHT, assert_same_state, draw, make, moved


def step(encoder, optimizer=torch.optim.SGD, **options):
    """One optimizer step."""
    optimizer = optimizer(encoder.parameters(), lr=0.1, **options)
    encoder(draw(1, 5, 3)).pow(2).sum().backward()
    optimizer.step()
    encoder.zero_grad()


def fold(encoder, seed=0):
    return encoder.update(encoder.initial_state(), draw(1, 5, 3, seed=seed))


def compose(activation=nn.ReLU, head=None):
    torch.manual_seed(0)
    features = nn.Sequential(nn.Linear(3, 3), activation(), nn.BatchNorm1d(3))
    encoder = setfold.SlotSetEncoder(3, 4, 6, 5)
    return setfold.Composition(encoder, features, head).double().eval()


@pytest.fixture
def hashed(monkeypatch):
    """A list that grows with every hashing of weights."""
    calls, digest_of = [], core_weights.digest_of

    def counted(*args):
        calls.append(args)
        return digest_of(*args)

    monkeypatch.setattr(core_weights, "digest_of", counted)
    return calls


# ---- which weights are the same ------------------------------------------------------------


@pytest.mark.parametrize("grad", [True, False])
def test_states_of_two_models_with_the_same_weights_merge(grad):
    one, two = make(), make()
    with torch.set_grad_enabled(grad):
        merged = fold(one).merge(fold(two, seed=1))
        assert_same_state(merged, fold(one).merge(fold(one, seed=1)))
        assert_same_state(
            two.update(fold(one), draw(1, 2, 3)), one.update(fold(one), draw(1, 2, 3))
        )


PAIRS = {
    "attention": lambda: (make(), make(attention="softmax")),
    "activation": lambda: (compose(nn.ReLU), compose(nn.Tanh)),
    "dtype": lambda: (make(), make().float()),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_structure_and_dtype_are_part_of_it(pair):
    one, two = (model.initial_state() for model in pair())
    with pytest.raises(setfold.StateMismatchError, match="different weights"):
        one.merge(two)


def test_how_often_a_module_is_used_is_part_of_it():
    torch.manual_seed(0)
    linear, tanh = nn.Linear(3, 3), nn.Tanh()
    once = setfold.Composition(make(), nn.Sequential(linear, tanh).double())
    for layers in ((linear, tanh, tanh), (linear, tanh, linear)):
        more = setfold.Composition(make(), nn.Sequential(*layers).double())
        with pytest.raises(setfold.StateMismatchError, match="weights"):
            once.initial_state().merge(more.initial_state())


def test_a_composition_of_nothing_is_its_encoder():
    encoder = make()
    around = setfold.Composition(make())
    assert_same_state(fold(around).merge(fold(encoder)), fold(encoder).merge(fold(encoder)))


def test_it_does_not_depend_on_the_mode():
    encoder = make()
    frame = encoder.initial_state().frame
    trained = encoder.train().update(encoder.initial_state(slots=frame), draw(1, 5, 3))
    encoder.eval()
    assert_same_state(trained, fold(encoder))
    assert encoder.readout(trained.merge(fold(encoder))).isfinite().all()


@pytest.mark.parametrize(
    "optimizer",
    [
        (torch.optim.SGD, {"foreach": False}),
        (torch.optim.SGD, {"foreach": True}),
        (torch.optim.Adam, {"fused": True}),
    ],
    ids=["loop", "foreach", "fused"],
)
@pytest.mark.parametrize("grad", [True, False])
def test_an_optimiser_step_makes_states_old(optimizer, grad):
    encoder = make()
    with torch.set_grad_enabled(grad):
        state = fold(encoder)
    kind, options = optimizer
    step(encoder, kind, **options)
    for verb in (
        lambda: encoder.update(state, draw(1, 5, 3)),
        lambda: encoder.remove(state, draw(1, 5, 3)),
        lambda: encoder.readout(state),
        lambda: state.merge(fold(encoder)),
        lambda: fold(encoder).merge(state),
    ):
        with pytest.raises(setfold.StateMismatchError):
            verb()


def test_a_model_and_its_states_agree_in_files_after_fused_training(tmp_path):
    encoder = make()
    with torch.no_grad():
        fold(encoder)  # an evaluation between two steps
    step(encoder, torch.optim.AdamW, fused=True)
    with torch.no_grad():
        fold(encoder).save(tmp_path / "state")
        expected = encoder.readout(fold(encoder))
    setfold.save(encoder, tmp_path / "model")
    loaded = setfold.load(tmp_path / "model")
    found = loaded.readout(setfold.SetState.load(tmp_path / "state"))
    assert_close(found, expected, **TIGHT)


def test_an_old_state_comes_with_advice():
    encoder = make()
    with torch.no_grad():
        state = fold(encoder)
    step(encoder)
    for verb in (encoder.readout, lambda s: encoder.update(s, draw(1, 5, 3))):
        with pytest.raises(setfold.StateMismatchError, match=r"encoder\.initial_state\(\)"):
            verb(state)


def test_weights_that_come_back_make_states_good_again():
    encoder = make()
    with torch.no_grad():
        state = fold(encoder)
        expected = encoder.readout(state)
    before = copy.deepcopy(encoder.state_dict())
    step(encoder)
    encoder.load_state_dict(before)
    assert_close(encoder.readout(state), expected, **TIGHT)


@pytest.mark.parametrize("change", [nn.Module.half, nn.Module.float], ids=["half", "float"])
def test_another_dtype_makes_states_old(change):
    encoder = make()
    state = fold(encoder)
    change(encoder)
    with pytest.raises(setfold.StateMismatchError):
        encoder.readout(state)


def load_other_weights(encoder):
    encoder.load_state_dict(make(seed=1).state_dict(), assign=True)


def put_in_a_parameter(encoder):
    encoder.to_value.weight = nn.Parameter(encoder.to_value.weight.detach() + 1)


@pytest.mark.parametrize("exchange", [load_other_weights, put_in_a_parameter])
def test_parameters_that_are_exchanged_make_states_old(exchange):
    encoder = make()
    state = fold(encoder)
    exchange(encoder)
    with pytest.raises(setfold.StateMismatchError):
        encoder.readout(state)


def test_a_module_that_is_exchanged_makes_states_old():
    model = compose(nn.ReLU)
    with torch.no_grad():
        state = fold(model)
    model.features[1] = nn.Tanh()  # has no weights that could tell
    with pytest.raises(setfold.StateMismatchError):
        model.update(state, draw(1, 5, 3))


# ---- which modules count -------------------------------------------------------------------


def test_the_head_is_not_part_of_it():
    model = compose(head=nn.Sequential(nn.Flatten(), nn.Linear(20, 2)))
    state = fold(model)
    with torch.no_grad():
        model.head[1].weight.zero_()
        model.head[1].bias.fill_(3)
    assert model.readout(state).tolist() == [[3, 3]]
    assert model.readout(state.merge(fold(model))).tolist() == [[3, 3]]


@pytest.mark.parametrize("fused", [False, True])
def test_training_the_head_alone_keeps_states(fused):
    model = compose(head=nn.Sequential(nn.Flatten(), nn.Linear(20, 2)))
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1, fused=fused)
    state = fold(model)
    before = model.readout(state)
    before.pow(2).sum().backward()
    optimizer.step()
    assert (model.readout(state) - before).abs().max() > 0
    assert int(model.update(state, draw(1, 5, 3)).merge(state).count) == 15


def test_the_upper_levels_are_not_part_of_it():
    upper = setfold.SlotSetEncoder(5, 2, 6, 3, slots="learned").double()
    model = setfold.HierarchicalSlotSetEncoder([make(), upper]).eval()
    with torch.no_grad():
        state = fold(model)
        upper.to_value.weight.zero_()
        upper.to_value.bias.zero_()
    assert model.readout(state).abs().sum() == 0


@pytest.mark.parametrize("name", ["features.0.weight", "encoder.to_key.bias", "encoder.slot_mean"])
def test_features_and_encoder_are_part_of_it(name):
    model = compose()
    with torch.no_grad():
        state = fold(model)
        model.get_parameter(name).add_(1)
    with pytest.raises(setfold.StateMismatchError):
        model.readout(state)


def test_the_statistics_of_batch_norm_are_part_of_it():
    model = compose()
    with torch.no_grad():
        state = fold(model)
    model.features[2].running_mean.add_(1)
    with pytest.raises(setfold.StateMismatchError):
        model.update(state, draw(1, 5, 3))


# ---- what it costs -------------------------------------------------------------------------


def test_with_gradients_nothing_is_hashed(hashed):
    encoder = make()
    left, right = fold(encoder), fold(encoder, seed=1)
    merged = left.merge(right).merge(encoder.initial_state())
    encoder.readout(encoder.update(merged, draw(1, 5, 3))).sum().backward()
    assert hashed == []


def test_without_gradients_nothing_is_hashed_either(hashed):
    encoder = make()
    with torch.no_grad():
        for seed in range(3):
            encoder.readout(fold(encoder, seed).merge(fold(encoder)))
    assert hashed == []


def test_weights_are_hashed_once_per_change_for_files(hashed, tmp_path):
    encoder = make()
    with torch.no_grad():
        for seed in range(3):
            fold(encoder, seed).save(tmp_path / "state")
        assert len(hashed) == 1
        encoder.to_key.weight.add_(1)
        for seed in range(3):
            fold(encoder, seed).save(tmp_path / "state")
    assert len(hashed) == 2


@pytest.mark.parametrize("grad", [True, False])
def test_a_state_keeps_the_digest_of_the_weights_that_shaped_it(grad):
    encoder = make()
    with torch.set_grad_enabled(grad):
        state = fold(encoder)
    step(encoder)
    assert state.weights.digest == make().initial_state().weights.digest
    copied = pickle.loads(pickle.dumps(state))
    assert copied.weights.match(make().initial_state().weights)
    assert not copied.weights.match(encoder.initial_state().weights)
    assert_same_state(copied.merge(fold(make())), fold(make()).merge(fold(make())))
    with pytest.raises(setfold.StateMismatchError, match="different weights"):
        copied.merge(fold(encoder))


# ---- what it keeps alive -------------------------------------------------------------------


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("build", [make, compose], ids=["encoder", "composition"])
def test_a_state_does_not_keep_its_encoder(build, grad):
    encoder = build()
    modules = [weakref.ref(module) for module in encoder.modules()]
    with torch.set_grad_enabled(grad):
        state = fold(encoder)
    state = state.detach().merge(state.detach())
    del encoder
    gc.collect()
    assert [ref() for ref in modules if ref() is not None] == []
    assert int(state.count) == 10


# ---- nothing that is kept goes stale -------------------------------------------------------------
#
# An encoder is used, changed, and used again. It must then give exactly what a copy gives that was
# made before any use and changed in the same way, and states from before must raise.


class Scale(nn.Module):
    """A module with a parameter, a buffer and a plain setting, used in `prepare` as well."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("shift", torch.ones(3))
        self.exponent = 1.0

    def forward(self, rows):
        return self.linear(rows).tanh().abs().pow(self.exponent) + self.shift


def built(recipe):
    """A model whose weights are not representable in less than float64."""
    torch.manual_seed(0)
    return moved(recipe())


def slot_set(dim_in=3, **options):
    return setfold.SlotSetEncoder(dim_in, 4, 6, dim_in, **options)  # to_key is square


USED = {
    "slots": lambda: slot_set(aggregate=["mean", "max"]),
    "few outputs": lambda: setfold.SlotSetEncoder(3, 4, 6, 1),
    "learned, cosine": lambda: slot_set(slots="learned", similarity="cosine"),
    "attention": lambda: setfold.AttentionPool(3, 2, 4, 2),
    "gated": lambda: setfold.GatedAttentionPool(3, 4, 2),
    "seeds": lambda: setfold.PMA(3, 2, 1),
    "features": lambda: setfold.Composition(slot_set(), Scale()),
    "hierarchy": lambda: setfold.HierarchicalSlotSetEncoder([slot_set(), slot_set()]),
    "concat": lambda: setfold.Concat([slot_set(), setfold.AttentionPool(3, 2, 4)]),
    "concat of concat": lambda: setfold.Concat({"inner": setfold.Concat([slot_set()])}),
}


def like(encoder, elements):
    return elements.to(next(encoder.parameters()).dtype)


@torch.no_grad()
def everything(encoder):
    """What an encoder makes of a few sets, by every way that may use something that was kept."""
    chunk, more = like(encoder, draw(2, 5, 3)), like(encoder, draw(2, 600, 3, seed=1))
    state = encoder.update(encoder.initial_state(2), chunk)
    merged = encoder.update(state, more).merge(state)
    index = torch.tensor([0, 1, 1, 0, 1])
    ragged = encoder.update(encoder.initial_state(2), chunk[0], index=index)
    return [
        encoder(chunk[:1]),  # one small set
        encoder(chunk),
        encoder(more),
        encoder(chunk, torch.tensor([[True, False, True, True, False]] * 2)),
        encoder(chunk[0], index=index, batch_size=2),
        encoder.readout(state),
        encoder.readout(merged),
        encoder.readout(ragged),
        setfold.fold(encoder, [chunk, more]),
    ]


def assert_stale(encoder, state):
    """A state from before a change raises wherever it meets the encoder or a new state."""
    sets = len(state)
    chunk = like(encoder, draw(sets, 5, 3))
    new = encoder.initial_state(sets)
    for use in (
        lambda: encoder.update(state, chunk),
        lambda: encoder.remove(state, chunk),
        lambda: encoder.readout(state),
        lambda: state.merge(new),
        lambda: new.merge(state),
        lambda: setfold.SetState.stack([state, new]),
    ):
        with pytest.raises(setfold.StateMismatchError):
            use()


def assert_nothing_stale(encoder, change, *, states_stay=False, unused=None):
    """Use an encoder, change it, and compare it with one that was changed before its first use."""
    unused = copy.deepcopy(encoder) if unused is None else unused
    before = everything(encoder)
    with torch.no_grad():
        state = encoder.update(encoder.initial_state(2), like(encoder, draw(2, 5, 3)))
    tracked = encoder.update(encoder.initial_state(2), like(encoder, draw(2, 5, 3)))
    change(encoder)
    change(unused)
    if states_stay is None:  # they may be valid or not
        pass
    elif states_stay:
        assert (
            int(encoder.update(state, like(encoder, draw(2, 5, 3))).merge(tracked).count[0]) == 15
        )
    else:
        assert_stale(encoder, state)
        assert_stale(encoder, tracked)
    for again in (everything(encoder), everything(encoder)):
        for found, expected in zip(again, everything(unused), strict=True):
            assert torch.equal(found, expected)
    return before, again


def optimizer_step(optimizer, **options):
    def change(encoder):
        for number, parameter in enumerate(encoder.parameters()):
            parameter.grad = draw(*parameter.shape, seed=number).to(parameter.dtype)
        optimizer(encoder.parameters(), lr=0.1, **options).step()
        encoder.zero_grad()

    return change


def load_others(assign):
    def change(encoder):
        other = {
            name: tensor + 0.1 if tensor.is_floating_point() else tensor
            for name, tensor in encoder.state_dict().items()
        }
        encoder.load_state_dict(other, assign=assign)

    return change


def for_each_parameter(function):
    def change(encoder):
        for parameter in encoder.parameters():
            function(parameter)

    return change


def for_one_parameter(function):
    """The change of one number of one parameter, the smallest that there is."""

    def change(encoder):
        function(next(iter(encoder.parameters())))

    return change


def write_by_numpy(parameter):
    array = parameter.detach().numpy()
    array += 0.1


def write_one_number_by_numpy(parameter):
    parameter.detach().numpy().reshape(-1)[-1] += 0.1


def exchange_data(parameter):
    parameter.data = parameter.data + 0.1


def move_and_change_data(parameter):
    parameter.data = parameter.data.clone()
    parameter.data.add_(0.1)


VALUES = {
    "loop": optimizer_step(torch.optim.SGD, foreach=False),
    "foreach": optimizer_step(torch.optim.SGD, foreach=True),
    "fused SGD": optimizer_step(torch.optim.SGD, fused=True),
    "fused AdamW": optimizer_step(torch.optim.AdamW, fused=True),
    "load_state_dict": load_others(assign=False),
    "load_state_dict, assign": load_others(assign=True),
    "in place": for_each_parameter(lambda p: torch.no_grad()(p.add_)(0.1)),
    "data, in place": for_each_parameter(lambda p: p.data.add_(0.1)),
    "data": for_each_parameter(exchange_data),
    "data, twice": for_each_parameter(move_and_change_data),
    "numpy": for_each_parameter(write_by_numpy),
    "float and back": lambda encoder: encoder.float().double(),
    "half and back": lambda encoder: encoder.half().double(),
    "half": lambda encoder: encoder.half(),
    "float": lambda encoder: encoder.float(),
    "one number, data": for_one_parameter(lambda p: p.data.view(-1)[-1:].add_(0.1)),
    "one number, numpy": for_one_parameter(write_one_number_by_numpy),
}


@pytest.mark.parametrize("change", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("name", USED)
def test_changed_weights_are_used(name, change):
    before, after = assert_nothing_stale(built(USED[name]), change)
    assert all((b - a).abs().max() > 0 for b, a in zip(before, after, strict=True))


@pytest.mark.parametrize("name", USED)
def test_a_detour_through_another_dtype_without_rounding_changes_nothing(name):
    encoder = built(USED[name]).float()
    for weight in encoder.parameters():
        weight.data.copy_(weight.data.half())
    before, after = assert_nothing_stale(encoder, lambda e: e.double().float(), states_stay=True)
    assert all(map(torch.equal, before, after))


def transpose(parameter):
    parameter.data = parameter.data.t()


def transpose_in_new_memory(parameter):
    parameter.data = parameter.data.t().contiguous()


def transpose_in_place(parameter):
    parameter.data.copy_(parameter.data.t().clone())


@pytest.mark.parametrize("change", [transpose, transpose_in_new_memory, transpose_in_place])
@pytest.mark.parametrize("name", ["slots", "features", "hierarchy", "concat"])
def test_a_square_weight_that_is_transposed_is_used(name, change):
    encoder = built(USED[name])
    square = [n for n, p in encoder.named_parameters() if p.dim() == 2 and p.shape[0] == p.shape[1]]
    assert square

    def transposed(model):
        change(model.get_parameter(square[0]))

    before, after = assert_nothing_stale(encoder, transposed)
    assert any((b - a).abs().max() > 1e-6 for b, a in zip(before, after, strict=True))


class ByShape(nn.Module):
    """What it does depends on the shape and the dtype of its weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 3))

    def forward(self, rows):
        return rows * self.weight.shape[0] + self.weight.sum()


def test_a_weight_that_is_reshaped_through_data_is_used():
    def reshape(model):
        model.features.weight.data = model.features.weight.data.view(3, 1)

    before, after = assert_nothing_stale(
        built(lambda: setfold.Composition(slot_set(), ByShape())), reshape
    )
    assert (before[0] - after[0]).abs().max() > 1e-6


def test_a_weight_that_is_shortened_through_data_is_used():
    def shorten(model):
        model.features.weight.data = model.features.weight.data[:, :2]

    before, after = assert_nothing_stale(
        built(lambda: setfold.Composition(slot_set(), ByShape())), shorten
    )
    assert (before[0] - after[0]).abs().max() > 1e-6


# ---- structure and settings


def replace_module(encoder):
    torch.manual_seed(7)
    encoder.to_key = nn.Linear(3, 3).double()


def replace_parameter(encoder):
    encoder.to_value.weight = nn.Parameter(encoder.to_value.weight.detach() + 1)


def remove_bias(encoder):
    encoder.to_value.bias = None


def set_norm_epsilon(encoder):
    encoder.norm.eps = 0.5


def set_attention(encoder):
    encoder.attention = "softmax"


class Negative(nn.Module):
    def forward(self, weight):
        return -weight


def parametrize(encoder):
    nn.utils.parametrize.register_parametrization(encoder.to_key, "weight", Negative())


STRUCTURE = {
    "module": replace_module,
    "parameter": replace_parameter,
    "no bias": remove_bias,
    "epsilon": set_norm_epsilon,
    "attention": set_attention,
    "parametrization": parametrize,
}


@pytest.mark.parametrize("change", STRUCTURE.values(), ids=STRUCTURE)
@pytest.mark.parametrize("aggregate", ["mean", ["weighted_mean", "max"]], ids=str)
def test_changed_parts_and_settings_are_used(aggregate, change):
    encoder = built(lambda: slot_set(aggregate=aggregate))
    nn.init.normal_(encoder.to_value.bias)
    before, after = assert_nothing_stale(encoder, change)
    assert all((b - a).abs().max() > 0 for b, a in zip(before, after, strict=True))


@pytest.mark.parametrize("change", STRUCTURE.values(), ids=STRUCTURE)
def test_changed_parts_and_settings_of_a_part_are_used(change):
    encoder = built(lambda: setfold.Concat([setfold.Pool(3), slot_set()]))
    nn.init.normal_(encoder.encoders["1"].to_value.bias)
    assert_nothing_stale(encoder, lambda e: change(e.encoders["1"]))


def test_a_bias_that_is_added_is_used():
    def add_bias(encoder):
        encoder.to_value.bias = nn.Parameter(torch.ones(3, dtype=torch.float64))

    before, after = assert_nothing_stale(built(lambda: slot_set(bias=False)), add_bias)
    assert all((b - a).abs().max() > 1e-3 for b, a in zip(before, after, strict=True))


def test_a_parametrization_may_change_and_be_removed():
    encoder, unused = built(slot_set), built(slot_set)  # a copy would share the class of to_key
    parametrize(encoder)
    parametrize(unused)

    def change_original(model):
        model.to_key.parametrizations.weight.original.data.add_(0.1)

    def remove(model):
        nn.utils.parametrize.remove_parametrizations(model.to_key, "weight")

    assert_nothing_stale(encoder, change_original, unused=unused)
    encoder.to_key.parametrizations.weight.original.data.add_(0.1)
    unused.to_key.parametrizations.weight.original.data.add_(0.1)
    before, after = assert_nothing_stale(encoder, remove, states_stay=None, unused=unused)
    assert_close(after, before, **TIGHT)  # the weight stays what it was


def test_a_weight_norm_may_change():
    encoder = built(slot_set)
    nn.utils.parametrizations.weight_norm(encoder.to_value)

    def change_length(model):
        model.to_value.parametrizations.weight.original0.data.mul_(2)

    before, after = assert_nothing_stale(encoder, change_length)
    assert all((b - a).abs().max() > 1e-3 for b, a in zip(before, after, strict=True))


FEATURES = {
    "buffer": lambda f: f.shift.add_(1),
    "buffer, data": lambda f: f.shift.data.add_(1),
    "buffer, replaced": lambda f: f.register_buffer("shift", 3 * torch.ones(3).double()),
    "setting": lambda f: setattr(f, "exponent", 2.0),
    "module": lambda f: setattr(f, "linear", nn.Identity()),
}


@pytest.mark.parametrize("change", FEATURES.values(), ids=FEATURES)
def test_changed_features_are_used(change):
    encoder = built(lambda: setfold.Composition(slot_set(), Scale()))
    before, after = assert_nothing_stale(encoder, lambda e: change(e.features))
    assert all((b - a).abs().max() > 0 for b, a in zip(before, after, strict=True))


ADDED = {
    "appended": lambda e: e.features.append(nn.Tanh()),
    "appended, with weights": lambda e: e.features.append(moved_linear()),
    "inserted": lambda e: e.features.insert(0, nn.Tanh()),
    "deleted": lambda e: e.features.__delitem__(1),
    "removed": lambda e: setattr(e, "features", None),
}


def moved_linear():
    torch.manual_seed(3)
    return nn.Linear(3, 3).double()


@pytest.mark.parametrize("change", ADDED.values(), ids=ADDED)
def test_layers_that_are_added_or_removed_are_used(change):
    features = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid())
    encoder = built(lambda: setfold.Composition(slot_set(), features))
    before, after = assert_nothing_stale(encoder, change)
    assert all((b - a).abs().max() > 0 for b, a in zip(before, after, strict=True))


def test_features_that_are_added_later_are_used():
    encoder = built(lambda: setfold.Composition(slot_set()))
    before, after = assert_nothing_stale(encoder, lambda e: setattr(e, "features", nn.Tanh()))
    assert all((b - a).abs().max() > 0 for b, a in zip(before, after, strict=True))


class Optional(nn.Module):
    """A setting that is None at first."""

    def __init__(self):
        super().__init__()
        self.limit = None

    def forward(self, rows):
        return rows if self.limit is None else rows.clamp(-self.limit, self.limit)


def test_a_setting_that_was_none_is_used():
    encoder = built(lambda: setfold.Composition(slot_set(), Optional()))
    before, after = assert_nothing_stale(encoder, lambda e: setattr(e.features, "limit", 0.1))
    assert all((b - a).abs().max() > 0 for b, a in zip(before, after, strict=True))


def versions(package, first, second):
    """Two versions of a class of a package, as modules."""
    for kind in (first, second):
        kind.__module__, kind.__qualname__ = f"{package}.layers", "Layer"
    return first(3), second(3)


class Early(nn.Module):
    def __init__(self, width, bias=True):
        super().__init__()
        self.width, self.bias = width, bias


class Later(nn.Module):
    """One more argument, and one more attribute."""

    def __init__(self, width, bias=True, mode="plain"):
        super().__init__()
        self.width, self.bias, self.mode, self.is_fast = width, bias, mode, True


@pytest.mark.parametrize("package", ["setfold", "torch.nn"])
def test_states_outlive_new_arguments_and_attributes_of_a_class(package):
    early, later = versions(package, Early, Later)
    assert core_weights._structure([early]) == core_weights._structure([later])
    later.mode = "other"
    assert core_weights._structure([early]) != core_weights._structure([later])
    early.width = 4
    assert core_weights._structure([early]) != core_weights._structure([Early(3)])


def test_all_attributes_of_other_classes_are_settings():
    early, later = versions("elsewhere", Early, Later)
    assert core_weights._structure([early]) != core_weights._structure([later])


# ---- weights that do not shape the state, but the encoding


HEADS = {
    "head": lambda: setfold.Composition(slot_set(), None, nn.Linear(3, 3)),
    "hierarchy": lambda: setfold.HierarchicalSlotSetEncoder([slot_set(), slot_set()]),
    "hierarchy, learned": lambda: setfold.HierarchicalSlotSetEncoder(
        [slot_set(), slot_set(slots="learned")]
    ),
    "hierarchy within": lambda: setfold.Composition(
        setfold.HierarchicalSlotSetEncoder([slot_set(), slot_set()])
    ),
    "concat": lambda: setfold.Concat(
        [setfold.HierarchicalSlotSetEncoder([slot_set(), slot_set(slots="learned")])]
    ),
}


def weights_of_the_readout(encoder):
    shaping = {id(p) for m in encoder.shaping_modules() for p in m.parameters()}
    return [p for p in encoder.parameters() if id(p) not in shaping]


@pytest.mark.parametrize("exchanged", [False, True])
@pytest.mark.parametrize("build", HEADS.values(), ids=HEADS)
def test_a_readout_that_is_trained_alone_is_used_in_forward(build, exchanged):
    """Each weight of the readout on its own, so that none hides another."""
    count = len(weights_of_the_readout(built(build)))
    assert count
    for number in range(count):
        encoder = built(build)
        unused = copy.deepcopy(encoder)
        everything(encoder)
        for model in (encoder, unused):
            weight = weights_of_the_readout(model)[number]
            change = draw(*weight.shape, seed=number)
            weight.data = weight.data + change if exchanged else weight.data.add_(change)
        for found, expected in zip(everything(encoder), everything(unused), strict=True):
            assert torch.equal(found, expected), number


# ---- copies, borrowed weights, inference mode, shared modules


@pytest.mark.parametrize("name", USED)
@pytest.mark.parametrize("changed", ["copy", "original"])
def test_of_a_used_encoder_and_its_copy_only_one_is_changed(name, changed):
    original = built(USED[name])
    expected = everything(original)
    twin = copy.deepcopy(original)
    assert all(map(torch.equal, everything(twin), expected))
    one, other = (twin, original) if changed == "copy" else (original, twin)
    with torch.no_grad():
        states = [e.update(e.initial_state(2), draw(2, 5, 3)) for e in (one, other)]
    assert int(states[0].merge(states[1]).count[0]) == 10
    VALUES["data, in place"](one)
    assert_stale(one, states[0])
    assert_stale(one, states[1])
    assert all(map(torch.equal, everything(other), expected))
    assert not any(map(torch.equal, everything(one), expected))
    assert int(other.update(states[0], draw(2, 5, 3)).merge(states[1]).count[0]) == 15


@pytest.mark.parametrize("name", USED)
def test_weights_that_are_borrowed_are_used_and_given_back(name):
    encoder, elements = built(USED[name]), draw(2, 5, 3)
    other = copy.deepcopy(encoder)
    VALUES["in place"](other)
    borrowed = dict(other.named_parameters())
    with torch.no_grad():
        expected, theirs = encoder(elements), other(elements)
        for _ in range(2):
            found = torch.func.functional_call(encoder, borrowed, (elements,))
            assert torch.equal(found, theirs)
            plain = {name: weight.detach().clone() for name, weight in borrowed.items()}
            assert torch.equal(torch.func.functional_call(encoder, plain, (elements,)), theirs)
            assert torch.equal(encoder(elements), expected)


@pytest.mark.parametrize("name", USED)
def test_gradients_after_inference_mode(name):
    """What was kept in inference mode must not become part of a graph."""
    encoder, elements = built(USED[name]), draw(2, 5, 3).requires_grad_()
    unused = copy.deepcopy(encoder)
    with torch.inference_mode():
        for found, expected in zip(everything(encoder), everything(unused), strict=True):
            assert torch.equal(found, expected)
    unused = copy.deepcopy(encoder)
    with torch.no_grad():
        begun = encoder.initial_state(2)  # after inference mode, and before training
    wanted = [elements, *encoder.parameters()]
    for found, expected in (
        (encoder(elements), unused(elements)),
        (setfold.fold(encoder, elements.split(2, 1)), setfold.fold(unused, elements.split(2, 1))),
    ):
        assert_close(found, expected, **TIGHT)
        mine = torch.autograd.grad(found.square().sum(), wanted, allow_unused=True)
        theirs = torch.autograd.grad(
            expected.square().sum(), [elements, *unused.parameters()], allow_unused=True
        )
        assert_close(mine, theirs, **TIGHT)
    encoder.readout(encoder.update(begun, elements)).square().sum().backward()
    assert elements.grad.abs().max() > 0
    step(encoder)
    with torch.inference_mode():
        assert torch.equal(encoder(elements), copy.deepcopy(encoder)(elements))


def test_two_encoders_that_share_a_module_both_notice():
    one, two = built(slot_set), built(lambda: slot_set(aggregate="max"))
    two.to_key = one.to_key
    for model in (one, two):
        everything(model)
    with torch.no_grad():
        states = [e.update(e.initial_state(2), draw(2, 5, 3)) for e in (one, two)]
    one.to_key.weight.data.add_(0.1)
    for model, state in zip((one, two), states, strict=True):
        assert_stale(model, state)
        for found, expected in zip(
            everything(model), everything(copy.deepcopy(model)), strict=True
        ):
            assert torch.equal(found, expected)


def test_training_mode_keeps_nothing():
    encoder = built(slot_set)
    everything(encoder)
    encoder.train()
    with torch.no_grad():
        torch.manual_seed(1)
        one, two = encoder(draw(1, 5, 3)), encoder(draw(1, 5, 3))
    assert not torch.equal(one, two)  # new slots each time
    encoder.eval()
    assert all(map(torch.equal, everything(encoder), everything(copy.deepcopy(encoder))))


def test_an_object_that_was_freed_is_not_mistaken_for_another():
    """Memory and ids are used again; what was kept for an encoder must go with it."""
    for seed in range(20):
        torch.manual_seed(seed)
        encoder = slot_set().double().eval()
        found = everything(encoder)
        assert all(map(torch.equal, found, everything(copy.deepcopy(encoder))))
        del encoder
        gc.collect()
