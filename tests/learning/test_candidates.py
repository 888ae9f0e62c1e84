"""Candidates beyond plain statistics: places, instances, folds; and what explains a prediction."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

import setfold
from setfold import cli
from setfold.learning.baselines import fit_scales, statistics_of
from setfold.learning.candidates import Design, build_model, build_plain
from setfold.learning.dataset import SetDataset
from setfold.learning.metrics import loss_of
from setfold.learning.positions import choose_position
from setfold.learning.search import Material, Settings, search
from setfold.learning.splits import TRAINING, split


def number_columns(*names, missing=()):
    return setfold.Columns([setfold.NumberColumn(n, missing=n in missing) for n in names])


def bags(sets=60, seed=0):
    """Sets that are positive if one of their elements is large."""
    random = np.random.default_rng(seed)
    lengths = random.integers(3, 9, sets)
    elements = random.standard_normal((lengths.sum(), 3)).astype(np.float32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    targets = np.arange(sets) % 2
    witnesses = offsets[:-1] + random.integers(0, lengths)
    elements[witnesses[targets == 1], 0] += 8
    return SetDataset([f"s{i}" for i in range(sets)], elements, offsets, targets), witnesses


# ---- positions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["z", "y", "x", "ink"], ["x", "y", "z"]),
        (["X", "Y"], ["X", "Y"]),
        (["ink", "column", "row"], ["row", "column"]),
        (["x", "ink"], []),
        (["amount", "price"], []),
    ],
    ids=str,
)
def test_positions_are_recognized_by_name(names, expected):
    assert choose_position(None, number_columns(*names)) == expected


def test_positions_are_numbers_that_are_always_there():
    columns = number_columns("x", "y", missing=["y"])
    assert choose_position(None, columns) == []
    with pytest.raises(setfold.InputError, match="'y' must be a number that is never missing"):
        choose_position(["x", "y"], columns)
    with pytest.raises(setfold.InputError, match="'z' is not among"):
        choose_position(["z"], columns)


def test_the_grid_covers_the_positions():
    data, _ = bags()
    columns = number_columns("ink", "x", "y")
    design = Design(columns, setfold.Classes("k", ["a", "b"]), position=["x", "y"])
    statistics = statistics_of(build_plain(design), data, 1 << 15)
    low, high = design.bounds(statistics)
    inside = (data.elements[:, 1:] >= low) & (data.elements[:, 1:] <= high)
    assert inside.mean() > 0.95
    model = build_model("places", design, statistics)
    fit_scales(model, statistics_of(model, data, 1 << 15))
    assert model(torch.from_numpy(data.elements[None, :9])).shape == (1, 2)


def test_four_positions_are_too_many():
    data, _ = bags()
    columns = number_columns("a", "b", "c")
    design = Design(columns, setfold.Classes("k", ["a", "b"]))
    statistics = statistics_of(build_plain(design), data, 1 << 15)
    with pytest.raises(setfold.InputError, match="--position"):
        build_model("places", design, statistics)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_a_grid_head_begins_as_its_linear_model(axes, tmp_path):
    torch.manual_seed(0)
    head = setfold.GridHead(3, 2, (5, 4, 6)[:axes], 4, hidden=8).eval()
    values = torch.randn(7, 3 + 2 * head.cells)
    assert torch.equal(head(values), head.linear(values[:, :3]))
    torch.nn.init.normal_(head.network[-1].weight)
    moved = values.roll(2, 1)
    assert not torch.allclose(head(values) - head.linear(values[:, :3]), torch.zeros(()))
    assert not torch.allclose(head(values), head(moved))
    pool = setfold.Composition(setfold.Pool(values.shape[1]), None, head).eval()
    setfold.save(pool, tmp_path / "model.safetensors")
    again = setfold.load(tmp_path / "model.safetensors").eval()
    assert torch.equal(again(values.unsqueeze(1)), pool(values.unsqueeze(1)))


# ---- folds -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["statistics", "deep-sets"])
def test_every_set_is_held_out_once(name):
    data, _ = bags()
    folds = split(None, data.targets, (0.2, 0.0), 3, seed=0)
    assert np.bincount(folds).tolist() == [20, 20, 20]
    target = setfold.Classes("k", ["a", "b"])
    design = Design(number_columns("a", "b", "c"), target)
    material = Material(data, folds, data.chosen(np.arange(0)))
    found = search([name], design, material, Settings(), epochs=2)
    assert len(found.best.found.targets) == 60
    assert found.best.loss == pytest.approx(loss_of(target, found.best.found))
    assert len(found.best.histories) == (0 if name == "statistics" else 3)


def test_a_set_that_is_held_out_is_not_learned_from():
    """Changing the labels of one fold must not change what is predicted for it."""
    data, _ = bags()
    folds = split(None, data.targets, (0.2, 0.0), 3, seed=0)
    design = Design(number_columns("a", "b", "c"), setfold.Classes("k", ["a", "b"]))
    scores = []
    for flip in (0, 1):
        targets = np.where(folds == 1, (data.targets + flip) % 2, data.targets)
        own = SetDataset(data.ids, data.elements, data.offsets, targets)
        settings = Settings(epochs=1, patience=1)
        material = Material(own, folds, data.chosen(np.arange(0)))
        boosting = search(["statistics"], design, material, settings).baselines[1]
        scores.append(boosting.found.scores[folds == 1])
    np.testing.assert_allclose(*scores)


def test_few_sets_are_held_out_in_folds(tmp_path):
    rows = pa.table({"user": np.repeat(np.arange(40), 3), "v": np.random.rand(120)})
    rows = rows.append_column("odd", pa.array(np.repeat(np.arange(40) % 2 == 1, 3)))
    pq.write_table(rows, tmp_path / "rows.parquet")
    options = setfold.TrainOptions(target="odd", set="user", encoder="statistics")
    result = setfold.train_sets(tmp_path / "rows.parquet", tmp_path / "model.safetensors", options)
    assert result.data.number == 3
    assert result.sets == (32, 32, 8)
    assert not (result.data.folds == TRAINING).any()


# ---- multiple-instance learning ----------------------------------------------------------------


def test_weights_find_the_elements_that_make_a_set_positive():
    data, witnesses = bags(200)
    design = Design(number_columns("a", "b", "c"), setfold.Classes("k", ["a", "b"]))
    folds = split(None, data.targets, (0.2, 0.0), 1, seed=0)
    material = Material(data, folds, data.chosen(np.arange(0)))
    found = search(["instances"], design, material, Settings(rate=1e-2), epochs=30)
    model, right = found.best.model, []
    for number in np.flatnonzero(data.targets == 1):
        elements = torch.tensor(data[int(number)][0]).unsqueeze(0)
        state = model.update(model.initial_state(1), elements)
        weights = model.weights(state, elements)[0, :, 0]
        right.append(int(weights.argmax()) == witnesses[number] - data.offsets[number])
    assert np.mean(right) > 0.8


def test_a_prediction_is_a_weighted_mean_of_those_for_elements():
    data, _ = bags()
    design = Design(number_columns("a", "b", "c"), setfold.Classes("k", ["a", "b"]))
    model = build_model("instances", design, torch.zeros(2, 13)).eval()
    elements = torch.tensor(data[3][0]).unsqueeze(0)
    state = model.update(model.initial_state(1), elements)
    weights = model.weights(state, elements)[0]  # (n, 1)
    alone = model(elements[0].unsqueeze(1))  # each element as a set
    torch.testing.assert_close((weights * alone).sum(0), model(elements)[0])


def test_the_command_explains_by_weights(tmp_path):
    data, _ = bags()
    users = np.repeat(np.arange(60), data.lengths)
    table = pa.table({"bag": users, **{f"v{i}": data.elements[:, i] for i in range(3)}})
    table = table.append_column("ill", pa.array(data.targets[users]))
    pq.write_table(table, tmp_path / "rows.parquet")
    words = ["train", tmp_path / "rows.parquet", "--set", "bag", "--target", "ill", "--epochs", 3]
    words += ["--task", "multiple-instance", "--folds", 1, "--out", tmp_path / "m.safetensors"]
    result = CliRunner().invoke(cli.app, [str(w) for w in words], catch_exceptions=False)
    assert result.exit_code == 0
    facts = json.loads((tmp_path / "m.json").read_text())
    assert [row["name"] for row in facts["candidates"]] == ["instances"]
    assert facts["task"] == "multiple-instance"
    page = (tmp_path / "m.html").read_text()
    assert "attention weight" in page
    symptoms = facts["diagnosis"]["symptoms"]
    assert 0 < symptoms["spread of encodings / their size"] < 1
    assert "effective dimensions of encodings" in page
    words = ["weights", tmp_path / "m.safetensors", tmp_path / "rows.parquet", "--set", "bag"]
    words += ["--keep", "v0", "--out", tmp_path / "weights.parquet"]
    result = CliRunner().invoke(cli.app, [str(w) for w in words], catch_exceptions=False)
    weights = pq.read_table(tmp_path / "weights.parquet")
    by_set = weights.group_by("set").aggregate([("weight", "sum")])
    np.testing.assert_allclose(by_set["weight_sum"], 1, rtol=1e-5)
    shown = facts["influence"][0]
    own = weights["weight"].to_numpy()[weights["set"].to_numpy() == int(shown["set"])]
    np.testing.assert_allclose(
        [e["share"] for e in shown["elements"]], -np.sort(-own)[:5], atol=1e-4
    )


def test_weights_of_a_model_of_two_passes_are_in_the_report(tmp_path):
    data, _ = bags()
    users = np.repeat(np.arange(60), data.lengths)
    table = pa.table({"bag": users, **{f"v{i}": data.elements[:, i] for i in range(3)}})
    table = table.append_column("ill", pa.array(data.targets[users]))
    pq.write_table(table, tmp_path / "rows.parquet")
    words = ["train", tmp_path / "rows.parquet", "--set", "bag", "--target", "ill", "--epochs", 1]
    words += ["--encoder", "attention", "--center", "v1", "--folds", 1]
    words += ["--out", tmp_path / "m.safetensors"]
    result = CliRunner().invoke(cli.app, [str(w) for w in words], catch_exceptions=False)
    assert result.exit_code == 0
    facts = json.loads((tmp_path / "m.json").read_text())
    shares = [e["share"] for e in facts["influence"][0]["elements"]]
    assert 0.3 < sum(shares) <= 1.0001
    assert facts["diagnosis"]["gradients"]
