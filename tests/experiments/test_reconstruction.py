from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Normal
from torch.testing import assert_close

import setfold
from experiments.data import celeba
from experiments.pools import PMA, Attention, DeepSets, Slots, Transformer
from experiments.tasks import reconstruction
from experiments.tasks.reconstruction import Reconstruction

SLOTS = Slots(8, aggregate="weighted_mean", similarity="cosine", slots="learned")
TASK = Reconstruction(DeepSets(), context=50, targets=20, made_up=True)


def built(task, dtype=torch.float64):
    torch.manual_seed(0)
    return task.build().to(dtype).eval()


def images(split="test"):
    return celeba.load(side=32, made_up=True).pixels[split].numpy()


def in_double(batch):
    return type(batch)(*(part.double() for part in batch))


# ---- data ----------------------------------------------------------------------------------


@pytest.mark.parametrize("standardise", [False, True])
def test_a_batch_holds_pixels_of_its_images(standardise):
    torch.manual_seed(0)
    task = replace(TASK, standardise=standardise)
    context, coordinates, colours = task.batch(torch.tensor([5, 3]))
    assert context.shape == (2, 50, 5)
    assert coordinates.shape == (2, 20, 2)
    targets = torch.cat([coordinates, colours], -1)
    deviation = np.sqrt((32**2 - 1) / 12) / 32  # of 0, 1/32, ..., 31/32
    for item, *parts in zip((5, 3), context.numpy(), targets.numpy(), strict=False):
        for pixels in parts:
            places = pixels[:, :2] * (deviation if standardise else 1)
            places = places * 32 + (15.5 if standardise else 0)
            rows, columns = places.round().astype(int).T
            np.testing.assert_allclose(places, places.round(), atol=1e-4)
            assert len(set(zip(rows, columns, strict=True))) == len(pixels)  # no pixel twice
            expected = images("train")[item, rows, columns] / 127.5 - 1
            np.testing.assert_allclose(pixels[:, 2:], expected, atol=1e-6)


def test_without_a_number_all_pixels_are_targets():
    _, coordinates, colours = replace(TASK, targets=None).batch(torch.tensor([7, 0, 7]))
    assert coordinates.shape == (1, 1024, 2)
    expected = images("train")[[7, 0, 7]].reshape(3, 1024, 3) / 127.5 - 1
    np.testing.assert_allclose(colours, expected, atol=1e-6)
    assert coordinates[0, 33].tolist() == [1 / 32, 1 / 32]
    assert coordinates[0, 34].tolist() == [1 / 32, 2 / 32]


def test_batches_come_from_the_global_generator():
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(TASK.batch(torch.arange(4)).context)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_larger_images_are_there():
    task = replace(TASK, side=64, context=1000, targets=None)
    batch = task.batch(torch.arange(2))
    assert batch.context.shape == (2, 1000, 5)
    assert batch.colours.shape == (2, 4096, 3)
    assert len(task.batch(torch.arange(2)).coordinates[0].unique(dim=0)) == 4096


# ---- model ---------------------------------------------------------------------------------


def by_hand(model, context, coordinates):
    """A conditional neural process with a mean, written down once more, in numpy."""

    def dense(module, x):
        return x @ module.weight.detach().numpy().T + module.bias.detach().numpy()

    x = context
    for module in model.encoder.features:
        x = np.maximum(x, 0) if isinstance(module, nn.ReLU) else dense(module, x)
    encoding = x.mean(1)
    if isinstance(model.norm, nn.LayerNorm):
        centred = encoding - encoding.mean(-1, keepdims=True)
        encoding = centred / np.sqrt(encoding.var(-1, keepdims=True) + model.norm.eps)
    x = np.repeat(encoding[:, None], coordinates.shape[1], 1)
    x = dense(model.decoder.first, np.concatenate([x, coordinates], -1))
    for module in model.decoder.rest:
        x = np.maximum(x, 0) if isinstance(module, nn.ReLU) else dense(module, x)
    return x[..., :3], 0.1 + 0.9 * np.log1p(np.exp(x[..., 3:]))


@pytest.mark.parametrize("normalise", [False, True])
def test_the_model_is_a_conditional_neural_process(normalise):
    task = replace(TASK, normalise=normalise)
    model, batch = built(task), in_double(task.batch(torch.arange(3)))
    found = model(batch.context, batch.coordinates)
    expected = by_hand(model, batch.context.numpy(), batch.coordinates.numpy())
    for part, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(part.detach(), wanted, rtol=1e-10)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    shapes = [(module.in_features, module.out_features) for module in linears]
    assert shapes == [(5, 64), (64, 64), (64, 64), (66, 128), (128, 128), (128, 128), (128, 6)]


def test_shared_coordinates_are_those_of_every_image():
    model, batch = built(TASK), in_double(replace(TASK, targets=None).batch(torch.arange(3)))
    shared = model(batch.context, batch.coordinates)
    assert_close(shared, model(batch.context, batch.coordinates.expand(3, -1, -1)))


def test_an_attentive_decoder_looks_at_slots():
    task = replace(TASK, pool=SLOTS, attentive=True, normalise=True)
    model, batch = built(task), in_double(task.batch(torch.arange(2)))
    slots = model.encode(batch.context)  # 8 slots of 8
    assert slots.shape == (2, 8, 8)
    look, seen = model.look, []
    for image, places in zip(model.norm(slots), batch.coordinates, strict=True):
        key, value = look.to_key_and_value(image).split(64, -1)
        query = look.to_query(places)
        heads = []
        for h in range(4):
            of_head = slice(16 * h, 16 * (h + 1))
            weights = (query[:, of_head] @ key[:, of_head].T / 4).softmax(-1)  # (20, 8)
            heads.append(weights @ value[:, of_head])
        seen.append(look.to_out(torch.cat(heads, -1)))
    expected = model.decoder(torch.stack(seen), batch.coordinates)
    assert_close(model.decode(slots, batch.coordinates), expected)
    assert_close(model.decode(slots.flip(1), batch.coordinates), expected)
    whole = replace(task, targets=None).batch(torch.arange(2)).coordinates.double()
    assert_close(model.decode(slots, whole), model.decode(slots, whole.expand(2, -1, -1)))


@pytest.mark.parametrize("pool", [SLOTS, Attention(8), PMA(num_seeds=4)], ids=str)
def test_attentive_models_learn_in_every_part(pool):
    task = replace(TASK, pool=pool, attentive=True)
    model = task.build()
    task.loss(model, task.batch(torch.arange(4))).backward()
    missed = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert [name for name in missed if "to_key.bias" not in name] == []


def test_nll_is_that_of_a_normal_distribution():
    mean, colours = torch.randn(2, 5, 7, 3, dtype=torch.float64)
    scale = torch.rand(5, 7, 3, dtype=torch.float64) + 0.1
    found = reconstruction.nll(mean, scale, colours)
    assert_close(found, -Normal(mean, scale).log_prob(colours).mean())
    sharpest = reconstruction.nll(mean, torch.full_like(mean, 0.1), mean)
    assert sharpest.item() == pytest.approx(-1.384, abs=1e-3)


def test_the_loss_falls():
    torch.manual_seed(0)
    task = replace(TASK, pool=SLOTS, targets=60, normalise=True, standardise=True)
    model = task.build()
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    losses = []
    for _ in range(25):
        optimiser.zero_grad()
        loss = task.loss(model, task.batch(torch.randint(task.items(), (8,))))
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < losses[0] - 0.2


# ---- gradients of folds --------------------------------------------------------------------


def gradients(task, model, batch):
    torch.manual_seed(3)
    model.zero_grad()
    task.loss(model, batch).backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("pool", [SLOTS, Transformer(1, num_inducing=4)], ids=["slots", "isab"])
@pytest.mark.parametrize("gradient", ["exact", "autograd"])
def test_folds_have_the_gradients_of_whole_sets(pool, gradient):
    task = replace(TASK, pool=pool, gradient=gradient, chunk=20)
    batch, whole = in_double(task.batch(torch.arange(3))), replace(task, gradient=None, chunk=None)
    found, expected = (gradients(t, built(t).train(), batch) for t in (task, whole))
    assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("gradient", ["unbiased", "subset"])
def test_estimates_are_other_gradients(gradient):
    task = replace(TASK, pool=SLOTS, gradient=gradient, chunk=10)
    batch, whole = in_double(task.batch(torch.arange(3))), replace(task, gradient=None, chunk=None)
    found, expected = (gradients(t, built(t).train(), batch) for t in (task, whole))
    assert not torch.allclose(found[0], expected[0], rtol=1e-2)
    all_chunks = replace(task, samples=5)  # which are the whole set
    found = gradients(all_chunks, built(all_chunks).train(), batch)
    assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_only_training_folds_by_estimates():
    task = replace(TASK, gradient="subset", chunk=10)
    model = built(task, torch.float32)
    assert task.evaluate(model, "test") == replace(TASK).evaluate(model, "test")


# ---- evaluation ----------------------------------------------------------------------------


def test_evaluation_is_over_all_pixels_of_all_images(monkeypatch):
    monkeypatch.setattr(reconstruction, "IMAGES", 5)  # of 16, so that the last block is smaller
    model, total = built(TASK), []
    blocks = list(TASK.blocks("test"))
    assert [len(block.pixels) for block in blocks] == [5, 5, 5, 1]
    for number, picture in enumerate(images()):
        block, place = blocks[number // 5], number % 5
        row, column = (block.pixels[place, :50, :2] * 32).round().long().T
        assert len({*zip(row.tolist(), column.tolist(), strict=True)}) == 50
        colours = torch.from_numpy(picture / 127.5 - 1)
        context = torch.stack([row / 32, column / 32, *colours[row, column].T], 1).unsqueeze(0)
        places = torch.tensor([[r / 32, c / 32] for r in range(32) for c in range(32)]).double()
        mean, scale = by_hand(model, context.numpy(), places.unsqueeze(0).numpy())
        normal = Normal(torch.from_numpy(mean[0]), torch.from_numpy(scale[0]))
        total.append(-normal.log_prob(colours.view(1024, 3)).mean().item())
    found = TASK.evaluate(model.float(), "test")
    assert found == {"nll": pytest.approx(np.mean(total), rel=1e-5)}


def test_evaluation_is_always_the_same_and_leaves_no_trace(monkeypatch):
    model = built(TASK, torch.float32)
    torch.manual_seed(0)
    before, found = torch.get_rng_state(), TASK.evaluate(model, "validation")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    monkeypatch.setattr(reconstruction, "IMAGES", 3)  # nor do blocks matter
    assert TASK.evaluate(model, "validation")["nll"] == pytest.approx(found["nll"], rel=1e-6)
    assert TASK.evaluate(model, "test")["nll"] != pytest.approx(found["nll"], rel=1e-3)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("pool", [SLOTS, Slots(8), DeepSets("max"), PMA(), Transformer(1)], ids=str)
def test_a_stream_is_what_was_seen_of_it(pool):
    task = replace(TASK, pool=pool, normalise=True)
    model = built(task, torch.float32)
    found = reconstruction.streamed_nll(model, task, chunk=40, steps=3)
    assert found["pixels"] == [40, 80, 120]
    for pixels, value in zip(found["pixels"], found["nll"], strict=True):
        whole = replace(task, context=int(pixels)).evaluate(model, "test")["nll"]
        assert value == pytest.approx(whole, rel=1e-5)
    assert found["consistency error"] < 1e-5


def test_an_average_over_chunks_is_consistent_for_means_only():
    for pool, consistent in ((DeepSets("mean"), True), (Transformer(1), False)):
        task = replace(TASK, pool=pool)
        model = built(task, torch.float32)
        with torch.no_grad():  # what is wrong should be seen in a model that was not trained, too
            for parameter in model.encoder.parameters():
                parameter.mul_(2)
        found = reconstruction.chunk_and_average_nll(model, task, chunks=(5, 10))
        assert found["nll"] == task.evaluate(model, "test")["nll"]
        assert found["chunk"] == [5, 10]
        for averaged, folded in zip(found["averaged"], found["folded"], strict=True):
            assert (averaged == pytest.approx(found["nll"], rel=1e-5)) == consistent
            assert folded == pytest.approx(found["nll"], rel=1e-5)


# ---- what is refused -----------------------------------------------------------------------


@pytest.mark.parametrize("odd", [{"gradient": "exact"}, {"chunk": 10}])
def test_a_fold_needs_gradient_and_chunk(odd):
    with pytest.raises(setfold.InputError, match="both gradient and chunk, otherwise neither"):
        replace(TASK, **odd)


def test_an_attentive_decoder_needs_slots():
    with pytest.raises(setfold.InputError, match="DeepSets has none"):
        replace(TASK, attentive=True).build()


def test_no_more_pixels_than_there_are():
    with pytest.raises(setfold.InputError, match=r"(only|of) 1024"):
        replace(TASK, context=1025).batch(torch.arange(2))


@pytest.mark.skipif("SETFOLD_DATA" not in os.environ, reason="needs CelebA")
def test_the_real_images_can_be_learned_from():
    task = replace(TASK, made_up=False)
    assert task.items() >= 8000
    assert task.loss(task.build(), task.batch(torch.arange(4))).isfinite()
