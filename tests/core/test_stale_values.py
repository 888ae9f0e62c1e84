"""Nothing that is kept of an encoder's values goes stale.

An encoder is used, changed, and used again. It must then give exactly what a copy gives that was
made before any use and changed in the same way, and states from before must raise.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import setfold
from tests.core.stale import (
    USED,
    assert_nothing_stale,
    built,
    slot_set,
)
from tests.small import draw


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
