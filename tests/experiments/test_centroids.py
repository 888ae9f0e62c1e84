import os

import pytest
import torch
from torch import nn

import setfold
from experiments.pools import DeepSets, Pool, Slots, Transformer
from experiments.tasks.centroids import (
    Centroids,
    DigitCentroids,
    FeatureCentroids,
    absorbed,
    accuracy,
    accuracy_key,
    encoded,
)

APART = Slots(8, slots="learned", similarity="cosine")
POOLS = [DeepSets(), APART, Slots(4), Slots(16, apart=False), Slots(8, aggregate="max")]


def features(pool: Pool, **settings: int) -> FeatureCentroids:
    return FeatureCentroids(pool, way=5, support=3, query=2, made_up=True, **settings)


def digits(pool: Pool) -> DigitCentroids:
    return DigitCentroids(pool, way=4, support=3, query=2, made_up=True)


def labels_of(task: Centroids, rows: torch.Tensor) -> torch.Tensor:
    """The labels of training items, found by comparing them one by one."""
    items, labels = (part["train"] for part in task.data())
    prepared = task.prepared(items)
    found = [int((prepared == row).flatten(1).all(1).nonzero()[0]) for row in rows]
    return labels[found]


@pytest.mark.parametrize("task", [features(DeepSets()), digits(DeepSets())], ids=["f", "d"])
def test_an_episode_has_other_items_of_other_classes(task: Centroids) -> None:
    torch.manual_seed(0)  # two synthetic digits can be equal
    batch = task.batch(torch.arange(2))
    assert batch.shape[:3] == (2, task.way, 5)
    assert batch.dtype == torch.float32
    for episode in batch:
        labels = labels_of(task, episode.flatten(0, 1)).view(task.way, 5)
        assert bool((labels == labels[:, :1]).all())
        assert len(labels[:, 0].unique()) == task.way
        assert len(episode.flatten(0, 1).flatten(1).unique(dim=0)) == task.way * 5
    assert not torch.equal(batch[0], batch[1])


@pytest.mark.parametrize("pool", POOLS, ids=repr)
def test_the_loss_is_that_of_a_plain_loop(pool: Pool) -> None:
    task = features(pool)
    model = task.build().eval()
    batch = task.batch(torch.arange(2))
    losses = []
    for episode in batch:
        centroids = [model(each[:3].unsqueeze(0))[0] for each in episode]
        for label, each in enumerate(episode):
            for query in each[3:]:
                encoding = model(query.view(1, 1, -1))[0]
                logits = torch.stack([-((encoding - c) ** 2).sum() for c in centroids])
                losses.append(logits.logsumexp(0) - logits[label])
    assert torch.allclose(task.loss(model, batch), torch.stack(losses).mean(), rtol=1e-4, atol=1e-6)


def test_random_slots_are_the_same_for_centroids_and_queries() -> None:
    task = features(Slots(8))
    model = task.build().train()
    batch = task.batch(torch.arange(1))
    same = batch[:, :, :1].expand(-1, -1, 5, -1)  # each query is what its class consists of
    centroids, queries = task.encode(model, same)
    assert torch.allclose(queries.view(1, 5, 2, -1)[:, :, 0], centroids, atol=1e-5)


def test_features_run_once_for_supports_and_queries() -> None:
    task = digits(DeepSets())
    model = task.build()
    calls: list[int] = []
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    first.register_forward_hook(lambda *given: calls.append(len(given[1][0])))
    task.loss(model, task.batch(torch.arange(2))).backward()
    assert calls == [2 * 4 * 5]


@pytest.mark.parametrize("task", [*map(features, POOLS), digits(APART)], ids=repr)
@torch.no_grad()
def test_streamed_centroids_are_whole_ones(task: Centroids) -> None:
    model = task.build().eval()
    assert isinstance(model, setfold.StreamingSetEncoder)
    items, labels = task._supports("validation")
    states = task._states(model, [4, 1000], "validation", torch.Generator().manual_seed(3))
    few, everything = (model.readout(state) for _, state in states)
    generator = torch.Generator().manual_seed(3)
    for label in range(len(few)):
        whole = task.prepared(items[labels == label])
        first = whole[torch.randperm(len(whole), generator=generator)[:4]]
        for found, elements in ((few, first), (everything, whole)):
            expected = model(elements.unsqueeze(0))[0]
            assert torch.allclose(found[label], expected, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_chunks_of_any_size_give_the_same_state(monkeypatch: pytest.MonkeyPatch) -> None:
    task = features(APART)
    model = task.build().eval()
    assert isinstance(model, setfold.StreamingSetEncoder)
    items, labels = (part["train"] for part in task.data())
    read = []
    for chunk in (7, 10_000):
        monkeypatch.setattr("experiments.tasks.centroids.CHUNK", chunk)
        state = absorbed(model, task, model.initial_state(20), items, labels)
        assert state.count.tolist() == [40] * 20
        read.append(model.readout(state))
        assert encoded(model, task, items).shape == (800, 128)
    assert torch.allclose(*read, atol=1e-6)


def test_accuracy_is_that_of_a_plain_loop() -> None:
    torch.manual_seed(0)
    distances, labels = torch.rand(60, 6), torch.randint(6, (60,))
    hits = [int(row.argmin()) == int(label) for row, label in zip(distances, labels, strict=True)]
    assert accuracy(distances, labels, 6, torch.Generator()) == pytest.approx(sum(hits) / 60)
    found, generator = [], torch.Generator().manual_seed(5)
    for _ in range(10):
        chosen = torch.randperm(6, generator=generator)[:2].tolist()
        pairs = [(r, int(c)) for r, c in zip(distances, labels, strict=True) if int(c) in chosen]
        found.append(sum(min(chosen, key=lambda k: r[k]) == c for r, c in pairs) / len(pairs))
    drawn = accuracy(distances, labels, 2, torch.Generator().manual_seed(5))
    assert drawn == pytest.approx(sum(found) / 10)


def test_more_supports_and_fewer_classes_make_it_easier() -> None:
    task = features(DeepSets(), layers=2)
    torch.manual_seed(0)
    found = task.growing(task.build().eval(), supports=(1, 50), ways=(5, 20), draws=2)
    assert found["supports"] == [1.0, 50.0]
    narrow, wide = found[accuracy_key(5)], found[accuracy_key(20)]
    assert isinstance(narrow, list)
    assert isinstance(wide, list)
    assert 0.1 < wide[0] < wide[1] <= 1
    assert wide[0] < narrow[0]


def test_evaluation_repeats_itself() -> None:
    task = features(APART)
    model = task.build().eval()
    assert task.evaluate(model, "validation") == task.evaluate(model, "validation")


def test_a_picture_fits_into_a_record() -> None:
    task = features(DeepSets())
    found = task.picture(task.build().eval(), classes=5, queries=50)
    lengths = {name: len(values) for name, values in found.items() if isinstance(values, list)}
    both = {f"{name}, {axis}": n for name, n in SHOWN.items() for axis in "xy"}
    assert lengths == {"labels": 50, **both}
    assert all(value == round(value, 3) for value in _listed(found["queries, x"]))


SHOWN = {"queries": 50, "one support": 5, "all supports": 5}


def _listed(values: float | list[float]) -> list[float]:
    assert isinstance(values, list)
    return values


def test_encoders_of_several_passes_are_refused() -> None:
    task = features(Transformer(num_layers=1))
    with pytest.raises(TypeError, match=r"in one pass .*got LayeredSetEncoder"):
        task.growing(task.build().eval(), supports=(1,), ways=(20,))


def test_more_items_than_a_class_has_are_refused() -> None:
    task = FeatureCentroids(DeepSets(), support=50, made_up=True)
    with pytest.raises(ValueError, match="cannot draw 52 elements of a class that has 40"):
        task.batch(torch.arange(1))


@pytest.mark.skipif("SETFOLD_DATA" not in os.environ, reason="needs real data")
@torch.no_grad()
def test_raw_features_give_the_known_accuracy() -> None:
    task = FeatureCentroids(DeepSets())
    items, labels = task._supports("test")
    centroids = torch.stack([items[labels == label].mean(0) for label in range(200)])
    queries, truth = task.queries("test")
    found = accuracy(torch.cdist(queries, centroids), truth, 200, torch.Generator())
    assert found == pytest.approx(0.514, abs=0.005)  # nearest class means of all supports
