"""`setfold.fit` beside a loop that is written down once more."""

from __future__ import annotations

import copy
import math
import signal

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import setfold
from setfold.learning import loop
from setfold.learning.seeds import Draw, seed_for
from tests.torchrun import fork


def make_sets(number=20, most=30, seed=0):
    random = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, most, (number,), generator=random).tolist()
    return [(torch.randn(n, 3, generator=random) + i % 2, i % 2) for i, n in enumerate(sizes)]


def make_model(dropout=0.0, dtype=torch.float32):
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 2))
    return setfold.DeepSets(nn.Linear(3, 8), 8, "mean", head).to(dtype)


def by_hand(model, sets, settings, optimizer, loss=cross_entropy):
    """Plain PyTorch: one ragged batch per step, no validation."""
    per_epoch = math.ceil(len(sets) / settings.batch_sets)
    rates = [group["lr"] for group in optimizer.param_groups]
    model.train()
    for step in range(settings.epochs * per_epoch):
        epoch, place = divmod(step, per_epoch)
        order = torch.Generator().manual_seed(seed_for(Draw.ORDER, settings.seed, epoch))
        chosen = torch.randperm(len(sets), generator=order).tensor_split(per_epoch)[place]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * settings.schedule(step / (settings.epochs * per_epoch))
        batch = setfold.collate([sets[number] for number in chosen])
        found = model(batch.elements, index=batch.index, batch_size=batch.batch_size)
        optimizer.zero_grad()
        loss(found, batch.labels).backward()
        if settings.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
    return model.eval()


def assert_same_bits(one, two):
    theirs = two.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items())


# ---- what is computed --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"clip": None, "schedule": lambda progress: 1.0},
        {"clip": 0.01},
        {"schedule": lambda progress: 1 - progress, "seed": 3, "batch_sets": 7},
    ],
    ids=["default", "plain", "clipped", "linear"],
)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD], ids=["AdamW", "SGD"])
def test_weights_are_those_of_a_plain_loop_to_the_last_bit(changes, kind):
    sets, settings = make_sets(), setfold.FitSettings(**{"epochs": 3, "batch_sets": 8} | changes)
    one, two = make_model(), make_model()
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {"weight_decay": 0.1}
    expected = by_hand(two, sets, settings, kind(two.parameters(), 0.05, **options))
    setfold.fit(
        one,
        sets,
        loss=cross_entropy,
        settings=settings,
        optimizer=kind(one.parameters(), 0.05, **options),
    )
    assert_same_bits(one, expected)
    assert not one.training


@pytest.mark.parametrize("rows", [1, 7, 25])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_large_sets_are_folded_and_batches_split_without_effect(rows, reduction):
    sets = [(elements.double(), float(label)) for elements, label in make_sets()]

    def loss(found, wanted):
        return mse_loss(found[:, 0], wanted, reduction=reduction)

    models = []
    for batch_rows in (rows, 1 << 20):
        model = make_model(dtype=torch.float64)
        settings = setfold.FitSettings(epochs=2, batch_sets=8, batch_rows=batch_rows)
        models.append((setfold.fit(model, sets, loss=loss, settings=settings), model))
    (history, one), (other, two) = models
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(tensor, two.state_dict()[name], rtol=1e-9, atol=1e-12)
    assert history["loss"] == pytest.approx(other["loss"])


def test_arrays_and_mapped_files_are_sets_too(tmp_path):
    tensors = make_sets()
    np.save(tmp_path / "all.npy", np.concatenate([elements for elements, _ in tensors]))
    mapped = np.load(tmp_path / "all.npy", mmap_mode="r")
    ends = np.cumsum([0] + [len(elements) for elements, _ in tensors])
    pieces = [(mapped[ends[i] : ends[i + 1]], label) for i, (_, label) in enumerate(tensors)]
    models = []
    for sets in (tensors, pieces, [(np.array(elements), label) for elements, label in pieces]):
        models.append(make_model())
        settings = setfold.FitSettings(epochs=2, batch_sets=8, batch_rows=20)
        setfold.fit(models[-1], sets, loss=cross_entropy, settings=settings)
    assert_same_bits(models[0], models[1])
    assert_same_bits(models[0], models[2])


def test_a_set_is_read_only_when_it_is_needed_if_lengths_are_known():
    class Data:
        def __init__(self):
            self.sets, self.read = make_sets(), []
            self.lengths = [len(elements) for elements, _ in self.sets]

        def __len__(self):
            return len(self.sets)

        def __getitem__(self, number):
            self.read.append(number)
            return self.sets[number]

    data, model = Data(), make_model()
    seen = []
    setfold.fit(
        model,
        data,
        loss=cross_entropy,
        settings=setfold.FitSettings(epochs=1, batch_sets=10),
        callback=lambda now: seen.append(len({*data.read})),
    )
    assert seen[0] == 10  # callbacks are called after the first step


# ---- validation --------------------------------------------------------------------------------


def test_the_best_weights_are_kept_and_patience_ends_a_training():
    values = iter([5.0, 3.0, 4.0, 3.0, 9.0, 1.0])
    weights = []

    def validate(model):
        assert not model.training
        assert not torch.is_grad_enabled()
        weights.append(copy.deepcopy(model.state_dict()))
        return {"badness": next(values), "draw": torch.rand(()).item()}

    model = make_model(dropout=0.3)
    settings = setfold.FitSettings(epochs=9, patience=3)
    history = setfold.fit(
        model, make_sets(), loss=cross_entropy, validation=validate, settings=settings
    )
    assert history["badness"] == [5.0, 3.0, 4.0, 3.0, 9.0]
    assert history["epoch"] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert len({*history["draw"]}) == 1  # validations differ by the weights alone
    assert math.isnan(history["loss"][0])
    assert all(torch.equal(weights[1][n], t) for n, t in model.state_dict().items())
    assert not torch.equal(weights[1]["head.0.weight"], weights[2]["head.0.weight"])


@pytest.mark.parametrize("rows", [5, 1 << 20])
def test_validation_sets_have_the_same_loss(rows):
    sets, model = make_sets(), make_model()
    history = setfold.fit(
        model,
        sets[:12],
        loss=cross_entropy,
        validation=sets[12:],
        settings=setfold.FitSettings(epochs=2, batch_rows=rows),
    )
    assert len(history["validation loss"]) == 3
    batch = setfold.collate(sets[12:])
    with torch.no_grad():
        found = model(batch.elements, index=batch.index, batch_size=batch.batch_size)
    expected = cross_entropy(found, batch.labels).item()
    assert min(history["validation loss"]) == pytest.approx(expected, rel=1e-5)


# ---- callbacks ---------------------------------------------------------------------------------


def test_callbacks_see_every_validation_and_in_between(monkeypatch):
    monkeypatch.setattr(loop, "LOOK_EVERY", 0.0)
    sets, seen = make_sets(), []
    history = setfold.fit(
        make_model(),
        sets,
        loss=cross_entropy,
        validation=sets,
        settings=setfold.FitSettings(epochs=2, batch_sets=5),
        callback=lambda now: seen.append((now.step, now.epoch, now.validated, now.numbers)),
    )
    assert [step for step, *_ in seen] == list(range(1, 9))
    assert [epoch for _, epoch, *_ in seen] == [i / 4 for i in range(1, 9)]
    assert [step for step, _, validated, _ in seen if validated] == [4, 8]
    losses = [numbers["loss"] for *_, numbers in seen]
    assert history["loss"][1:] == pytest.approx([sum(losses[:4]) / 4, sum(losses[4:]) / 4])
    assert seen[5][3]["validation loss"] == history["validation loss"][1]


def test_a_callback_may_end_a_training_which_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "SAVE_EVERY", 0.0)
    monkeypatch.setattr(loop, "LOOK_EVERY", 0.0)

    def stop(now):
        if now.step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(make_model(0.2), tmp_path / "parts", callback=stop)
    parts, whole = make_model(0.2), make_model(0.2)
    train(parts, tmp_path / "parts")
    train(whole, tmp_path / "whole")
    assert_same_bits(parts, whole)


# ---- checkpoints -------------------------------------------------------------------------------


def train(model, path=None, epochs=5, **options):
    sets = make_sets()
    return setfold.fit(
        model,
        sets[:15],
        loss=cross_entropy,
        validation=sets[15:],
        settings=setfold.FitSettings(epochs=epochs, batch_sets=4, batch_rows=40),
        checkpoint=path,
        **options,
    )


@pytest.mark.parametrize("step", [1, 4, 9, 17])
def test_killed_and_resumed_it_ends_with_the_same_bits(tmp_path, step):
    def run():
        loop.SAVE_EVERY = loop.LOOK_EVERY = 0.0
        original = loop.Loop._step

        def fatal(self, batch):
            if self.standing.step == step:
                signal.raise_signal(signal.SIGKILL)
            original(self, batch)

        loop.Loop._step = fatal
        train(make_model(0.2), tmp_path / "parts")

    process = fork(run)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    whole, parts = make_model(0.2), make_model(0.2)
    history = train(whole)
    torch.manual_seed(77)  # the generator outside has no effect
    again = train(parts, tmp_path / "parts")
    assert_same_bits(parts, whole)
    assert again["loss"][1:] == history["loss"][1:]
    assert again["validation loss"] == history["validation loss"]
    loaded = make_model(0.2)
    assert train(loaded, tmp_path / "parts")["loss"][1:] == history["loss"][1:]
    assert_same_bits(loaded, whole)


def test_checkpoints_of_other_trainings_are_refused(tmp_path):
    train(make_model(), tmp_path / "file")
    for model, options in (
        (make_model(), {"epochs": 6}),
        (make_model(0.1), {}),
        (make_model(), {"optimizer": torch.optim.Adam}),
    ):
        if "optimizer" in options:
            options["optimizer"] = options["optimizer"](model.parameters())
        with pytest.raises(setfold.FileError, match="different settings"):
            train(model, tmp_path / "file", **options)


# ---- what goes wrong ---------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_is_named_with_its_step():
    calls = []

    def loss(found, wanted):
        calls.append(1)
        return cross_entropy(found, wanted) * (math.inf if len(calls) == 4 else 1)

    with pytest.raises(setfold.DivergedError, match=r"the loss is inf at step 3 of 10, in epoch 2"):
        setfold.fit(
            make_model(),
            make_sets(),
            loss=loss,
            settings=setfold.FitSettings(epochs=5, batch_sets=10),
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sets": []}, "nothing to train"),
        ({"sets": [torch.ones(3, 3)]}, "pairs of a set"),
        ({"sets": [([1.0, 2.0, 3.0], 1)]}, "pairs of a set"),
        ({"loss": lambda found, wanted: found}, "one number, or one for each of the 20 sets"),
        ({"loss": lambda found, wanted: 1.0}, "got float"),
        ({"validation": []}, "no validation sets"),
    ],
)
def test_wrong_arguments_are_explained(options, message):
    given = {"sets": make_sets(), "loss": cross_entropy} | options
    with pytest.raises(setfold.InputError, match=message):
        setfold.fit(make_model(), given.pop("sets"), **given)


@pytest.mark.parametrize(
    "settings",
    [{"epochs": 0}, {"batch_sets": 0}, {"patience": 0}, {"clip": 0.0}, {"schedule": 1.0}],
    ids=str,
)
def test_wrong_settings_are_explained(settings):
    with pytest.raises(setfold.InputError, match=next(iter(settings))):
        setfold.FitSettings(**settings)


def test_a_model_without_weights_is_refused():
    with pytest.raises(setfold.InputError, match="no trainable parameters"):
        setfold.fit(setfold.Pool(2, "mean"), [(torch.ones(3, 2), 0)], loss=lambda found, label: 0)
