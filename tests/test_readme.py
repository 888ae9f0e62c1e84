"""The README: its Python and its shell commands run, and print what it shows."""

from __future__ import annotations

import runpy
import shlex

import pytest
import torch
from typer.testing import CliRunner

from setfold.cli.app import app
from tests.examples import ROOT, blocks_of, examples_of, run_examples

README = ROOT / "README.md"
TABLES = ROOT / "docs" / "examples" / "tables.py"
MEASURED = ROOT / "docs" / "examples" / "chunk_average.py"


@pytest.fixture(autouse=True)
def one_thread():
    """Tests run side by side; many threads on tiny batches only get in each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def transcript():
    """The shell commands of the README and the lines that each of them prints."""
    (block,) = [b for b in blocks_of(README) if b.language == "console"]
    text = block.text.replace("\\\n", " ")
    commands = [part.splitlines() for part in text.split("$ ")[1:]]
    return {command: [line for line in shown if line != "..."] for command, *shown in commands}


def test_the_examples_and_the_commands_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_examples(README)
    assert names["here"].merge(names["there"]).count.tolist() == [100_000]

    (write, _), (train, verdict), (encode, printed) = transcript().items()
    assert write == f"python {TABLES.relative_to(ROOT)}"
    runpy.run_path(str(TABLES))
    result = CliRunner().invoke(app, shlex.split(train)[1:])
    assert result.exit_code == 0, result.output
    assert verdict[0].split(":")[0] in result.output

    result = CliRunner().invoke(app, shlex.split(encode)[1:])
    assert result.exit_code == 0, result.output
    for line in printed:
        assert line in result.output.splitlines()
    assert (tmp_path / "encodings.parquet").exists()


def test_the_tutorial_shows_the_program_that_writes_the_tables():
    _, code = TABLES.read_text().split('"""\n\n', 1)
    assert code in [block.text for block in examples_of(ROOT / "docs" / "tutorial.md")]


def test_chunk_and_average_is_as_wrong_as_it_says():
    rows = runpy.run_path(str(MEASURED))["measure"]()
    (right, fold_error, averaged, error) = next(row[1:] for row in rows if row[0] == 16)
    assert right == pytest.approx(0.94, abs=0.05)
    assert averaged < 0.5  # 24%, here and then
    assert fold_error < 1e-14 < 1 < error


def test_it_fits_on_a_few_screens():
    lines = README.read_text().splitlines()
    assert len(lines) <= 150
    assert not [line for line in lines if len(line) > 100]
