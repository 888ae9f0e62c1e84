from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import setfold
from experiments.data import modelnet40
from experiments.places import Volume
from experiments.pools import DeepSets, Transformer
from experiments.recipe import Size
from experiments.recipes import modelnet_streaming
from experiments.tasks.growing_clouds import GrowingClouds, grown_accuracy

TASK = GrowingClouds(DeepSets("max"), points=40, dim=16, widths=(16,), made_up=True)
PLACES = replace(TASK, pool=Volume(4, (8, 8, 8)), widths=())


def built(task):
    torch.manual_seed(0)
    return task.build().eval()


def test_points_are_those_of_the_data():
    points, labels = replace(TASK, augment=False).batch(torch.tensor([9, 2]))
    data = modelnet40.load(made_up=True)
    assert torch.equal(labels, data.labels["train"][[9, 2]])
    for item, cloud in zip((9, 2), points, strict=True):
        own = data.points["train"][item]
        assert (cloud.unsqueeze(1) == own).all(-1).any(1).all()


def test_the_number_of_points_differs_from_step_to_step():
    torch.manual_seed(0)
    found = [
        replace(TASK, fewest=10, most=80).batch(torch.arange(3)).points.shape for _ in range(50)
    ]
    assert {(shape[0], shape[2]) for shape in found} == {(3, 3)}
    numbers = {shape[1] for shape in found}
    assert len(numbers) > 20
    assert 10 <= min(numbers) < 15
    assert 60 < max(numbers) <= 80


@pytest.mark.parametrize("method", modelnet_streaming.VARIED_METHODS)
def test_varied_trainings_differ_in_the_number_of_points_only(method):
    plain = modelnet_streaming.training_of(Size.SMOKE, 0)[method]
    varied = modelnet_streaming.varied(plain, Size.SMOKE)
    assert replace(varied, task=plain.task) == plain
    assert (varied.task.fewest, varied.task.most) == modelnet_streaming.VARIED[Size.SMOKE]
    losses = []
    for task in (plain.task, replace(varied.task, fewest=None, most=None)):
        model = built(task)
        torch.manual_seed(1)
        losses.append(task.loss(model, task.batch(torch.arange(8))).item())
    assert losses[0] == losses[1]


def test_labels_are_smoothed():
    logits, batch = torch.randn(5, 4), TASK.batch(torch.arange(5))

    class Constant(nn.Module):
        def forward(self, points):
            return logits

    logs = logits.log_softmax(1).numpy()
    wanted = 0.1 / 4 + 0.9 * np.eye(4)[batch.labels.numpy()]
    assert TASK.loss(Constant(), batch).item() == pytest.approx(-(wanted * logs).sum(1).mean())


@pytest.mark.parametrize(
    "task", [TASK, PLACES, replace(TASK, pool=Transformer(1, 4))], ids=["max", "places", "ISAB"]
)
@torch.no_grad()
def test_accuracy_of_growing_clouds_is_that_of_whole_clouds(task):
    model = built(task)
    model.head[-1].weight.mul_(100)  # so that not all clouds look alike
    found = grown_accuracy(model, task, (20, 50, 200))
    assert found["points"] == [20.0, 50.0, 200.0]
    for points, accuracy in zip((20, 50, 200), found["accuracy"], strict=True):
        blocks = list(task.blocks("test", 200))
        right = [int((model(p[:, :points]).argmax(1) == y).sum()) for p, y in blocks]
        assert accuracy == sum(right) / sum(len(labels) for _, labels in blocks)


@torch.no_grad()
def test_a_volume_knows_where_points_are():
    encoder = Volume(4, (8, 8, 8)).build(3, 16).double().eval()
    points = torch.rand(2, 60, 3, dtype=torch.float64) * 0.5
    torch.testing.assert_close(setfold.fold(encoder, points.split(7, 1)), encoder(points))
    assert (encoder(points) - encoder(-points)).abs().max() > 1e-3


@pytest.mark.parametrize(("dim_in", "dim_out"), [(4, 16), (3, 8)])
def test_a_volume_maps_points_to_its_channels(dim_in, dim_out):
    with pytest.raises(setfold.InputError, match=f"dim_in={dim_in}, dim_out={dim_out}"):
        Volume(4, (8, 8, 8)).build(dim_in, dim_out)


def test_gradients_reach_every_parameter_of_a_volume():
    torch.manual_seed(0)
    model = PLACES.build()
    PLACES.loss(model, PLACES.batch(torch.arange(8))).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
