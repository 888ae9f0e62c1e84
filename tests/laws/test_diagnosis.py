"""Models that cannot learn are recognized, and their repaired versions are not."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import setfold

SHARP = {"slots": "learned", "similarity": "cosine", "attention": "softmax"}
MEANS = {**SHARP, "aggregate": "weighted_mean"}


def slots(dim_in, num_slots, dim_out, **options):
    return setfold.SlotSetEncoder(dim_in, num_slots, 32, dim_out, **options)


def sets(seed=0):
    draw = torch.Generator().manual_seed(seed)
    centers = 0.5 * torch.randn(24, 1, 32, generator=draw)
    return centers + torch.randn(24, 60, 32, generator=draw)


def model(encoder, head=None):
    features = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", setfold.CancelledAttentionWarning)
        return setfold.Composition(encoder, features, head)


def words_of(made):
    return " ".join(setfold.diagnose(made, sets()).problems)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# ---- scale: averages of averages ---------------------------------------------------------------


def test_averages_of_averages_are_recognized():
    levels = [slots(32, 32, 32), slots(32, 16, 32)]
    hierarchy = setfold.HierarchicalSlotSetEncoder(levels, nn.Identity())
    words = words_of(model(hierarchy, setfold.SlotPool("sum")))
    assert "times less over sets than the mean of the features" in words
    assert "attention cancels" in words


def test_means_over_weights_that_add_up_are_not():
    levels = [slots(32, 16, 32, **MEANS) for _ in range(2)]
    hierarchy = setfold.HierarchicalSlotSetEncoder(levels, residual=True)
    assert words_of(model(hierarchy, nn.Flatten())) == ""


def test_a_norm_at_the_beginning_of_the_head_repairs_the_scale():
    encoder = slots(32, 32, 32, **SHARP)
    assert "times less" in words_of(model(encoder, nn.Flatten()))
    normal = nn.Sequential(nn.LayerNorm(32), nn.Flatten(), nn.Linear(32 * 32, 5))
    assert words_of(model(encoder, normal)) == ""


# ---- keys that are too narrow ------------------------------------------------------------------


def test_constant_attention_is_recognized():
    encoder = slots(32, 16, 1, **{**SHARP, "aggregate": ["weighted_mean", "mass"]}, dim_key=2)
    nn.init.zeros_(encoder.to_key.weight)
    words = words_of(model(encoder, nn.Flatten()))
    assert "Attention is constant" in words
    assert "All 16 slots are the same" in words


def test_wide_keys_are_not():
    encoder = slots(32, 16, 1, **{**SHARP, "aggregate": ["weighted_mean", "mass"]}, dim_key=16)
    assert words_of(model(encoder, nn.Flatten())) == ""


# ---- deep hierarchies --------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Identity(), None])
def test_levels_that_replace_each_other_are_recognized(activation):
    levels = [slots(32, 8, 32, **MEANS) for _ in range(6)]
    words = words_of(model(setfold.HierarchicalSlotSetEncoder(levels, activation), nn.Flatten()))
    assert "No gradient reaches encoder.levels" in words
    assert "slots are the same" in words
    assert ("times less over sets" in words) == (activation is not None)


def test_levels_that_add_up_are_not():
    levels = [slots(32, 8, 32, **MEANS) for _ in range(6)]
    hierarchy = setfold.HierarchicalSlotSetEncoder(levels, residual=True)
    found = setfold.diagnose(model(hierarchy, nn.Flatten()), sets())
    assert found.problems == ()
    upper = [size for name, size in found.gradients.items() if "to_value" in name][1:]
    assert max(upper) < 5 * min(upper)  # level by level


# ---- other symptoms ----------------------------------------------------------------------------


def test_what_is_healthy_has_no_problem():
    assert words_of(setfold.DeepSets(nn.Linear(32, 16), 16, head=nn.Linear(16, 3))) == ""
    assert words_of(setfold.AttentionPool(32, 4, 16)) == ""
    assert words_of(setfold.SetTransformer(32, 16)) == ""
    assert words_of(setfold.SummaryStatistics(32)) == ""  # nothing to train


def test_weights_that_are_nearly_uniform_are_recognized():
    assert "nearly uniform" in words_of(model(slots(32, 16, 8, aggregate="weighted_mean")))


def test_dead_slots_are_counted():
    encoder = slots(32, 4, 8, **MEANS)
    with torch.no_grad():
        encoder.to_bias.weight.zero_()
        encoder.slot_values[0] = 5 * torch.eye(32)[0]
        encoder.to_bias.weight[0, 0] = -1.0
    found = setfold.diagnose(model(encoder), sets())
    assert found["dead slots"] == 1
    assert "1 of 4 slots" in " ".join(found.problems)


def test_the_loss_decides_which_gradients_are_measured():
    made = setfold.DeepSets(nn.Linear(32, 16), 16, head=nn.Linear(16, 3))
    found = setfold.diagnose(made, sets(), loss=lambda output: 0 * output.sum())
    assert "No gradient reaches features, head" in " ".join(found.problems)


def test_the_model_is_not_changed():
    made = model(slots(32, 8, 32)).train()
    made.features[0].weight.grad = torch.ones(32, 32)
    before = {name: value.clone() for name, value in made.state_dict().items()}
    setfold.diagnose(made, sets())
    assert made.training
    assert torch.equal(made.features[0].weight.grad, torch.ones(32, 32))
    for name, value in made.state_dict().items():
        assert value.dtype == before[name].dtype
        assert torch.equal(value, before[name])


def test_sets_may_differ_in_size_and_padding_has_no_effect():
    made, whole = model(slots(32, 8, 32, **MEANS)), sets()
    ragged = [part[: 10 + number].numpy() for number, part in enumerate(whole)]
    found = setfold.diagnose(made, ragged)
    alone = setfold.diagnose(made, [np.concatenate([part, part]) for part in ragged])
    for one, other in zip(found.symptoms, alone.symptoms, strict=True):
        assert one.value == pytest.approx(other.value, rel=1e-6)


def test_it_prints_and_becomes_json():
    found = setfold.diagnose(model(slots(32, 8, 32)), sets())
    assert "effective dimensions of encodings" in str(found)
    assert json.loads(json.dumps(found.as_dict()))["problems"] == list(found.problems)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([torch.zeros(3, 32)] * 3, "at least 4 sets"),
        ([torch.zeros(0, 32)] * 4, "at least one element"),
        ([torch.zeros(3)] * 4, "sets"),
    ],
)
def test_too_few_sets_are_an_error(wrong, words):
    with pytest.raises(setfold.InputError, match=words):
        setfold.diagnose(setfold.Pool(32), wrong)


def test_gradients_that_vanish_are_recognized_whatever_the_names():
    class Own(setfold.SetEncoder):
        dim_in = 32

        def __init__(self):
            super().__init__()
            self.model, self.last = nn.Linear(32, 16), nn.Linear(16, 3)

        def forward(self, elements, mask=None):
            return self.last(1e-4 * self.model(elements).mean(1))

    found = setfold.diagnose(Own(), sets())
    assert [*found.gradients] == ["model", "last"]
    assert "Gradients vanish: those of model" in " ".join(found.problems)


def test_encodings_that_are_nearly_the_same_are_recognized():
    features = nn.Linear(32, 16)
    nn.init.constant_(features.bias, 1000.0)
    assert "of different sets are nearly the same" in words_of(setfold.DeepSets(features, 16))


def test_encodings_of_one_dimension_are_recognized():
    encoder = setfold.AttentionPool(32, 1, 16)
    with torch.no_grad():
        encoder.to_value.weight.copy_(torch.outer(torch.randn(16), torch.randn(32)))
    assert "vary in 1.0 dimensions only" in words_of(encoder)


def test_other_modules_are_an_error():
    with pytest.raises(setfold.InputError, match="set encoder"):
        setfold.diagnose(nn.Linear(3, 3), sets())
