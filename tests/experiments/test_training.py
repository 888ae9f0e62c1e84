from __future__ import annotations

import io
import threading
import time
from dataclasses import dataclass, replace

import pytest
import torch
from rich.console import Console

from experiments import training
from experiments.recipe import Cosine, Schedule, Training
from experiments.training import BusyError, train
from setfold import DivergedError, InputError
from setfold.core.persist import hold
from setfold.learning.seeds import Draw, seed_for, seed_torch
from tests.experiments.tiny import Line, Noise, checkpoint, fit, interrupt_at
from tests.torchrun import as_torchrun

CONSTANT = Schedule(())


def by_hand(wanted, steps):
    """Full-batch Adam, written down once more: what training must do to a Line."""
    torch.manual_seed(seed_for(Draw.WEIGHTS, wanted.seed))
    weight = wanted.task.build().weight.detach().clone()
    points, values = wanted.task.points()
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for step in range(steps):
        gradient = 2 * (points @ weight.T - values).T @ points / len(points)
        if wanted.clip is not None:
            gradient = gradient * min(1.0, wanted.clip / gradient.norm().item())
        rate = wanted.rate * wanted.schedule.at(step / steps)
        gradient = gradient + wanted.weight_decay * weight
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        scale = (second / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
        weight = weight - rate * first / (1 - 0.9 ** (step + 1)) / scale
    return weight


# ---- what is computed ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"schedule": Schedule((0.5,), 0.1)},
        {"schedule": Cosine(0.3)},
        {"clip": 0.5},
        {"weight_decay": 0.1},
        {"weight_decay": 0.0, "seed": 3},
    ],
    ids=str,
)
def test_steps_are_adams(tmp_path, changes):
    wanted = Training(Line(), 20, 24, 0.05, schedule=CONSTANT, validations=0)
    wanted = replace(wanted, **changes)
    expected = by_hand(wanted, 20)
    torch.testing.assert_close(fit(wanted, tmp_path).model.weight, expected)


def test_least_squares_are_found(tmp_path):
    wanted = Training(Line(), 60, 8, 0.2, weight_decay=0.0, schedule=Cosine())
    trained = fit(wanted, tmp_path)
    solution = torch.linalg.lstsq(*Line().points()).solution.T
    torch.testing.assert_close(trained.model.weight, solution, atol=1e-2, rtol=0)
    assert len(trained.history["error"]) == 20
    assert trained.history["epoch"] == [3.0 * (i + 1) for i in range(20)]


@dataclass(frozen=True)
class Watched(Line):
    """Notes the items of each batch."""

    def batch(self, items):
        BATCHES.append(items.tolist())
        return super().batch(items)


BATCHES: list[list[int]] = []


def test_epochs_see_every_item_once_in_even_batches(tmp_path):
    BATCHES.clear()
    fit(Training(Watched(count=25), 3, 8), tmp_path)
    epochs = [BATCHES[4 * i : 4 * i + 4] for i in range(3)]
    for epoch in epochs:
        assert sorted(item for batch in epoch for item in batch) == list(range(25))
        assert sorted(map(len, epoch)) == [6, 6, 6, 7]
    assert epochs[0] != epochs[1] != epochs[2]
    first = list(BATCHES)
    BATCHES.clear()
    fit(Training(Watched(count=25), 3, 8, seed=1), tmp_path)
    assert first != BATCHES


def test_random_numbers_follow_from_seed_use_and_step():
    seeds = {seed_for(use, seed, step) for use in Draw for seed in range(3) for step in range(5)}
    assert len(seeds) == len(Draw) * 15
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_for(Draw.STEP, 1, 11) != seed_for(Draw.STEP, 11, 1)


def test_random_numbers_stay_what_they_were():
    # Those of `printf "step 3 7 0" | b2sum --length 64` without the last bit: records rest on them.
    assert seed_for(Draw.STEP, 3, 7, 0) == 8_126_708_866_934_793_926
    assert seed_for(Draw.ORDER, 3, 2) == 8_080_282_621_237_166_892
    assert seed_for(Draw.WEIGHTS, 3) == 3_571_154_336_011_000_892


@dataclass(frozen=True)
class Seeded(Line):
    """Notes what each step and validation was seeded with."""

    def batch(self, items):
        SEEDS.append(torch.initial_seed())
        return super().batch(items)

    def evaluate(self, model, split):
        SEEDS.append(torch.initial_seed())
        return super().evaluate(model, split)


SEEDS: list[int] = []


def test_a_training_draws_by_its_seed_and_not_what_the_one_it_begins_with_drew(tmp_path):
    def drawn(wanted):
        SEEDS.clear()
        fit(wanted, tmp_path)
        return list(SEEDS)

    first = Training(Seeded(), 2, 24, seed=3, validations=1)
    steps = [seed_for(Draw.STEP, 3, step, 0) for step in range(2)]
    assert drawn(first) == [*steps, seed_for(Draw.VALIDATION, 3)]
    second = replace(first, start=first)
    third = replace(first, start=second)
    other = replace(third, seed=4)
    stages = [drawn(first), drawn(second), drawn(third), drawn(other)]
    assert [len(seeds) for seeds in stages] == [0, 3, 3, 3]  # the first was made before
    assert len({*steps, *stages[1], *stages[2], *stages[3]}) == 2 + 9


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_seeding_is_torchs(device):
    if device != "cpu" and not getattr(torch, device).is_available():
        pytest.skip(f"no {device} here")
    torch.manual_seed(5)
    expected = torch.rand(3), torch.rand(3, device=device)
    seed_torch(5, torch.device(device))
    found = torch.rand(3), torch.rand(3, device=device)
    assert all(map(torch.equal, expected, found))


def test_a_training_may_begin_with_the_weights_of_another(tmp_path, monkeypatch):
    first = Training(Line(), 2, 24, 0.05, schedule=CONSTANT, validations=0)
    stay = replace(first, rate=0.0, start=first, seed=1)  # ends where it began
    trained = fit(stay, tmp_path)
    torch.testing.assert_close(trained.model.weight, by_hand(first, 2))
    assert len(list((tmp_path / "trainings").iterdir())) == 2
    with monkeypatch.context() as patch:  # resumed: continues from its own weights
        interrupt_at(patch, 1)
        with pytest.raises(KeyboardInterrupt):
            fit(replace(first, start=first, seed=2), tmp_path)
    resumed, whole = (
        fit(replace(first, start=first, seed=2), out) for out in (tmp_path, tmp_path / "whole")
    )
    assert torch.equal(resumed.model.weight, whole.model.weight)
    assert not torch.equal(resumed.model.weight, trained.model.weight)


# ---- validation ----------------------------------------------------------------------------

SCORES: list[float] = []


@dataclass(frozen=True)
class Scored(Line):
    """Returns given validation metrics, and stores the validated weights."""

    def evaluate(self, model, split):
        super().evaluate(model, split)
        assert split == "validation"
        WEIGHTS.append(model.weight.clone())
        DRAWS.append(torch.rand(()).item())
        return {"error": SCORES[len(WEIGHTS) - 1]}


@dataclass(frozen=True)
class ScoredUpwards(Scored):
    larger_is_better = True


WEIGHTS: list[torch.Tensor] = []
DRAWS: list[float] = []


@pytest.fixture
def scores():
    def set_scores(*scores):
        for notes in (SCORES, WEIGHTS, DRAWS):
            notes.clear()
        SCORES.extend(scores)

    return set_scores


@pytest.mark.parametrize(("task", "best"), [(Scored(), 2), (ScoredUpwards(), 0)])
def test_the_best_weights_are_kept(tmp_path, scores, task, best):
    scores(5.0, 3.0, 1.0, 1.0, 4.0)
    trained = fit(Training(task, 5, 8, validations=5), tmp_path)
    assert trained.history["error"] == SCORES
    assert torch.equal(trained.model.weight, WEIGHTS[best])
    assert not torch.equal(WEIGHTS[best], WEIGHTS[best + 1])
    assert not trained.model.training
    assert len(set(DRAWS)) == 1  # validations differ by the weights alone


def test_patience_ends_a_training(tmp_path, scores):
    scores(3.0, 2.0, 2.5, 2.0, 1.0)
    trained = fit(Training(Scored(), 5, 8, validations=5, patience=2), tmp_path)
    assert trained.history["epoch"] == [1.0, 2.0, 3.0, 4.0]
    assert torch.equal(trained.model.weight, WEIGHTS[1])


def test_without_validation_the_last_weights_are_kept(tmp_path, scores):
    scores()
    trained = fit(Training(Scored(), 4, 24, 0.05, schedule=CONSTANT, validations=0), tmp_path)
    assert set(trained.history) == {"epoch", "loss"}
    assert trained.history["epoch"] == [4.0]
    assert WEIGHTS == []


def test_the_loss_in_the_history_is_a_mean(tmp_path):
    # With a rate of zero the weights stay, and the mean over batches is that over all items.
    trained = fit(Training(Line(), 2, 8, 0.0, validations=2), tmp_path)
    assert trained.history["loss"] == pytest.approx(trained.history["error"])


# ---- what goes wrong -----------------------------------------------------------------------


@dataclass(frozen=True)
class Diverging(Line):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        COUNT.append(1)
        return loss * float("nan") if len(COUNT) == 5 else loss

    def evaluate(self, model, split):
        return {"error": float("nan")}


COUNT: list[int] = []


def test_a_loss_that_is_not_a_number_is_named_with_its_step(tmp_path):
    COUNT.clear()
    with pytest.raises(DivergedError, match=r"loss is nan at step 4 of 9, in epoch 2.*Diverging"):
        fit(Training(Diverging(), 3, 8, validations=1), tmp_path)


def test_a_metric_that_is_not_a_number_is_an_error(tmp_path):
    COUNT.extend([1] * 5)
    with pytest.raises(DivergedError, match=r"the error is nan at step 3 of 9"):
        fit(Training(Diverging(), 3, 8, validations=3), tmp_path)


@pytest.mark.parametrize("wanted", [Training(Line(), 0), Training(Line(count=0))])
def test_nothing_to_train_is_an_error(tmp_path, wanted):
    with pytest.raises(InputError, match="nothing to train"):
        fit(wanted, tmp_path)


# ---- several processes ---------------------------------------------------------------------


def test_one_process_waits_for_another(tmp_path, monkeypatch):
    wanted = Training(Line(), 1, 8)
    folder = tmp_path / "trainings" / f"line-{wanted.key}"
    monkeypatch.setattr(training, "ASK_EVERY", 0.01)
    asked, original = [], training.hold_together

    def asking(*arguments):
        asked.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(training, "hold_together", asking)
    text = io.StringIO()
    console = Console(file=text)
    waiting = threading.Thread(target=lambda: train(wanted, out=tmp_path, console=console))
    with hold(folder / "lock", wait=True):
        with pytest.raises(BusyError, match="another process"):
            fit(wanted, tmp_path, wait=False)
        waiting.start()
        while len(asked) < 5 and waiting.is_alive():
            time.sleep(0.01)
        assert len(asked) >= 5
        assert not checkpoint(folder).exists()
    waiting.join()
    assert checkpoint(folder).exists()
    assert text.getvalue().count("waiting for another process") == 1


def test_processes_train_as_one(tmp_path):
    # Full batches, so that the order does not matter; 25 items are shared as 13 and 12. A
    # parameter without gradient must not keep the processes waiting for one.
    wanted = Training(Line(count=25, idle=True), 10, 25, 0.05, schedule=CONSTANT, validations=2)
    codes = as_torchrun(fit, wanted, tmp_path)
    assert codes == [0, 0]
    together = fit(wanted, tmp_path)  # finds it
    alone = fit(wanted, tmp_path / "alone")
    torch.testing.assert_close(together.model.weight, alone.model.weight)
    torch.testing.assert_close(together.model.weight, by_hand(wanted, 10))
    assert together.history["epoch"] == [5.0, 10.0]
    assert together.history["error"] == pytest.approx(alone.history["error"])


# ---- what it runs on -----------------------------------------------------------------------


def test_mixed_precision_rounds_products_but_not_inputs(tmp_path):
    fit(Training(Noise(), 1, 8), tmp_path, precision="bf16-mixed")  # refuses elements of 16 bits
    wanted = Training(Line(), 1, 24, 0.0, validations=1)
    full, mixed = (
        fit(wanted, tmp_path / precision, precision=precision).history["loss"][0]
        for precision in ("32-true", "bf16-mixed")
    )
    assert mixed != full
    assert mixed == pytest.approx(full, rel=0.05)


def test_precisions_do_not_share_weights(tmp_path):
    wanted = Training(Line(), 2, 24, start=Training(Line(), 1, 24))
    full, mixed = (
        fit(wanted, tmp_path, precision=precision) for precision in ("32-true", "bf16-mixed")
    )
    assert mixed.folder.name == f"{full.folder.name}-bf16-mixed"
    assert not torch.equal(full.model.weight, mixed.model.weight)
    assert len(list((tmp_path / "trainings").iterdir())) == 4  # nor those they begin with


@pytest.mark.parametrize("options", [{"device": "abacus"}, {"precision": "8-true"}], ids=str)
def test_what_is_not_there_is_an_error(tmp_path, options):
    with pytest.raises(InputError, match=r"available: |must be one of"):
        train(Training(Line()), out=tmp_path, **options)


def test_threads_are_set(tmp_path):
    before = torch.get_num_threads()
    try:
        fit(Training(Line(), 1), tmp_path, threads=before + 1)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
