"""From rows and labels to a model: splits, labels, candidates, baselines, reports, and resuming."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

import setfold
from setfold import cli
from setfold.core.persist import hold
from setfold.learning import dataset, loop, train
from setfold.learning.encoding import encode, micro_batches
from setfold.learning.labels import encode_targets, target_from
from setfold.learning.metrics import Predictions, measure, standard_error
from setfold.learning.sources import Source
from setfold.learning.splits import TEST, TRAINING, split
from setfold.learning.train import train_sets
from setfold.preprocessing.fitting import Fitted
from tests.learning.data import make_table, write_tables


@pytest.fixture
def folder(tmp_path):
    rows, labels = make_table()
    pq.write_table(rows, tmp_path / "rows.parquet")
    pacsv.write_csv(labels, tmp_path / "labels.csv")
    return tmp_path


def trained(folder, **options):
    settings = {"target": "wild", "set": "user", "labels": folder / "labels.csv", "epochs": 2}
    settings |= {"folds": 1}
    out = options.pop("out", folder / "model.safetensors")
    how = {n: options.pop(n) for n in ("resume", "restart", "overwrite") if n in options}
    chosen = setfold.TrainOptions(**settings | options)
    return train_sets(folder / "rows.parquet", out, chosen, **how)


# ---- splits ------------------------------------------------------------------------------------


def test_splits_have_their_shares_of_each_class():
    targets = np.repeat([0, 1, 2], [50, 30, 20])
    found = split(None, targets, (0.2, 0.1), 1, seed=0)
    for number, size in enumerate((50, 30, 20)):
        own = found[targets == number]
        assert (own == 0).sum() == size // 5
        assert (own == TEST).sum() == size // 10


def test_a_class_with_one_set_is_for_training():
    found = split(None, np.array([0] * 20 + [1]), (0.4, 0.4), 1, seed=0)
    assert found[-1] == TRAINING


@pytest.mark.parametrize("shares", [(0.2, 0.2), (0.1, 0.05), (0.45, 0.45), (0.3, 0.0)])
@pytest.mark.parametrize("number", [2, 3, 4])
def test_small_classes_are_in_every_split_that_they_suffice_for(shares, number):
    targets = np.array([0] * 50 + [1] * number)
    found = split(None, targets, shares, 1, seed=0)[50:].tolist()
    wanted = [TRAINING, 0, TEST][: 3 if shares[1] else 2]
    assert {*wanted[:number]} <= {*found} <= {*wanted}


@pytest.mark.parametrize("folds", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_groups_are_not_split(seed, folds):
    groups = [f"g{i % 6}" for i in range(60)]
    found = split(groups, np.arange(60) % 2, (0.3, 0.2), folds, seed)
    for group in {*groups}:
        assert len({own for own, name in zip(found, groups, strict=True) if name == group}) == 1
    assert {TEST, *range(folds), *([TRAINING] if folds == 1 else [])} == {*found.tolist()}


# ---- labels ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "task", "kind"),
    [
        (["a", "b", "a", "b"], None, "Classes"),
        ([True, False, True, False], None, "Classes"),
        ([0, 1, 2, 0, 1, 2], None, "Classes"),
        (list(range(100)), None, "Quantity"),
        ([0.5, 1.5, 0.5], None, "Quantity"),
        ([0.5, 1.5, 0.5, 1.5], "classification", "Classes"),
        ([0, 1, 0, 1], "regression", "Quantity"),
    ],
)
def test_the_task_follows_from_the_labels(values, task, kind):
    target = target_from("y", values, task)
    assert type(target).__name__ == kind
    assert len(encode_targets(target, values)) == len(values)


@pytest.mark.parametrize(
    ("values", "task", "message"),
    [
        (["a", "a"], None, "nothing to learn"),
        ([1.5, 1.5], None, "nothing to learn"),
        (["a", "b"], "regression", "Omit --task"),
        ([str(i) for i in range(50)], None, "50 classes for 50 sets"),
    ],
)
def test_labels_that_cannot_be_learned(values, task, message):
    with pytest.raises(setfold.InputError, match=message):
        target_from("y", values, task)


def test_sets_and_labels_that_do_not_match(folder):
    _, labels = make_table()
    pacsv.write_csv(labels.slice(3), folder / "labels.csv")
    with pytest.raises(setfold.InputError, match=r"3 sets have no label: 'u0'.*--on-error skip"):
        trained(folder)
    assert trained(folder, skip_errors=True).left_out == 3
    more = pa.concat_tables([labels, pa.Table.from_pylist([labels.to_pylist()[0] | {"user": "x"}])])
    pacsv.write_csv(more, folder / "labels.csv")
    with pytest.raises(setfold.InputError, match="have a label, but no elements: 'x'"):
        trained(folder, overwrite=True)
    both = pa.concat_tables(
        [labels, pa.Table.from_pylist([labels.to_pylist()[0] | {"wild": "wild"}])]
    )
    pacsv.write_csv(both, folder / "labels.csv")
    with pytest.raises(setfold.InputError, match="two labels for the set 'u0'"):
        trained(folder, overwrite=True)


def test_labels_in_a_column_of_the_rows(folder):
    rows, labels = make_table()
    joined = rows.join(labels, "user")
    pq.write_table(joined, folder / "rows.parquet")
    result = trained(folder, labels=None, features=["x", "y"])
    assert result.fitted.columns.names == ["x", "y"]
    assert result.sets == (36, 12, 12)
    wrong = joined.set_column(
        joined.schema.get_field_index("wild"),
        "wild",
        pa.array(["a", "b"] * len(joined))[: len(joined)],
    )
    pq.write_table(wrong, folder / "rows.parquet")
    with pytest.raises(setfold.InputError, match="two labels in column 'wild'"):
        trained(folder, labels=None, features=["x", "y"], overwrite=True)


def test_the_target_is_no_feature(folder):
    with pytest.raises(setfold.InputError, match="there is no column 'wild'"):
        trained(folder, features=["x", "wild"])
    rows, labels = make_table()
    pq.write_table(rows.join(labels, "user"), folder / "rows.parquet")
    with pytest.raises(setfold.InputError, match="cannot be a feature"):
        trained(folder, labels=None, features=["x", "wild"])


def test_one_set_per_file_by_name(tmp_path):
    random = np.random.default_rng(0)
    lines = ["file,species"]
    for number in range(20):
        scale = 1 + 3 * (number % 2)
        np.save(tmp_path / f"scan{number}.npy", scale * random.standard_normal((30, 3)))
        lines.append(f"scan{number}{['', '.npy'][number % 2]},{['oak', 'pine'][number % 2]}")
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    result = train_sets(
        str(tmp_path / "*.npy"),
        tmp_path / "model.safetensors",
        setfold.TrainOptions(
            target="species", labels=tmp_path / "labels.csv", encoder="statistics", folds=1
        ),
    )
    assert result.target.labels == ["oak", "pine"]
    assert sum(result.sets) == 20


# ---- data sets ---------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [10**9, 0], ids=["memory", "disk"])
def test_rows_are_grouped_by_set(tmp_path, memory):
    folder = write_tables(tmp_path / "in", files=3)
    rows, _ = make_table()
    source = Source([folder / f"rows-{i}.parquet" for i in range(3)], "user")
    columns = setfold.Columns([setfold.NumberColumn("x", 1.0, 2.0)])
    counts = dataset.count_elements(source)
    ids = ["u7", "u3", "u12"]
    data = dataset.collect(
        source, columns, ids, counts, np.arange(3), folder=tmp_path, memory=memory
    )
    assert isinstance(data.elements, np.memmap) == (memory == 0)
    for number, name in enumerate(ids):
        wanted = [row["x"] for row in rows.to_pylist() if row["user"] == name]
        np.testing.assert_allclose(data[number][0][:, 0], (np.array(wanted) - 1) / 2, rtol=1e-6)
    part = data.chosen(np.array([1, 2]))
    assert part.ids == ["u3", "u12"]
    np.testing.assert_array_equal(part[1][0], data[2][0])
    assert part[1][1] == data[2][1] == 2


def test_columns_are_fitted_to_the_training_sets_alone(folder, monkeypatch):
    rows, _ = make_table()
    seen = []
    monkeypatch.setattr(train.ColumnFitter, "add", lambda self, table: seen.append(table["x"]))
    monkeypatch.setattr(
        train.ColumnFitter,
        "finish",
        lambda self: Fitted(setfold.Columns([setfold.NumberColumn("x")]), {}),
    )
    result = trained(folder, encoder="statistics", features=["x"])
    held = {*result.data.test.ids}
    assert held
    read = sum(len(values) for values in seen)
    users = rows["user"].to_pylist()
    assert read < len(users) - sum(user in held for user in users)


def test_large_sets_are_folded_with_the_same_gradients(folder):
    result = trained(folder, encoder="slots", features=["x", "y"])
    model, data = result.search.best.model.train(), result.data.test
    model.requires_grad_(True)
    found = []
    for rows in (1 << 20, 4):
        model.zero_grad()
        torch.manual_seed(0)
        for batch in micro_batches(data.lengths, range(len(data)), rows):
            out = torch.cat([encode(model.eval(), [data[one][0]], rows) for one in batch])
            out.square().sum().backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=1e-5)


# ---- training ----------------------------------------------------------------------------------


@pytest.mark.parametrize("folds", [1, 2])
def test_all_candidates_compete_and_the_report_says_so(folder, folds):
    runner = CliRunner()
    words = ["train", folder / "rows.parquet", "--set", "user", "--labels", folder / "labels.csv"]
    words += ["--target", "wild", "--out", folder / "m.safetensors", "--epochs", 3]
    words += ["--folds", folds]
    result = runner.invoke(cli.app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0
    facts = json.loads((folder / "m.json").read_text())
    assert [row["name"] for row in facts["candidates"]] == [
        *("statistics", "deep-sets", "slots", "attention", "places")
    ]
    assert len(facts["baselines"]) == 3
    assert facts["verdict"] in result.stdout
    page = (folder / "m.html").read_text()
    for heading in ("Candidates and baselines", "confusion matrix", "calibration", "influential"):
        assert heading in page
    assert "http" not in page.replace("http://www.w3.org", "").replace(
        "http://purl.org", ""
    ).replace("http://creativecommons.org", "").replace("https://matplotlib.org", "")
    words = ["evaluate", folder / "m.safetensors", folder / "rows.parquet", "--set", "user"]
    words += ["--labels", folder / "labels.csv", "--json"]
    result = runner.invoke(cli.app, [str(word) for word in words], catch_exceptions=False)
    assert json.loads(result.stdout)["accuracy"] > 0.7
    assert not list(folder.glob("*.work"))


def test_statistics_are_the_logistic_regression(folder):
    result = trained(folder)
    statistics = next(t for t in result.search.trials if t.name == "statistics")
    logistic = result.search.baselines[0]
    np.testing.assert_allclose(statistics.found.scores, logistic.found.scores, atol=1e-4)


def test_quantities(folder):
    result = trained(folder, target="age", epochs=5)
    assert measure(result.target, result.search.best.found)["R2"] > 0.9
    loaded = setfold.load(folder / "model.safetensors")
    assert loaded(torch.zeros(1, 3, result.fitted.columns.width)).shape == (1, 1)


def test_missing_values_and_ages_and_centres(folder):
    rows, _ = make_table(missing=True)
    at = pa.array(np.arange(len(rows)) * 3600, pa.timestamp("s"))
    pq.write_table(rows.append_column("at", at), folder / "rows.parquet")
    result = trained(folder, encoder="deep-sets", center=["y"])
    model = setfold.load(folder / "model.safetensors")
    assert model.passes == 2
    assert result.search.best.found.scores.shape == (12, 2)
    result = trained(folder, encoder="deep-sets", times="calendar", overwrite=True)
    assert isinstance(setfold.load(folder / "model.safetensors"), setfold.StreamingSetEncoder)


def test_an_interrupted_training_ends_with_the_same_bits(folder, monkeypatch):
    options = {"encoder": "slots", "epochs": 4}
    torch.manual_seed(1)
    trained(folder, out=folder / "whole.safetensors", **options)
    torch.manual_seed(2)
    steps, original = [], loop.Loop._step

    def step(self, batch):
        if len(steps) == 5:
            raise KeyboardInterrupt
        steps.append(batch)
        original(self, batch)

    monkeypatch.setattr(loop, "SAVE_EVERY", 0.0)
    monkeypatch.setattr(loop, "LOOK_EVERY", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(loop.Loop, "_step", step)
        with pytest.raises(KeyboardInterrupt):
            trained(folder, out=folder / "parts.safetensors", **options)
    assert (folder / "parts.safetensors.work" / "slots-0.safetensors").exists()
    with pytest.raises(setfold.InputError, match="--resume, or discard it with --restart"):
        trained(folder, out=folder / "parts.safetensors", **options)
    with pytest.raises(setfold.InputError, match=r"had different options, settings"):
        trained(folder, out=folder / "parts.safetensors", resume=True, **options, seed=1)
    trained(folder, out=folder / "parts.safetensors", resume=True, **options)
    mine, other = (
        setfold.load(folder / f"{name}.safetensors").state_dict() for name in ("whole", "parts")
    )
    assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_two_processes_do_not_train_one_model(folder):
    with (
        hold(folder / "model.safetensors.work" / "lock", wait=False),
        pytest.raises(setfold.FileError, match="another process is training"),
    ):
        trained(folder, encoder="statistics")


@pytest.mark.parametrize("resume", [False, True])
def test_folders_of_others_are_not_emptied(folder, resume):
    work = folder / "model.safetensors.work"
    work.mkdir()
    (work / "thesis.txt").write_text("years of work")
    with pytest.raises(setfold.FileError, match=r"contains 'thesis\.txt'"):
        trained(folder, encoder="statistics", resume=resume, restart=not resume)
    assert (work / "thesis.txt").exists()


def test_a_training_that_fails_early_leaves_nothing(folder):
    with pytest.raises(setfold.InputError):
        trained(folder, target="nothing")
    assert not list(folder.glob("*.work"))


def test_existing_models_are_kept(folder):
    trained(folder, encoder="statistics")
    with pytest.raises(setfold.InputError, match="--overwrite"):
        trained(folder, encoder="statistics")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoder": "magic"}, "encoder must be one of auto"),
        ({"scale": "log"}, "scale must be"),
        ({"times": "now"}, "times must be"),
        ({"validation": 0.6, "test": 0.5}, "less than 1 together"),
        ({"set": "nobody"}, "no column 'nobody'"),
        ({"target": "nothing"}, "no column 'nothing'"),
        ({"features": ["z"]}, "no column 'z'"),
    ],
    ids=str,
)
def test_wrong_options_are_explained(folder, options, message):
    with pytest.raises(setfold.InputError, match=message):
        trained(folder, **options)


def test_bad_rows_stop_the_training_or_are_skipped(folder):
    rows, _ = make_table()
    values = rows["x"].to_pylist()
    values[7] = float("inf")
    pq.write_table(rows.set_column(1, "x", pa.array(values)), folder / "rows.parquet")
    with pytest.raises(setfold.FileError, match="row 7"):
        trained(folder, encoder="statistics")
    result = trained(folder, encoder="statistics", skip_errors=True)
    assert result.skipped == 1
    assert result.elements == len(rows) - 1


# ---- metrics -----------------------------------------------------------------------------------


def test_a_perfect_score_still_has_an_error():
    target = setfold.Classes("k", ["a", "b"])
    found = Predictions(np.eye(2)[[0, 1] * 5], np.array([0, 1] * 5))
    assert measure(target, found)["accuracy"] == 1
    assert standard_error(target, found) > 0.05


def test_several_files_are_one_table(tmp_path):
    folder = write_tables(tmp_path / "in", files=3)
    result = train_sets(
        [folder / f"rows-{i}.parquet" for i in range(3)],
        tmp_path / "model.safetensors",
        setfold.TrainOptions(
            target="wild",
            labels=folder / "labels.pq.parquet",
            set="user",
            group="group",
            encoder="statistics",
            folds=1,
        ),
    )
    assert sum(result.sets) == 60
