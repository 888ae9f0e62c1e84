"""The encoder as printed cannot train because of its scale; scaled, it can."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import setfold
from experiments.recipe import Size
from experiments.recipes.settings import DIGIT_METHODS, DIGITS
from experiments.tasks.centroids import DigitCentroids


def task_of(method: str) -> DigitCentroids:
    return replace(DIGITS[Size.SMALL].task, made_up=True, **DIGIT_METHODS[method])


def built(method: str) -> nn.Module:
    torch.manual_seed(0)
    return task_of(method).build()


def gradient_of_the_first_layer(method: str) -> float:
    task, model = task_of(method), built(method)
    torch.manual_seed(1)
    task.loss(model, task.batch(torch.arange(1))).backward()
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    assert first.weight.grad is not None
    return first.weight.grad.norm().item()


def test_scaled_differs_from_printed_by_a_factor_only() -> None:
    printed, scaled = built("SSE, as printed").double(), built("SSE, as printed, scaled").double()
    assert all(map(torch.equal, printed.parameters(), scaled.parameters()))
    sets = torch.rand(6, 10, 1, 28, 28, dtype=torch.float64)
    encodings = []
    for model in (printed, scaled):
        torch.manual_seed(0)  # slots are random
        encodings.append(model(sets))
    small, large = (encoding - encoding.mean(0) for encoding in encodings)
    torch.testing.assert_close(large, 32 * small)


def test_printed_gets_almost_no_gradient_and_scaled_does() -> None:
    usual = gradient_of_the_first_layer("Deep Sets")
    assert gradient_of_the_first_layer("SSE, as printed") < usual / 1000
    assert gradient_of_the_first_layer("SSE, as printed, scaled") > usual / 20


@pytest.mark.parametrize(
    ("method", "named"),
    [("SSE, as printed", True), ("SSE, as printed, scaled", False), ("Deep Sets", False)],
)
def test_the_diagnosis_names_the_scale(method: str, named: bool) -> None:
    model = built(method)
    assert isinstance(model, setfold.SetEncoder)
    torch.manual_seed(1)
    sets = task_of(method).batch(torch.arange(4)).flatten(0, 1)[:, :10]
    problems = setfold.diagnose(model, sets).problems
    assert any("times less over sets than the mean" in problem for problem in problems) == named
