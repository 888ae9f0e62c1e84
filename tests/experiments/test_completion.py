from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributions import Normal
from torch.testing import assert_close

import setfold
from experiments.data import celeba, mnist
from experiments.latents import Bottleneck, ConstantMemory
from experiments.places import Painting
from experiments.pools import DeepSets, Slots
from experiments.tasks import completion
from experiments.tasks.completion import (
    Attended,
    Completion,
    Everything,
    Latents,
    Painted,
    Vector,
)
from experiments.tasks.reconstruction import grid

READERS = {
    "vector": Vector(DeepSets()),
    "attended": Attended(Slots(8, slots="learned", similarity="cosine")),
    "everything": Everything(),
    "constant memory": Latents(ConstantMemory(16, 6, num_blocks=2)),
    "bottleneck": Latents(Bottleneck(16, 6, num_layers=2)),
    "places": Painted(Painting(16)),
    "few places": Painted(Painting(4)),
}
FACES = Completion(READERS["places"], fewest=10, most=60, targets=30, made_up=True)
DIGITS = replace(FACES, pictures="digits", side=28, reader=Painted(Painting(14)))


def built(task):
    torch.manual_seed(0)
    return task.build().eval()


def pictures(task, split):
    if task.pictures == "digits":
        found = mnist.load(made_up=True).images[split].unsqueeze(-1)
    else:
        found = celeba.load(side=task.side, made_up=True).pixels[split]
    return found.double().numpy() / 255 * 2 - 1


@pytest.mark.parametrize("task", [FACES, DIGITS], ids=["faces", "digits"])
def test_a_batch_holds_pixels_of_its_pictures(task):
    torch.manual_seed(0)
    items = torch.tensor([5, 3])
    context, positions, colours = task.batch(items)
    assert positions.shape == (2, 30)
    axis = grid(task.side, standardise=True)[: task.side, 1]
    for place, image in enumerate(pictures(task, "train")[items]):
        rows, columns = ((context[place, :, k, None] - axis).abs().argmin(1) for k in (0, 1))
        np.testing.assert_allclose(context[place, :, 2:], image[rows, columns], atol=1e-6)
        assert len({*zip(rows.tolist(), columns.tolist(), strict=True)}) == context.shape[1]
        seen = image.reshape(-1, image.shape[-1])[positions[place]]
        np.testing.assert_allclose(colours[place], seen, atol=1e-6)


def test_the_number_of_pixels_differs_from_step_to_step():
    torch.manual_seed(0)
    numbers = {FACES.batch(torch.arange(2)).context.shape[1] for _ in range(60)}
    assert len(numbers) > 20
    assert 10 <= min(numbers) < 15
    assert 45 < max(numbers) <= 60


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("base", [FACES, DIGITS], ids=["faces", "digits"])
def test_gradients_reach_every_parameter(base, reader):
    torch.manual_seed(0)
    task = replace(base, reader=READERS[reader])
    model = task.build()
    task.loss(model, task.batch(torch.arange(8))).backward()
    missed = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    # a softmax over elements does not see what is added to all logits
    assert [name for name in missed if "to_key.bias" not in name] == []


@pytest.mark.parametrize("reader", READERS)
@torch.no_grad()
def test_measurements_are_those_of_all_pixels(reader, monkeypatch):
    monkeypatch.setattr(completion, "IMAGES", 5)  # of 8, so that the last batch is smaller
    task = replace(FACES, reader=READERS[reader], tested=8)  # every second of 16
    model, numbers = built(task), (10, 40)
    found = task.completed(model, numbers)
    images = torch.tensor(pictures(task, "test")[::2]).flatten(1, 2)
    generator = torch.Generator().manual_seed(0)
    order = torch.stack([torch.randperm(1024, generator=generator) for _ in images])
    colours = images.float()[torch.arange(len(images))[:, None], order]
    pixels = torch.cat([grid(32, standardise=True)[order], colours], -1)
    everywhere = torch.arange(1024).expand(len(images), -1)
    assert found["pixels"] == [10.0, 40.0]
    for place, number in enumerate(numbers):
        mean, scale = model(pixels[:, :number], everywhere)
        likelihood = Normal(mean.double(), scale.double()).log_prob(images).mean().item()
        assert found["nll"][place] == pytest.approx(-likelihood, rel=1e-5)
        error = (mean.double() - images).square().mean().item()
        assert found["error"][place] == pytest.approx(error, rel=1e-5)


def test_all_models_are_measured_on_as_many_pictures_unless_a_task_says_otherwise(monkeypatch):
    model = built(FACES)
    fewer = replace(FACES, tested=4).completed(model, (10,))
    monkeypatch.setattr(completion, "TESTED", 4)
    assert FACES.completed(model, (10,)) == fewer
    assert replace(FACES, tested=16).completed(model, (10,)) != fewer


def test_validation_covers_the_numbers_of_training():
    task = replace(FACES, fewest=10, most=40)
    model = built(task)
    wanted = task.completed(model, (10, 20, 40), "validation")["nll"]
    assert task.evaluate(model, "validation") == {"nll": pytest.approx(sum(wanted) / 3)}


@pytest.mark.parametrize("task", [FACES, DIGITS, replace(FACES, reader=READERS["few places"])])
@torch.no_grad()
def test_slots_lie_where_their_pixels_are(task):
    """A pixel has the most weight in the cell that contains it, row by row."""
    model, side = built(task), task.side
    colours = 1 if task.pictures == "digits" else 3
    cells = task.reader.painting.side
    for row, column in ((0, 0), (1, side - 1), (side // 2, 3), (side - 1, side - 2)):
        element = torch.cat([grid(side, True)[row * side + column], torch.ones(colours)])
        density = model.encoder(element.view(1, 1, -1))[0, :, 0]
        assert int(density.argmax()) == row * cells // side * cells + column * cells // side


@torch.no_grad()
def test_predictions_are_of_the_pixels_that_were_asked_for():
    model, context = built(FACES), FACES.batch(torch.arange(2)).context
    positions = torch.tensor([[5, 700, 31], [1023, 0, 64]])
    whole = model(context, torch.arange(1024).expand(2, -1))
    for found, everywhere in zip(model(context, positions), whole, strict=True):
        for place in range(2):
            assert_close(found[place], everywhere[place, positions[place]])


def test_faces_have_32_or_64_pixels_on_a_side():
    with pytest.raises(setfold.InputError, match="got 28"):
        replace(FACES, side=28).items()
