"""The benchmark runs, in its quick form; what it measures is not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_quick_benchmark_runs(tmp_path):
    command = [sys.executable, "-W", "error", "-m", "bench", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    results = json.loads((tmp_path / "results.json").read_text())
    assert results
    assert "literal" in (tmp_path / "table.md").read_text()
    for picture in ("time.png", "memory.png"):
        assert (tmp_path / picture).stat().st_size > 10_000
