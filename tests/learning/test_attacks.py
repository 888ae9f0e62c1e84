"""Inputs that once gave wrong models, lost files or ended in a traceback."""

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
from setfold.learning.dataset import SetDataset
from setfold.learning.labels import encode_targets, target_from
from setfold.learning.objective import loss_for
from setfold.learning.seeds import Draw, seed_for
from setfold.learning.train import evaluate_sets, train_sets
from setfold.preprocessing.columns import columns_of
from tests.learning.data import make_table


@pytest.fixture
def folder(tmp_path):
    rows, labels = make_table()
    pq.write_table(rows, tmp_path / "rows.parquet")
    pacsv.write_csv(labels, tmp_path / "labels.csv")
    return tmp_path


def trained(folder, rows="rows.parquet", **options):
    settings = {"target": "wild", "set": "user", "labels": folder / "labels.csv", "epochs": 1}
    settings |= {"encoder": "statistics", "folds": 1}
    how = {n: options.pop(n) for n in ("resume", "restart", "overwrite") if n in options}
    chosen = setfold.TrainOptions(**settings | options)
    return train_sets(folder / rows, folder / "model.safetensors", chosen, **how)


def typed(*words):
    result = CliRunner().invoke(cli.app, [str(word) for word in words])
    return result.exit_code, result.exception


def test_categories_are_text_in_every_format(folder):
    rows, _ = make_table()
    codes = pa.array(["01" if kind == "a" else "02" for kind in rows["kind"].to_pylist()])
    rows = rows.set_column(3, "kind", codes)
    pq.write_table(rows, folder / "rows.parquet")
    pacsv.write_csv(rows, folder / "rows.csv")
    trained(folder)
    found = [
        evaluate_sets(
            folder / "model.safetensors", folder / name, set="user", labels=folder / "labels.csv"
        )[1].scores
        for name in ("rows.parquet", "rows.csv")
    ]
    np.testing.assert_allclose(*found, atol=1e-6)
    for name in ("rows.parquet", "rows.csv"):
        setfold.encode_sets(
            setfold.load(folder / "model.safetensors"),
            folder / name,
            folder / f"{name}.npz",
            set="user",
        )
    both = [np.load(folder / f"{name}.npz")["encoding"] for name in ("rows.parquet", "rows.csv")]
    np.testing.assert_allclose(*both, atol=1e-6)


@pytest.mark.parametrize("rows", [1 << 20, 1])
def test_class_weights_do_not_depend_on_micro_batches(rows):
    elements = np.random.default_rng(0).standard_normal((8, 2)).astype(np.float32)
    data = SetDataset(list("abcd"), elements, np.array([0, 2, 4, 6, 8]), np.array([0, 0, 0, 1]))
    torch.manual_seed(0)
    head = torch.nn.Sequential(torch.nn.Linear(2, 2), setfold.Classes("k", ["a", "b"]))
    model = setfold.Composition(setfold.Pool(2), None, head)
    with torch.no_grad():
        logits = model(torch.from_numpy(elements).view(4, 2, 2))
    wanted = torch.from_numpy(data.targets)
    weights = torch.tensor([2 / 3, 2.0])
    each = torch.nn.functional.cross_entropy(logits, wanted, weights, reduction="none")
    order = torch.Generator().manual_seed(seed_for(Draw.ORDER, 0, 0))
    first = torch.randperm(4, generator=order)[:2]
    expected = float(each[first].mean())
    assert expected != pytest.approx(float(each[first].sum() / weights[wanted[first]].sum()))
    seen = []
    setfold.fit(
        model,
        data,
        loss=loss_for(setfold.Classes("k", ["a", "b"]), data, balanced=True),
        settings=setfold.FitSettings(epochs=1, batch_sets=2, batch_rows=rows),
        callback=lambda now: seen.append(now.loss),
    )
    assert seen[0] == pytest.approx(expected, rel=1e-5)


def test_candidates_share_no_weights(folder):
    models = [trial.model for trial in trained(folder, encoder="auto").search.trials]
    tables = [columns_of(model)["kind"].vectors.weight for model in models]
    assert len({table.data_ptr() for table in tables}) == len(tables) == 5


def test_groups_contain_whole_sets(folder):
    rows, labels = make_table()
    mixed = rows.join(labels, "user").drop_columns(["group"])
    mixed = mixed.append_column("group", pa.array(np.arange(len(mixed)) % 7))
    pq.write_table(mixed, folder / "rows.parquet")
    with pytest.raises(setfold.InputError, match="is in two groups"):
        trained(folder, labels=None, group="group", features=["x"])
    without = labels.set_column(3, "group", pa.array([None] * 60, pa.string()))
    pq.write_table(without, folder / "labels.parquet")
    with pytest.raises(setfold.InputError, match="has no group"):
        trained(folder, labels=folder / "labels.parquet", group="group", features=["x"])
    halves = labels.set_column(3, "group", labels["wild"])
    pq.write_table(halves, folder / "labels.parquet")
    with pytest.raises(setfold.InputError, match=r"same class|too few"):
        trained(folder, labels=folder / "labels.parquet", group="group", features=["x"])


def test_reports_replace_nothing(folder):
    words = ["train", folder / "rows.parquet", "--set", "user", "--target", "wild", "--labels"]
    words += [folder / "labels.csv", "--encoder", "statistics", "--out"]
    (folder / "a.json").write_text("precious")
    for more in (
        [folder / "a.safetensors"],
        [folder / "model.json"],
        [folder / "b.safetensors", "--report", folder / "r.json"],
        [folder / "b.safetensors", "--report", folder / "labels.csv"],
    ):
        code, error = typed(*words, *more)
        assert code
        assert isinstance(error, setfold.InputError)
    assert (folder / "a.json").read_text() == "precious"
    assert (folder / "labels.csv").read_text().startswith('"user"')
    assert typed(*words, folder / "b.safetensors", "--report", folder / "new" / "r.html")[0] == 0
    before = (folder / "b.safetensors").read_bytes()
    assert typed(*words, folder / "b.safetensors", "--resume", "--seed", 1)[0] == 0
    assert (folder / "b.safetensors").read_bytes() == before  # it was complete


def test_blank_labels_are_missing(folder):
    _, labels = make_table()
    lines = ["user,wild", *(f"{r['user']},{r['wild']}" for r in labels.to_pylist()[1:]), "u0,"]
    (folder / "labels.csv").write_text("\n".join(lines))
    with pytest.raises(setfold.InputError, match="'u0'"):
        trained(folder)
    assert trained(folder, skip_errors=True).target.labels == ["calm", "wild"]


def test_the_set_id_is_no_feature(folder):
    with pytest.raises(setfold.InputError, match="cannot be a feature"):
        trained(folder, features=["user", "x"])


def test_sets_that_lose_all_rows_are_left_out(folder):
    rows, _ = make_table()
    values = [
        float("inf") if user == "u5" else x
        for user, x in zip(rows["user"].to_pylist(), rows["x"].to_pylist(), strict=True)
    ]
    pq.write_table(rows.set_column(1, "x", pa.array(values)), folder / "rows.parquet")
    result = trained(folder, skip_errors=True)
    assert sum(result.sets) == 59
    assert result.left_out == 1


def test_labels_without_rows_do_not_spoil_the_splits(folder):
    _, labels = make_table()
    others = [{"user": f"other{i}", "wild": "calm", "age": 1.0, "group": "g"} for i in range(900)]
    pq.write_table(
        pa.concat_tables([labels, pa.Table.from_pylist(others)]), folder / "labels.parquet"
    )
    result = trained(folder, labels=folder / "labels.parquet", skip_errors=True)
    assert result.sets == (36, 12, 12)
    assert result.left_out == 0 or result.left_out == 900


def test_lists_of_a_row(folder):
    rows, labels = make_table()
    lists = rows.group_by("user").aggregate([("x", "list"), ("y", "list")])
    lists = lists.rename_columns(["user", "x", "y"])
    by_set = dict(zip(labels["user"].to_pylist(), labels["wild"].to_pylist(), strict=True))
    wild = pa.array([by_set[user] for user in lists["user"].to_pylist()])
    lists = lists.append_column("wild", wild)
    pq.write_table(lists, folder / "lists.parquet")
    result = trained(folder, "lists.parquet", labels=None, features=["x", "y"], explode=True)
    assert result.elements == len(rows)
    _, found, data = evaluate_sets(
        folder / "model.safetensors", folder / "lists.parquet", set="user", explode=True
    )
    assert (len(found.targets), int(data.lengths.sum())) == (60, len(rows))


def test_reports_of_odd_names_and_of_categories_alone(folder):
    rows, labels = make_table()
    pq.write_table(rows.rename_columns(["user", "x", "element", "share"]), folder / "rows.parquet")
    odd = labels.set_column(1, "wild", pa.array([rf"$\x{w}$" for w in labels["wild"].to_pylist()]))
    pacsv.write_csv(odd, folder / "labels.csv")
    words = ["train", folder / "rows.parquet", "--set", "user", "--target", "wild", "--labels"]
    words += [folder / "labels.csv", "--encoder", "statistics", "--overwrite", "--out"]
    words += [folder / "m.safetensors"]
    assert typed(*words) == (0, None)
    assert typed(*words, "--features", "share") == (0, None)
    assert json.loads((folder / "m.json").read_text())["influence"] == []


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seeds_out_of_range(folder, seed):
    with pytest.raises(setfold.InputError, match="seed must be"):
        trained(folder, seed=seed)


@pytest.mark.parametrize("seed", range(4))
def test_gaps_anywhere_are_gaps(folder, seed):
    rows, _ = make_table()
    values = rows["x"].to_pylist()
    values[3] = None
    pq.write_table(rows.set_column(1, "x", pa.array(values)), folder / "rows.parquet")
    assert trained(folder, seed=seed).fitted.columns["x"].missing


def test_files_with_other_types_are_named(folder):
    rows, _ = make_table()
    (folder / "in").mkdir()
    pq.write_table(rows, folder / "in" / "0.parquet")
    other = rows.set_column(1, "x", rows["kind"])
    pq.write_table(other, folder / "in" / "1.parquet")
    with pytest.raises(setfold.InputError, match=r"column 'x' of .*1\.parquet is string"):
        trained(folder, "in")


def test_labels_of_dates_are_refused(folder):
    _, labels = make_table()
    dates = pa.array([0] * 60, pa.date32())
    pq.write_table(labels.set_column(1, "wild", dates), folder / "labels.parquet")
    with pytest.raises(setfold.InputError, match="date32"):
        trained(folder, labels=folder / "labels.parquet")


def test_an_evaluation_leaves_no_file(folder):
    trained(folder)
    before = sorted(folder.iterdir())
    _, _, data = evaluate_sets(
        folder / "model.safetensors",
        folder / "rows.parquet",
        set="user",
        labels=folder / "labels.csv",
        memory="381MB",
    )
    assert len(data[0][0])
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("learned", "measured"),
    [
        ([0, 1], ["0", "1"]),
        (["0", "1"], [0, 1]),
        ([0, 1], [0.0, 1.0]),
        ([False, True], ["false", "True"]),
        ([False, True], [0, 1]),
        (["1.0", "2.0"], [1, 2]),
        ([0.5, 1.5], ["0.5", "1.5"]),
    ],
    ids=str,
)
def test_labels_match_in_whatever_type_a_file_keeps_them(learned, measured):
    target = target_from("k", learned * 3, "classification")
    assert encode_targets(target, measured).tolist() == [0, 1]


def test_labels_that_would_be_ambiguous_do_not_match():
    target = setfold.Classes("k", ["1", "01", "x"])
    assert encode_targets(target, ["01", "1"]).tolist() == [1, 0]
    with pytest.raises(setfold.InputError, match=r"not in the training sets: 1\.0\. Expected '1'"):
        encode_targets(target, [1.0])


def test_numbers_as_labels_may_become_text(folder):
    _, labels = make_table()
    digits = pa.array([int(w == "wild") for w in labels["wild"].to_pylist()])
    pq.write_table(labels.set_column(1, "wild", digits), folder / "labels.parquet")
    trained(folder, labels=folder / "labels.parquet")
    texts = labels.set_column(1, "wild", digits.cast(pa.string()))
    pq.write_table(texts, folder / "texts.parquet")
    found = [
        evaluate_sets(
            folder / "model.safetensors", folder / "rows.parquet", set="user", labels=folder / name
        )[1].targets
        for name in ("labels.parquet", "texts.parquet")
    ]
    assert found[0].tolist() == found[1].tolist()


@pytest.mark.parametrize(
    "options", [{"log": ["kind"]}, {"log": ["n"], "categories": ["n"]}], ids=str
)
def test_only_numbers_have_a_logarithm(folder, options):
    rows, _ = make_table()
    rows = rows.append_column("n", pa.array(np.arange(len(rows)) % 3))
    pq.write_table(rows, folder / "rows.parquet")
    with pytest.raises(setfold.InputError, match="so it has no logarithm"):
        trained(folder, **options)


def test_set_ids_of_several_columns(folder):
    """Rows keep them as numbers and text, the table of labels as text."""

    def in_two(table):
        numbers = [int(user[1:]) for user in table["user"].to_pylist()]
        table = table.append_column("run", pa.array([n // 10 for n in numbers], pa.int32()))
        return table.append_column("event,id", [[str(n % 10) for n in numbers]])

    tables = make_table()
    rows, labels = (in_two(table).drop_columns("user") for table in tables)
    pq.write_table(rows, folder / "pairs.parquet")
    pacsv.write_csv(labels, folder / "pairs.csv")
    names = "run,`event,id`"
    trained(folder, "pairs.parquet", set=names, labels=folder / "pairs.csv")
    given = folder / "model.safetensors", folder / "pairs.parquet"
    target, found, data = evaluate_sets(*given, set=names, labels=folder / "pairs.csv")
    assert len(data) == 60
    wild = dict(zip(*in_two(tables[1]).select(["user", "wild"]).to_pydict().values(), strict=True))
    for name, label in zip(data.ids, found.targets.tolist(), strict=True):
        run, event = name.removeprefix("run=").split(", event,id=")
        assert target.labels[label] == wild[f"u{int(run) * 10 + int(event)}"]
    pacsv.write_csv(labels.slice(3), folder / "fewer.csv")
    with pytest.raises(setfold.InputError, match="no label: 'run=0, event,id=0'"):
        evaluate_sets(*given, set=names, labels=folder / "fewer.csv")
