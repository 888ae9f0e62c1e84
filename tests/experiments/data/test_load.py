import os

import pytest
import torch

from experiments.data import MissingDataError, celeba, mnist, modelnet40, store, tiny_imagenet
from experiments.data.prepare import DATASETS
from setfold import FileError
from tests.experiments.data.making import LOADERS

needs_data = pytest.mark.skipif(store.FOLDER not in os.environ, reason="SETFOLD_DATA is not set")


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_a_double_is_always_the_same(load, monkeypatch):
    monkeypatch.delenv(store.FOLDER, raising=False)
    first = load(made_up=True)
    load.cache_clear()
    second = load(made_up=True)
    for one, other in zip(first, second, strict=True):
        if isinstance(one, dict):
            assert list(one) == ["train", "validation", "test"]
            assert all(torch.equal(one[split], other[split]) for split in one)
        else:
            assert one == other


def test_doubles_have_the_types_of_the_data():
    clouds = modelnet40.load(made_up=True)
    assert clouds.points["train"].shape == (64, 256, 3)
    assert clouds.points["train"].dtype == torch.float32
    assert clouds.labels["train"].unique().tolist() == list(range(len(clouds.classes)))
    for points in clouds.points.values():
        torch.testing.assert_close(points.norm(dim=-1).amax(1), torch.ones(len(points)))
    for side in (32, 64):
        pixels = celeba.load(side=side, made_up=True).pixels
        assert pixels["train"].shape == (96, side, side, 3)
        assert pixels["test"].dtype == torch.uint8
    digits = mnist.load(made_up=True)
    assert digits.images["train"].shape[1:] == (28, 28)
    assert digits.images["train"].dtype == torch.uint8
    assert digits.labels["test"].unique().tolist() == list(range(10))
    found = tiny_imagenet.load(made_up=True)
    assert found.features["train"].shape[1:] == (256,)
    assert found.labels["train"].unique().tolist() == list(range(len(found.names)))


@pytest.mark.parametrize(
    ("inputs", "labels"),
    [
        (mnist.load(made_up=True).images, mnist.load(made_up=True).labels),
        (tiny_imagenet.load(made_up=True).features, tiny_imagenet.load(made_up=True).labels),
        (
            # Of clouds, something that does not depend on the order of points.
            {
                split: points.abs().sort(1).values
                for split, points in modelnet40.load(made_up=True).points.items()
            },
            modelnet40.load(made_up=True).labels,
        ),
    ],
    ids=["mnist", "tiny_imagenet", "modelnet40"],
)
def test_classes_of_doubles_can_be_learned(inputs, labels):
    train = inputs["train"].flatten(1).float()
    distances = torch.cdist(inputs["test"].flatten(1).float(), train)
    guessed = labels["train"][distances.argmin(1)]
    assert (guessed == labels["test"]).float().mean() > 0.7


@pytest.mark.parametrize("name", LOADERS)
def test_missing_data_says_what_to_do(name, folder, monkeypatch):
    command = f"python -m experiments prepare {name} "
    with pytest.raises(MissingDataError, match=command) as caught:
        LOADERS[name]()
    assert str(folder / f"{name}.safetensors") in str(caught.value)
    assert DATASETS[name].help in str(caught.value)
    assert "http" in DATASETS[name].help
    assert "research" in DATASETS[name].help
    monkeypatch.delenv(store.FOLDER)
    with pytest.raises(MissingDataError, match="SETFOLD_DATA is not set") as caught:
        LOADERS[name]()
    assert command in str(caught.value)
    assert isinstance(caught.value, FileError)


@needs_data
@pytest.mark.parametrize("name", LOADERS)
def test_real_data_is_as_it_should_be(name):
    data = LOADERS[name]()
    for field in data:
        if isinstance(field, dict):
            assert list(field) == ["train", "validation", "test"]
    if name == "modelnet40":
        assert len(data.classes) == 40
        assert data.points["train"].shape[1:] == (2048, 3)
        for points in data.points.values():
            assert points.norm(dim=-1).max() <= 1.001
        assert 0.09 < len(data.labels["validation"]) / len(data.labels["train"]) < 0.12
        assert all(len(labels.unique()) == 40 for labels in data.labels.values())
    elif name == "celeba":
        assert data.pixels["train"].shape[1:] == (64, 64, 3)
        means = {split: some[:1000].float().mean() for split, some in data.pixels.items()}
        assert all(90 < mean < 130 for mean in means.values())
    elif name == "mnist":
        assert [len(images) for images in data.images.values()] == [55_000, 5_000, 10_000]
        assert data.labels["validation"].bincount().min() > 440
    else:
        assert data.features["train"].shape[1] == 256
        assert data.labels["validation"].bincount().unique().tolist() == [50]
        assert data.labels["train"].bincount().unique().tolist() == [450]
