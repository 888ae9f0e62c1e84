"""The commands of the tutorial and of the README, exactly as they are printed.

Both pages train the same model with the same command. It takes long, so it runs once.
"""

from __future__ import annotations

import os
import runpy
import shlex

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from setfold import cli
from tests.examples import ROOT, blocks_of, examples_of

pytestmark = pytest.mark.long

PAGE, README = ROOT / "docs" / "tutorial.md", ROOT / "README.md"
TABLES = ROOT / "docs" / "examples" / "tables.py"


def commands_of(page):
    """The commands of a page, each with the lines that the page shows as its output."""
    consoles = [block.text for block in blocks_of(page) if block.language == "console"]
    blocks = [text for text in consoles if text.startswith("$ ")]  # others are not run
    parts = "".join(blocks).replace("\\\n", " ").split("$ ")[1:]
    commands = [part.splitlines() for part in parts]
    return [
        (shlex.split(first), [line for line in shown if line != "..."])
        for first, *shown in commands
    ]


def output_of(words):
    assert words[0] == "setfold"
    result = CliRunner().invoke(cli.app, words[1:], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the tables and the model, and what the command printed."""
    folder = tmp_path_factory.mktemp("tutorial")
    train, *_ = (words for words, _ in commands_of(PAGE))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        runpy.run_path(str(TABLES))
        return folder, output_of(train)


@pytest.fixture
def printed(trained, monkeypatch):
    """What the command of the training printed, in whose folder the test runs."""
    monkeypatch.chdir(trained[0])
    return trained[1]


def test_the_tutorial_shows_the_program_that_writes_the_tables():
    _, code = TABLES.read_text().split('"""\n\n', 1)
    assert code in [block.text for block in examples_of(PAGE)]


def test_the_commands_do_what_the_tutorial_says(printed):
    assert "The set model is better than the best baseline" in printed
    (_, *others), outputs = (words for words, _ in commands_of(PAGE)), {}
    for words in others:
        outputs[words[1]] = output_of(words)
    assert "397" in outputs["evaluate"]
    vectors = pq.read_table("vectors.parquet")
    assert len(vectors) == 1400
    everyone = pq.read_table("predictions-of-all.parquet")
    assert len(everyone) == 1797
    found = np.array(everyone["encoding"].to_pylist())
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-5)
    alone = np.array(pq.read_table("predictions.parquet")["encoding"].to_pylist())
    np.testing.assert_allclose(found[1400:], alone, rtol=1e-4, atol=1e-6)


def test_the_commands_do_what_the_readme_says(printed):
    (write, _), (train, verdict), (encode, lines) = commands_of(README)
    assert write == ["python", str(TABLES.relative_to(ROOT))]
    assert train == commands_of(PAGE)[0][0]
    assert verdict[0].split(":")[0] in printed
    shown = output_of(encode).splitlines()
    assert all(line in shown for line in lines)
    assert os.path.exists("encodings.parquet")
