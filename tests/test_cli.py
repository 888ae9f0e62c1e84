from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import setfold
from setfold import cli
from setfold.laws.gallery import EXHIBITS
from setfold.native import library
from tests.files.readers.written import FORMATS
from tests.small import draw, make

MODELS = """
import torch
from torch import nn
import setfold

torch.manual_seed(0)
encoder = setfold.SlotSetEncoder(3, 2, 2, 2).eval()


class Sorted(nn.Module):
    def forward(self, elements):  # the first element decides
        return elements[:, 0]


def pool():
    return setfold.Pool(3)


def needs(width):
    return setfold.Pool(width)


def fails():
    raise RuntimeError("no weights here")


number = 3
"""


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line as a shell would: exit code, output and error output."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["setfold", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as exit:
            code = exit.code or 0
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.safetensors"
    torch.manual_seed(0)
    setfold.save(setfold.Composition(setfold.Pool(3), nn.Linear(3, 3)), path)
    return path


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, with a module that can be imported from the command line."""
    (tmp_path / "mymodels.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mymodels", raising=False)
    yield tmp_path
    sys.modules.pop("mymodels", None)


# ---- the command itself --------------------------------------------------------------------


def test_version():
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"setfold {setfold.__version__}\n")


@pytest.mark.parametrize("command", ["check", "info"])
def test_help_has_examples(command):
    result = CliRunner().invoke(cli.app, [command, "--help"], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    assert "Examples" in result.output
    assert f"setfold {command} encoder.safetensors" in result.output


def test_info_without_a_file_names_the_kernels(run):
    code, output, _ = run("info")
    assert code == 0
    assert library.describe() in " ".join(output.split())
    assert torch.__version__ in output


def test_help_names_the_commands(run):
    code, output, _ = run("--help")
    assert code == 0
    assert re.search(r"\bcheck\b", output)
    assert re.search(r"\binfo\b", output)


@pytest.mark.parametrize(
    "arguments",
    [["check"], ["nonsense"], ["check", "x", "--nonsense"], ["info", "--verify"]],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2(run, arguments):
    code, _, errors = run(*arguments)
    assert code == 2
    assert "Usage" in errors
    assert "Traceback" not in errors


def test_the_command_does_not_wait_for_torch():
    script = "import sys, setfold.cli; print([m for m in sys.modules if m in ('torch', 'numpy')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]")


# ---- check ---------------------------------------------------------------------------------


def test_check_of_a_model_that_folds_is_exit_code_0(run, model):
    code, output, _ = run("check", model, "--dim-in", 3, "--no-processes")
    assert code == 0
    assert "Composition folds" in output
    assert "any partition" in output


def test_check_all_compares_every_encoder(run, monkeypatch):
    gallery = [exhibit for exhibit in EXHIBITS if exhibit.name in ("Pool, max", "FSPool")]
    monkeypatch.setattr("setfold.laws.survey.EXHIBITS", gallery)
    code, output, _ = run("check", "--all", "--no-processes")
    assert code == 0
    assert "folds in one pass" in output
    assert "cannot be folded" in output
    code, output, _ = run("check", "--all", "--no-processes", "--json")
    assert code == 0
    assert [e["encoder"] for e in json.loads(output)["encoders"]] == ["Pool, max", "FSPool"]


def test_check_takes_either_a_model_or_all(run, model):
    code, _, errors = run("check", model, "--all")
    assert code == 2
    assert "--all" in errors


def test_check_takes_the_width_from_the_model(run, here):
    assert run("check", "mymodels:encoder", "--no-processes")[0] == 0


def test_check_calls_what_makes_a_model(run, here):
    assert run("check", "mymodels:pool", "--no-processes")[0] == 0
    code, _, errors = run("check", "mymodels:needs", "--no-processes")
    assert code == 2
    assert "mymodels:needs" in errors
    assert "'width'" in errors


def test_check_of_a_broken_model_is_exit_code_1(run, here):
    code, output, _ = run("check", "mymodels:Sorted", "--dim-in", 3)
    assert "breaks" in output
    assert "permutation" in output
    assert code == 1


def test_exit_codes_reach_the_shell(here):
    arguments = ["check", "mymodels:Sorted", "--dim-in", "3", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "setfold.cli", *arguments], capture_output=True, text=True
    )
    assert json.loads(done.stdout)["passed"] is False
    assert done.returncode == 1


@pytest.mark.parametrize("name", ["encoder", "Sorted"])
def test_check_prints_json(run, here, name):
    code, output, _ = run("check", f"mymodels:{name}", "--dim-in", 3, "--no-processes", "--json")
    report = json.loads(output)
    assert report["passed"] is (name == "encoder")
    assert code == (0 if report["passed"] else 1)
    assert {law["verdict"] for law in report["laws"]} <= {"holds", "fails", "does not apply"}
    assert all(law["statement"] for law in report["laws"])


def test_check_asks_for_the_width_if_the_model_does_not_define_it(run, model):
    code, _, errors = run("check", model)
    assert code == 2
    assert "dim_in" in errors or "--dim-in" in errors


def test_check_names_what_must_be_allowed(run, here):
    sys.path.insert(0, "")
    from mymodels import Sorted

    setfold.save(Sorted(), here / "sorted")
    code, _, errors = run("check", here / "sorted", "--dim-in", 3)
    assert code == 2
    assert "mymodels.Sorted" in errors
    code, _, errors = run("check", here / "sorted", "--dim-in", 3, "--allow", "mymodels.Sorted")
    assert code == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.safetensors", "missing.safetensors does not exist"),
        ("nosuchmodule:encoder", "cannot import nosuchmodule:encoder"),
        ("mymodels:nothing", "cannot import mymodels:nothing"),
        ("mymodels:number", "mymodels:number"),
        ("mymodels.py", "mymodels.py is truncated, corrupt or not a safetensors file"),
        ("mymodels:fails", "no weights here"),
        ("broken:encoder", "cannot import broken:encoder"),
        (":", "cannot import"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_exit_code_2(run, here, name, message):
    (here / "broken.py").write_text("def encoder(:")
    code, output, errors = run("check", name)
    assert code == 2
    assert errors.startswith("setfold: ")
    assert message in errors
    assert "Traceback" not in errors
    assert output == ""


def test_debug_shows_the_traceback(run):
    code, _, errors = run("info", "missing")
    assert (code, errors) == (2, "setfold: missing does not exist. Check the path.\n")
    with pytest.raises(setfold.FileError):  # not caught, so Python prints the traceback
        run("--debug", "info", "missing")


# ---- info ----------------------------------------------------------------------------------


def test_info_on_a_model(run, model):
    code, output, _ = run("info", model)
    assert code == 0
    for words in (
        "model",
        "setfold.Composition",
        "torch.nn.Linear(in_features=3",
        "float32 (3, 3)",
    ):
        assert words in output
    facts = json.loads(run("info", model, "--json")[1])
    assert facts["kind"] == "model"
    assert facts["parameters"] == 12
    assert facts["bytes"] == model.stat().st_size
    assert facts["structure"]["class"] == "setfold.Composition"
    assert facts["dtype"] == "float32"


def test_info_on_a_hierarchy_shows_its_levels(run, tmp_path):
    levels = [setfold.SlotSetEncoder(3, 4, 6, 5), setfold.SlotSetEncoder(5, 2, 6, 5)]
    setfold.save(setfold.HierarchicalSlotSetEncoder(levels), tmp_path / "model")
    _, output, _ = run("info", tmp_path / "model")
    for words in ("num_slots=4", "num_slots=2", "activation: setfold.NormalizedReLU"):
        assert words in output


def test_info_on_a_state(run, tmp_path):
    encoder = make(aggregate=["mean", "max"])
    encoder.update(encoder.initial_state(2), draw(2, 5, 3)).save(tmp_path / "state")
    code, output, _ = run("info", tmp_path / "state")
    assert code == 0
    for words in ("state", "Sum", "Max", "float64 (2, 4, 4)"):
        assert words in output
    facts = json.loads(run("info", tmp_path / "state", "--json")[1])
    assert (facts["kind"], facts["sets"], facts["elements"]) == ("state", 2, 10)
    assert facts["fields"] == {"sum": ["Sum", [4, 4]], "max": ["Max", [4, 5]]}
    assert facts["digest"] == encoder.initial_state().weights.digest


def test_info_runs_nothing_that_a_file_names(run, here):
    (here / "evil.py").write_text("raise SystemExit('imported')")
    description = {"structure": {"class": "evil.Model", "arguments": {}}, "dtype": "float32"}
    setfold.core.persist.write(here / "model", "model", {}, description)
    code, output, _ = run("info", here / "model")
    assert code == 0
    assert "evil.Model" in output


@pytest.mark.parametrize("content", [b"", b"nothing of the kind"])
def test_info_on_another_file_is_exit_code_2(run, tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    code, _, errors = run("info", tmp_path / "file")
    assert code == 2
    assert errors.count("\n") == 1
    assert "not a safetensors file" in errors


def test_info_on_what_a_training_leaves(run, tmp_path):
    report, folder = tmp_path / "model.json", tmp_path / "model.safetensors.work"
    told = {"target": "y", "task": "regression", "splits": "", "best": "slots", "verdict": "level"}
    report.write_text(json.dumps(told))
    assert "level" in run("info", report)[1]
    folder.mkdir()
    (folder / "request.json").write_text("{}")
    (folder / "slots-0.safetensors").touch()
    assert "slots-0" in run("info", folder)[1]
    report.write_text("[1]")
    assert run("info", report)[0] == 2


def test_info_verifies_a_file(run, model):
    code, output, _ = run("info", model, "--verify")
    assert (code, output.count("verified:")) == (0, 1)
    assert json.loads(run("info", model, "--verify", "--json")[1])["verified"] == (
        "model with 2 tensors; it can be rebuilt"
    )
    content = bytearray(model.read_bytes())
    content[-1] ^= 1
    model.write_bytes(content)
    code, output, errors = run("info", model, "--verify")
    assert (code, output) == (2, "")
    assert errors.startswith(f"setfold: {model} is corrupt: its checksum")


@pytest.mark.parametrize(
    ("kind", "description"),
    [
        ("model", {"structure": {"class": "setfold.Pool", "arguments": []}}),
        ("model", {"structure": {"class": 3, "children": 3}}),
        ("model", {"structure": {"class": "torch.nn.Sequential", "children": [1]}}),
        ("state", {"fields": 3, "digest": []}),
        ("other", {}),
    ],
)
def test_info_on_a_strange_description(run, tmp_path, kind, description):
    setfold.core.persist.write(tmp_path / "file", kind, {}, description)
    assert run("info", tmp_path / "file")[0] in (0, 2)
    code, output, errors = run("info", tmp_path / "file", "--verify")
    assert (code, output, errors.count("\n")) == (2, "", 1)


# ---- any file ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_info_explains_inputs_of_every_format(run, tmp_path, name):
    path = tmp_path / f"a{FORMATS[name].suffix}"
    columns = FORMATS[name].write(path, 9)
    code, output, _ = run("info", path, "--json")
    facts = json.loads(output)
    assert code == 0
    assert facts["kind"].startswith("rows, ")
    assert facts["rows"] == 9
    assert set(columns) <= set(facts["columns"])
    code, output, _ = run("info", path)
    assert code == 0
    assert all(column in output for column in columns)


def test_info_of_arrays_of_several_lengths(run, tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros(5), y=np.zeros(1200))
    facts = json.loads(run("info", tmp_path / "a.npz", "--json")[1])
    assert facts["columns"] == {"x": "double, 5 rows", "y": "double, 1,200 rows"}


def test_info_of_one_tree(run, tmp_path):
    FORMATS["root"].write(tmp_path / "a.root", 9)
    code, output, _ = run("info", f"{tmp_path}/a.root:folder/tree", "--json")
    assert code == 0
    assert json.loads(output)["rows"] == 9


def test_info_of_damaged_files_of_setfold_is_an_error(run, model, tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((5, 3), np.float32))
    for out in ("out.parquet", "out.arrow", "out.npz"):
        path = tmp_path / out
        assert run("encode", model, tmp_path / "a.npy", "--out", path)[0] == 0
        assert json.loads(run("info", path, "--json")[1])["kind"] == "encodings"
        content = path.read_bytes()
        path.write_bytes(content[:-100] + bytes(20) + content[-80:])
        assert run("info", path)[0] == 2


def test_info_of_csv_that_setfold_wrote(run, model, tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((5, 3), np.float32))
    assert run("encode", model, tmp_path / "a.npy", "--out", tmp_path / "out.csv")[0] == 0
    facts = json.loads(run("info", tmp_path / "out.csv", "--json")[1])
    assert list(facts["columns"]) == ["set", "count", "encoding_0", "encoding_1", "encoding_2"]


# ---- the language of the command line ----------------------------------------------------------


def test_what_must_be_allowed_is_named_as_an_option(run, here):
    sys.path.insert(0, "")
    from mymodels import Sorted

    setfold.save(Sorted(), here / "sorted")
    sys.path.remove("")
    del sys.modules["mymodels"]
    errors = run("check", here / "sorted", "--dim-in", 3)[2]
    assert errors.rstrip().endswith("If you trust it, pass --allow mymodels.Sorted.")
    assert run("check", here / "sorted", "--dim-in", 3, "--allow", "mymodels.Sorted")[0] == 1


def test_a_width_is_asked_for_as_an_option(run, model):
    assert "pass the width of the elements, --dim-in." in run("check", model)[2]


@pytest.mark.usefixtures("here")
def test_modules_in_the_current_folder_do_not_replace_installed_ones(run, monkeypatch):
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    assert run("check", "mymodels:pool", "--no-processes")[0] == 0
    assert sys.path[-1] == ""  # looked at last


@pytest.mark.parametrize(
    ("words", "place", "expected"),
    [
        ("setfold en", 1, ["encode"]),
        ("setfold encode --feat", 2, ["--features"]),
        ("setfold encode --engine ", 3, ["local", "ray"]),
    ],
)
def test_shells_complete_commands_and_options(words, place, expected):
    code = "from setfold.cli import app; app(prog_name='setfold')"
    environment = {**os.environ, "_SETFOLD_COMPLETE": "complete_bash"}
    environment |= {"COMP_WORDS": words, "COMP_CWORD": str(place)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == expected
