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
from tests.small import TIGHT, assert_same_state, draw, make


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
