"""The commands of docs/live.md, exactly as they are printed."""

from __future__ import annotations

import runpy

import pytest

from tests.examples import ROOT, examples_of, run_examples
from tests.test_tutorial import commands_of, output_of

PAGE = ROOT / "docs" / "live.md"
ROWS = ROOT / "docs" / "examples" / "live_rows.py"


def test_the_commands_print_what_the_page_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROWS))
    commands = commands_of(PAGE)
    assert {words[2] for words, _ in commands} >= {"create", "update", "get", "upgrade", "verify"}
    for words, shown in commands:
        printed = output_of(words).splitlines()
        assert not [line for line in shown if line not in printed], (words, printed)


def test_the_page_shows_the_program_that_writes_the_rows():
    _, code = ROWS.read_text().split('"""\n\n', 1)
    assert code in [block.text for block in examples_of(PAGE)]


def test_lancedb(tmp_path, monkeypatch):
    pytest.importorskip("lancedb")  # 75 MB, so it is in no extra
    monkeypatch.chdir(tmp_path)
    assert run_examples(PAGE, "lancedb")["nearest"] == "ann"
