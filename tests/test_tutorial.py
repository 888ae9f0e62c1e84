"""The commands of the tutorial, exactly as they are printed."""

from __future__ import annotations

import shlex

import numpy as np
import pyarrow.parquet as pq
from typer.testing import CliRunner

from setfold import cli
from tests.examples import ROOT, blocks_of, run_examples

PAGE = ROOT / "docs" / "tutorial.md"


def test_the_commands_run_and_do_what_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_examples(PAGE)
    outputs = {}
    for block in blocks_of(PAGE):
        if block.language != "console":
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            program, *words = shlex.split(line.removeprefix("$ "))
            assert program == "setfold"
            result = CliRunner().invoke(cli.app, words, catch_exceptions=False)
            assert result.exit_code == 0, line
            outputs[words[0]] = result.stdout
    assert "The set model is better than the best baseline" in outputs["train"]
    assert "397" in outputs["evaluate"]
    vectors = pq.read_table("vectors.parquet")
    assert len(vectors) == 1400
    everyone = pq.read_table("predictions-of-all.parquet")
    assert len(everyone) == 1797
    found = np.array(everyone["encoding"].to_pylist())
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-5)
    alone = np.array(pq.read_table("predictions.parquet")["encoding"].to_pylist())
    np.testing.assert_allclose(found[1400:], alone, rtol=1e-4, atol=1e-6)
