"""The demo runs on a small set, and its answer does not depend on how the set is cut up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def demo(*arguments):
    command = [sys.executable, "-W", "error", "-m", "demo", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_the_demo_folds_four_ways_and_draws(tmp_path):
    done = demo("--elements", 50_000, "--workers", 2, "--out", tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    for way in ("streamed", "split", "shuffled", "whole", "WRONG"):
        assert way in done.stdout
    assert (tmp_path / "fold.png").stat().st_size > 10_000


def test_a_set_too_small_to_show_anything_is_refused():
    done = demo("--elements", 10)
    assert done.returncode == 2
    assert "1000 or more" in done.stderr
