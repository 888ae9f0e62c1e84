from __future__ import annotations

import csv
import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from experiments.progress import Display
from experiments.recipe import Training
from tests.experiments.tiny import Line, fit


def test_the_history_is_written_as_csv(tmp_path):
    trained = fit(Training(Line(), 4, 8, validations=4), tmp_path)
    with (trained.folder / "history.csv").open() as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    assert {name: [row[name] for row in rows] for name in rows[0]} == trained.history


def test_and_for_tensorboard_where_it_is_installed(tmp_path):
    pytest.importorskip("tensorboard")
    trained = fit(Training(Line(), 4, 8, validations=4), tmp_path)
    assert len(list((trained.folder / "tensorboard").glob("events*"))) == 1


def test_lines_are_printed_where_there_is_no_terminal(monkeypatch):
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("experiments.progress.time", clock)
    text = io.StringIO()
    with Display(Console(file=text), 10, done=4.0) as display:
        now[0] += 30
        display.show(6.0, {"loss": 0.5, "error": 0.25})
        display.show(7.0, {"loss": 0.4})  # too soon after the first
    # 30 seconds for two epochs, four are left
    assert text.getvalue() == "epoch 6.0 of 10  loss 0.5  error 0.25  about 60 s left\n"


def test_a_terminal_has_a_bar(monkeypatch):
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120)
    with Display(console, 10, done=0.0) as display:
        display.show(6.0, {"loss": 0.5})
        display.bar.refresh()
    assert "epoch 6.0 of 10" in text.getvalue()
    assert "loss 0.5" in text.getvalue()
