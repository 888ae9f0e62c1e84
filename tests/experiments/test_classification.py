from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import setfold
from experiments.data import modelnet40
from experiments.pools import PMA, DeepSets, Slots, Transformer
from experiments.tasks import classification
from experiments.tasks.classification import PointClouds
from experiments.tasks.networks import Activation

TASK = PointClouds(DeepSets("max"), points=40, dim=16, widths=(16, 16, 16), made_up=True)
SLOTS = Slots(4, 8, "max", slots="learned")


def built(task):
    torch.manual_seed(0)
    return task.build().eval()


def clouds(split="test"):
    data = modelnet40.load(made_up=True)
    return data.points[split], data.labels[split]


# ---- data ----------------------------------------------------------------------------------


def test_clouds_are_turned_about_z_and_stretched():
    torch.manual_seed(0)
    before = torch.randn(500, 20, 3, dtype=torch.float64)
    after = classification.augmented(before.float()).double()
    maps = torch.linalg.lstsq(before, after).solution  # (500, 3, 3): x -> x @ map
    assert_close(before @ maps, after, rtol=0, atol=1e-5)
    assert_close(maps[:, 2, :2], torch.zeros(500, 2).double(), rtol=0, atol=1e-6)
    assert_close(maps[:, :2, 2], torch.zeros(500, 2).double(), rtol=0, atol=1e-6)
    scales = maps.norm(dim=1)  # of each axis, after the turn
    turns = maps / scales.unsqueeze(1)
    assert_close(turns @ turns.mT, torch.eye(3).double().expand(500, 3, 3), rtol=0, atol=1e-5)
    assert (torch.linalg.det(turns) > 0.99).all()
    angles = torch.atan2(turns[:, 1, 0], turns[:, 0, 0])
    for found, low, high in ((angles, -0.1 * np.pi, 0.1 * np.pi), (scales, 0.8, 1.25)):
        reach = high - low
        assert low - 1e-5 < found.min() < low + 0.02 * reach
        assert high - 0.02 * reach < found.max() < high + 1e-5
        assert found.mean().item() == pytest.approx((low + high) / 2, abs=0.05 * reach)


def test_clouds_are_standardised_by_the_points_that_come_first():
    points = torch.randn(3, 50, 3) * 4 + 7
    found = classification.standardised(points, first=20)
    for before, after in zip(points.numpy(), found.numpy(), strict=True):
        known = before[:20]
        expected = (before - known.mean()) / known.std(ddof=1)
        np.testing.assert_allclose(after, expected, rtol=1e-4, atol=1e-5)


def test_a_batch_holds_points_of_its_clouds():
    task = replace(TASK, augment=False, points=256)  # all of them, in some order
    found, labels = task.batch(torch.tensor([9, 2]))
    all_points, all_labels = clouds("train")
    assert torch.equal(labels, all_labels[[9, 2]])
    for item, cloud in zip((9, 2), found.double(), strict=True):
        own = all_points[item].double()
        nearest = torch.cdist(cloud, (own - own.mean()) / own.std()).min(1)
        assert nearest.values.max() < 1e-5
        assert nearest.indices.unique().tolist() == list(range(256))
        assert nearest.indices.tolist() != list(range(256))


def test_points_are_drawn_anew_at_every_visit_and_without_replacement():
    task = replace(TASK, augment=False)
    torch.manual_seed(0)
    first, second = (task.batch(torch.arange(4)).points for _ in range(2))
    assert not torch.equal(first, second)
    assert all(len(cloud.unique(dim=0)) == 40 for cloud in first)
    torch.manual_seed(0)
    assert torch.equal(task.batch(torch.arange(4)).points, first)
    torch.manual_seed(0)
    assert not torch.allclose(TASK.batch(torch.arange(4)).points, first, atol=1e-2)


@pytest.mark.parametrize("use", ["train", "test"])
def test_no_more_points_than_a_cloud_has(use):
    task = replace(TASK, points=257)
    with pytest.raises(setfold.InputError, match="sets of 256"):
        task.batch(torch.arange(2)) if use == "train" else task.evaluate(built(task), "test")


# ---- model ---------------------------------------------------------------------------------

FUNCTIONS = {Activation.TANH: np.tanh, Activation.RELU: lambda x: np.maximum(x, 0)}


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_the_model_is_three_layers_a_maximum_and_two(activation):
    model = built(replace(TASK, activation=activation, widths=(8, 8, 16))).double()
    points = torch.randn(3, 40, 3, dtype=torch.float64)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    widths = [(module.in_features, module.out_features) for module in linears]
    assert widths == [(3, 8), (8, 8), (8, 16), (16, 16), (16, 4)]
    x = points.numpy()
    for number, module in enumerate(linears):
        if number == 3:
            x = x.max(1)
        x = x @ module.weight.detach().numpy().T + module.bias.detach().numpy()
        x = x if number == 4 else FUNCTIONS[activation](x)
    np.testing.assert_allclose(model(points).detach(), x, rtol=1e-10)


def test_dropout_is_before_each_layer_after_the_pool():
    def kinds(task):
        head = [module for module in task.build().head if not isinstance(module, nn.Identity)]
        return [type(module).__name__ for module in head]

    assert kinds(TASK) == ["Dropout", "Linear", "Tanh", "Dropout", "Linear"]
    assert kinds(replace(TASK, hidden=False)) == ["Dropout", "Linear"]
    normed = ["BatchNorm1d", "Dropout", "Linear", "BatchNorm1d", "Tanh", "Dropout", "Linear"]
    assert kinds(replace(TASK, batch_norm=True)) == normed
    assert {m.p for m in TASK.build().modules() if isinstance(m, nn.Dropout)} == {0.5}
    assert not any(isinstance(m, nn.Dropout) for m in TASK.build().encoder.modules())


def test_layers_on_points_may_be_normalised_each_point_alone():
    model, points = built(replace(TASK, layer_norm=True)), torch.randn(2, 40, 3)
    assert [type(m).__name__ for m in model.encoder.features] == ["Linear", "LayerNorm", "Tanh"] * 3
    with torch.no_grad():
        assert_close(setfold.fold(model.encoder, points.split(7, 1)), model.encoder(points))


def test_a_set_transformer_brings_its_own_layers():
    pool = Transformer(2, num_inducing=4, dropout=0.5)
    model = built(replace(TASK, pool=pool, widths=(), hidden=False))
    assert model(torch.randn(2, 40, 3)).shape == (2, 4)
    assert model.encoder.passes == 3
    assert isinstance(model.encoder.features, nn.Linear)
    assert sum(isinstance(m, nn.Dropout) for m in model.modules()) == 2


@pytest.mark.parametrize("pool", [DeepSets("max"), SLOTS, PMA(), Transformer(1)], ids=str)
def test_gradients_reach_every_parameter(pool):
    task = replace(TASK, pool=pool, layer_norm=True, batch_norm=True)
    model = task.build()
    task.loss(model, task.batch(torch.arange(8))).backward()
    missed = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    # neither a softmax over elements nor a norm over the batch sees what is added to all
    assert [name for name in missed if "to_key.bias" not in name and name != "head.2.bias"] == []


def test_simple_shapes_are_learned():
    torch.manual_seed(0)
    task = replace(TASK, activation=Activation.RELU, dropout=0.0, layer_norm=True, batch_norm=True)
    model = task.build()
    optimiser, losses = torch.optim.Adam(model.parameters(), 1e-2), []
    for _ in range(30):
        optimiser.zero_grad()
        loss = task.loss(model, task.batch(torch.randperm(task.items())[:32]))
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < losses[0] - 0.4


# ---- evaluation ----------------------------------------------------------------------------


def test_accuracy_is_the_share_of_clouds_whose_largest_logit_is_right(monkeypatch):
    monkeypatch.setattr(classification, "CLOUDS", 5)  # of 16, so that the last block is smaller
    model, right = built(TASK), 0
    blocks = list(TASK.blocks("test", 40))
    assert [len(labels) for _, labels in blocks] == [5, 5, 5, 1]
    all_points, all_labels = clouds()
    found = torch.cat([points for points, _ in blocks])
    with torch.no_grad():
        model.head[-1].weight.mul_(100)  # so that not all clouds look alike
        for points, own, label in zip(found, all_points, all_labels, strict=True):
            rows = (points.unsqueeze(1) == own).all(-1).nonzero()[:, 1]
            assert len(rows.unique()) == len(rows) == 40  # points of this cloud, none twice
            x = (points - points.mean()) / points.std()
            right += int(model(x.unsqueeze(0))[0].argmax() == label)
    assert TASK.evaluate(model, "test") == {"accuracy": right / 16}


def test_evaluation_is_always_the_same_and_leaves_no_trace():
    model = built(TASK)
    torch.manual_seed(0)
    before, found = torch.get_rng_state(), TASK.evaluate(model, "validation")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert TASK.evaluate(model, "validation") == found
    one, other = (torch.cat([p for p, _ in TASK.blocks("test", 40)]) for _ in range(2))
    assert torch.equal(one, other)


@pytest.mark.parametrize("pool", [DeepSets("max"), SLOTS, Transformer(1)], ids=str)
def test_a_stream_is_what_was_seen_of_it(pool):
    task = replace(TASK, pool=pool)
    model = built(task)
    found = classification.streamed_accuracy(model, task, chunk=40, steps=3)
    assert found["points"] == [40, 80, 120]
    right = [0, 0, 0]
    for points, labels in task.blocks("test", 120):
        first = points[:, :40]
        x = (points - first.mean((1, 2), True)) / first.std((1, 2), keepdim=True)
        for step in range(3):
            with torch.no_grad():
                right[step] += int((model(x[:, : 40 * (step + 1)]).argmax(1) == labels).sum())
    assert found["accuracy"] == [count / 16 for count in right]
    only = classification.streamed_accuracy(model, task, chunk=40, steps=1)
    assert only["accuracy"] == [task.evaluate(model, "test")["accuracy"]]
    assert found["consistency error"] < 1e-5


def test_the_first_chunk_of_a_stream_decides_how_it_is_standardised(monkeypatch):
    seen = []

    def spy(encoder, chunks):
        seen.extend(chunks)
        return [encoder(chunk) for chunk in chunks]

    monkeypatch.setattr(classification.sets, "streamed", spy)
    classification.streamed_accuracy(built(TASK), TASK, chunk=40, steps=2)
    first, second = seen[:2]
    assert_close(first.std((1, 2)), torch.ones(16))
    assert (second.std((1, 2)) - 1).abs().max() > 0.01


@pytest.mark.skipif("SETFOLD_DATA" not in os.environ, reason="needs ModelNet40")
def test_the_real_clouds_can_be_learned_from():
    task = replace(TASK, made_up=False)
    assert task.items() > 8000
    batch = task.batch(torch.arange(4))
    assert task.loss(task.build(), batch).isfinite()
    with pytest.raises(setfold.InputError, match="sets of 2048"):
        replace(task, points=5000).batch(torch.arange(2))
