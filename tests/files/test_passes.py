"""Models of several passes: the files are read again, and the result is that of whole sets."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import setfold
from setfold.cli import app
from setfold.files import plan
from setfold.files.budget import Budget
from tests.files.files import rows, write


def set_transformer():
    return setfold.SetTransformer(3, dim=8, num_layers=2, num_inducing=3, num_heads=2)


MODELS = {
    "set transformer": set_transformer,
    "equivariant": lambda: setfold.EquivariantDeepSets(3, [8, 8], head=nn.Linear(8, 2)),
    "set norm": lambda: setfold.LayeredSetEncoder(
        [setfold.SetNorm(8)], setfold.Pool(8, ["mean", "max"]), features=nn.Linear(3, 8)
    ),
    "slot attention": lambda: setfold.SlotAttention(3, num_slots=4, dim=8, num_iterations=3),
}


def make(name):
    torch.manual_seed(0)
    return MODELS[name]().eval()


@torch.no_grad()
def expected(model, table):
    """Count and encoding by set id, of whole sets."""
    elements = torch.from_numpy(np.stack([table[f"f{n}"].to_numpy() for n in range(3)], 1))
    ids = np.array(table["event"].to_pylist())
    return {
        name: (int((ids == name).sum()), model(elements[torch.from_numpy(ids == name)][None])[0])
        for name in np.unique(ids).tolist()
    }


def assert_encodes(path, model, table):
    found, wanted = pq.read_table(path), expected(model, table)
    assert found["set"].to_pylist() == sorted(wanted)
    for row in found.to_pylist():
        count, encoding = wanted[row["set"]]
        assert row["count"] == count
        torch.testing.assert_close(
            torch.tensor(row["encoding"]), encoding.flatten(), rtol=1e-4, atol=1e-5
        )


def encode(model, folder, out, **options):
    defaults = {"set": "event", "save_every": 0, "head": True}
    return setfold.encode_sets(model, folder, out, **defaults | options)


@pytest.mark.parametrize("spills", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_encodings_are_those_of_whole_sets(tmp_path, monkeypatch, name, spills):
    if spills:
        monkeypatch.setattr(plan, "split_memory", lambda *_: Budget(64, store_bytes=9_000))
    table, model = rows(200, sets=20, names=int if spills else str), make(name)
    folder, out = write(tmp_path / "in", table), tmp_path / "in" / "out.parquet"
    summary = encode(model, folder, out)
    assert_encodes(out, model, table)
    size = sum(file.stat().st_size for file in folder.glob("part-*"))
    assert summary.bytes_read == model.passes * size
    assert sorted(path.name for path in folder.iterdir() if "part" not in path.name) == [
        "out.parquet"
    ]


def test_ids_of_several_columns_and_empty_sets(tmp_path):
    table = pa.table({"run": [1, 1, 2], "event": ["a", "b", "a"], "x": [[1.0, 2.0], [], [4.0]]})
    pq.write_table(table, tmp_path / "in.parquet")
    torch.manual_seed(0)
    model = setfold.LayeredSetEncoder(
        [setfold.SetNorm(2)],
        setfold.Pool(2, "mean"),
        features=nn.Linear(1, 2),
        head=nn.Linear(2, 2),
    ).eval()
    for options in ({"set": "run,event"}, {"set": None}):
        out = tmp_path / "out.parquet"
        encode(
            model,
            tmp_path / "in.parquet",
            out,
            features="x",
            explode=True,
            overwrite=True,
            **options,
        )
        found = pq.read_table(out)
        assert found["count"].to_pylist() == [2, 0, 1]
        with torch.no_grad():
            wanted = [model(torch.tensor(x).reshape(1, -1, 1))[0] for x in table["x"].to_pylist()]
        torch.testing.assert_close(torch.tensor(found["encoding"].to_pylist()), torch.stack(wanted))


@pytest.mark.parametrize("after", [2, 12])
def test_an_interrupted_run_is_resumed(tmp_path, monkeypatch, after):
    monkeypatch.setattr(plan, "split_memory", lambda *_: Budget(64, store_bytes=9_000))
    table, model = rows(200, sets=20), make("set transformer")
    folder, out = write(tmp_path / "in", table), tmp_path / "out.parquet"
    encode(model, folder, tmp_path / "wanted.parquet")
    steps = []

    def stop(progress):
        steps.append(progress)
        if len(steps) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode(model, folder, out, progress=stop)
    assert not out.exists()
    encode(model, folder, out, resume=True)
    assert_encodes(out, model, table)
    assert out.read_bytes() == (tmp_path / "wanted.parquet").read_bytes()
    assert encode(model, folder, out, resume=True).was_complete
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in",
        "out.parquet",
        "wanted.parquet",
    ]


def test_complete_passes_are_not_repeated(tmp_path):
    table, model = rows(300), make("set norm")
    folder, out = write(tmp_path / "in", table), tmp_path / "out.parquet"
    phases = []

    def stop(progress):
        phases.append(progress.phase)
        if phases.count("writing") == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode(model, folder, out, progress=stop)
    again = []
    encode(model, folder, out, resume=True, progress=lambda progress: again.append(progress.phase))
    assert again.count("writing") == 1
    assert_encodes(out, model, table)


def test_an_output_that_exists_is_noticed_before_anything_is_read(tmp_path):
    folder, out = write(tmp_path / "in", rows(300)), tmp_path / "out.parquet"
    out.write_text("mine")
    seen = []
    with pytest.raises(setfold.InputError, match="--overwrite"):
        encode(make("set norm"), folder, out, progress=seen.append)
    assert not seen
    encode(make("set norm"), folder, out, overwrite=True)
    assert_encodes(out, make("set norm"), rows(300))


def test_inputs_that_change_between_passes(tmp_path):
    folder, out = write(tmp_path / "in", rows(300)), tmp_path / "out.parquet"

    def change(progress):
        if progress.phase == "writing":
            write(folder, rows(200, seed=1))

    with pytest.raises(setfold.FileError, match="changed between two passes"):
        encode(make("set norm"), folder, out, progress=change)


def test_bad_rows_are_named(tmp_path):
    table = rows(300)
    table = table.set_column(2, "f1", pa.array([*range(299), np.nan]))
    folder = write(tmp_path / "in", table, 1)
    with pytest.raises(setfold.FileError, match=r"row 299 .* column 'f1' is NaN or infinite"):
        encode(make("set transformer"), folder, tmp_path / "out.parquet")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skip_errors": True}, "needs 2 passes .* --on-error skip"),
        ({"engine": "ray"}, "needs 2 passes .* Ray"),
        ({"states": "states.arrow"}, "Omit --states"),
    ],
)
def test_what_is_not_possible(tmp_path, options, message):
    folder = write(tmp_path / "in", rows(30))
    with pytest.raises(setfold.InputError, match=message):
        encode(make("set norm"), folder, tmp_path / "out.parquet", **options)


def test_dtype(tmp_path):
    table, model = rows(300), make("set transformer")
    folder, out = write(tmp_path / "in", table), tmp_path / "out.npz"
    encode(model, folder, out, dtype="float64")
    found = np.load(out)["encoding"]
    assert found.dtype == np.float64
    assert next(model.parameters()).dtype == torch.float32


def test_the_head_is_applied_only_if_asked(tmp_path):
    table, model = rows(100), make("equivariant")
    folder, out = write(tmp_path / "in", table), tmp_path / "out.parquet"
    encode(model, folder, out, head=False)
    assert model.head is not None
    model.head = None
    assert_encodes(out, model, table)


def test_a_dry_run_counts_the_passes(tmp_path):
    folder = write(tmp_path / "in", rows(30))
    setfold.save(make("set transformer"), tmp_path / "model")
    command = ["encode", str(tmp_path / "model"), str(folder), "--set", "event", "--dry-run"]
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "o.npz"), "--json"])
    assert json.loads(done.stdout)["passes"] == 3
