"""The load test runs; what it measures is not judged here."""

from __future__ import annotations

import sys

import pytest

from bench import serve


@pytest.mark.long
def test_the_load_is_applied_without_errors(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["serve", "--seconds", "0.5", "--clients", "8"])
    serve.main()
    shown = capsys.readouterr().out
    assert "errors: 0 \n" in shown
    assert "updates of one element, 8 clients" in shown
