from __future__ import annotations

import subprocess
import sys

import pytest

import experiments.recipes
from experiments import __main__ as command_line
from experiments import page, records
from experiments.data import prepare
from experiments.data.store import DataSet
from setfold import FileError
from tests.experiments.test_records import RECORD
from tests.experiments.tiny import recipe


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run the command line as a shell would, with two recipes: exit code, output, error output."""
    tiny = {"tiny": recipe(), "small": recipe(name="small", number=2)}
    monkeypatch.setattr(experiments.recipes, "all_recipes", lambda: tiny)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SETFOLD_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "150")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["experiments", *map(str, arguments)])
        try:
            command_line.main()
            code = 0
        except SystemExit as exit:
            code = exit.code or 0
        return code, *capsys.readouterr()

    return run


def test_help_does_not_wait_for_torch():
    code = "import sys, experiments.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("command", ["run", "report", "prepare"])
def test_help_has_examples(run, command):
    code, output, _ = run(command, "--help")
    assert code == 0
    assert f"python -m experiments {command}" in output


def test_list_tells_what_there_is(run, tmp_path):
    records.write(RECORD, tmp_path / "results" / "records")
    code, output, _ = run("list")
    assert code == 0
    assert "records in results/records" in output
    rows = [line.split("│") for line in output.splitlines() if "│" in line]
    assert [[cell.strip() for cell in row[1:-1]] for row in rows] == [
        ["1", "tiny", "A tiny recipe", "0", "1"],
        ["2", "small", "A tiny recipe", "0", "none"],
    ]


def test_run_leaves_records(run, tmp_path):
    code, output, _ = run("run", "tiny", "--size", "smoke", "--device", "cpu", "--threads", "1")
    assert code == 0
    assert "[1 of 5] tiny: slow, power 1, seed 0" in output
    folder = tmp_path / "out" / "experiments" / "records" / "smoke"
    assert output.endswith(
        "records: out/experiments/records/smoke\npython -m experiments report --records "
        "out/experiments/records/smoke --size smoke --out out/experiments/report\n"
    )
    assert {record.seed for record in records.read(folder, "tiny")} == {0}
    code, output, _ = run("run", "tiny", "--size", "smoke")
    assert (code, "of 5]" in output) == (0, False)


def test_seeds_and_all(run, tmp_path):
    code, *_ = run("run", "all", "--size", "smoke", "--seed", 4, "--seed", 5, "--out", "there")
    assert code == 0
    for name in ("tiny", "small"):
        found = records.read(tmp_path / "there" / "records" / "smoke", name)
        assert {record.seed for record in found} == {4, 5}
        assert len(found) == 10


@pytest.mark.parametrize(
    ("name", "hint"), [("tinny", "Did you mean tiny?"), ("xyz", "python -m experiments list")]
)
def test_an_unknown_recipe_is_an_error_that_names_near_ones(run, name, hint):
    code, _, errors = run("run", name)
    assert code == 1
    assert name in errors
    assert hint in errors


def test_failures_are_printed_at_the_end(run, monkeypatch):
    monkeypatch.setattr("experiments.running.run", lambda *_, **__: ["tiny: no luck"])
    code, output, errors = run("run", "tiny")
    assert code == 1
    assert "failed: tiny: no luck" in errors
    assert output == ""  # nothing is recorded, so there is nothing to report


def test_an_interruption_says_how_to_go_on(run, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("experiments.running.run", interrupt)
    code, _, errors = run("run", "tiny")
    assert code == 130
    assert "run the same command again to resume" in errors


def test_errors_are_short_unless_debugging(run, monkeypatch):
    code, _, errors = run("run", "nothing")
    assert code == 1
    assert "Traceback" not in errors
    with pytest.raises(Exception, match="unknown recipe"):
        run("--debug", "run", "nothing")


def test_report_writes_what_the_recipes_say(run, monkeypatch, tmp_path):
    calls = []

    def write(recipes, folder, out, size):
        calls.append(([found.name for found in recipes], str(folder), str(out), size))
        return [out / "RESULTS.md"]

    monkeypatch.setattr(page, "write", write)
    code, output, _ = run("report", "--out", "there")
    assert (code, output) == (0, "there/RESULTS.md\n")
    assert calls == [(["tiny", "small"], "results/records", "there", "small")]


@pytest.mark.parametrize("options", [["--records", "nowhere"], ["--size", "paper"]], ids=str)
def test_a_report_of_nothing_is_an_error(run, tmp_path, options):
    records.write(RECORD, tmp_path / "results" / "records")
    code, output, errors = run("report", "--out", "there", *options)
    assert (code, output) == (1, "")
    assert errors.startswith("experiments: nothing to report")
    assert not (tmp_path / "there").exists()


@pytest.fixture
def data(monkeypatch):
    def make(source, folder, progress):
        progress(1, 2)
        if not source.exists():
            raise FileError(f"there is no {source}.")
        return folder / "mnist.safetensors"

    monkeypatch.setitem(prepare.DATASETS, "mnist", DataSet("mnist", "Download it.", make))


def test_prepare_makes_a_file(run, data, tmp_path, monkeypatch):
    assert run("prepare", "mnist", tmp_path, "--out", "there")[:2] == (
        0,
        "there/mnist.safetensors\n",
    )
    monkeypatch.setenv("SETFOLD_DATA", "elsewhere")
    assert run("prepare", "mnist", tmp_path)[:2] == (0, "elsewhere/mnist.safetensors\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense", "x"], "unknown data set 'nonsense'"),
        (["mnist", "x"], "pass --out FOLDER, or set SETFOLD_DATA"),
        (["mnist", "missing", "--out", "x"], "there is no missing"),
        (["mnist", "x", "--out", "x", "--module", "a:b"], "--module is only for tiny_imagenet"),
    ],
)
def test_wrong_preparations_are_errors(run, data, arguments, message):
    code, _, errors = run("prepare", *arguments)
    assert code == 1
    assert message in errors


def test_prepare_tells_what_to_download(run, data):
    assert run("prepare", "mnist")[:2] == (0, "Download it.\n")


def test_prepare_lists_what_there_is(run, data):
    code, output, _ = run("prepare")
    assert code == 0
    assert "mnist: Download it.\n" in output
    assert [text.split(":")[0] for text in output.split("\n\n")] == [
        "modelnet40",
        "celeba",
        "mnist",
        "tiny_imagenet",
    ]


def test_recipes_are_found_in_the_order_of_their_numbers():
    found = experiments.recipes.all_recipes()
    numbers = [one.number for one in found.values()]
    assert numbers == sorted(set(numbers))
    assert all(name == one.name for name, one in found.items())
