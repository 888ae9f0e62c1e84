"""The benchmark runs, in its quick form; what it measures is not judged here."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import setfold
from bench.encoders import ENCODERS, FAMILIES
from bench.folds import passes
from bench.peers import PEERS
from bench.plan import NARROW, SHAPES

ROOT = Path(__file__).parent.parent
PICTURES = ("time.png", "memory.png", "encoders_time.png", "encoders_memory.png")


def test_the_quick_benchmark_runs(tmp_path):
    command = [sys.executable, "-W", "error", "-m", "bench", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    results = json.loads((tmp_path / "results.json").read_text())
    for found, names in (("peers", PEERS), ("encoders", ENCODERS)):
        assert len(results[found]) == len(SHAPES) * 2 * 2  # passes and lengths
        assert set().union(*(cell["seconds"] for cell in results[found])) == set(names)
    assert [fold["name"] for fold in results["folds"]] == list(passes())
    assert {target["number"] for target in results["targets"]} == set(range(1, 9))
    ways = {"forward+backward", "fold, forward", "fold, forward+backward"}
    measured = {(case["name"], case["way"]) for case in results["memory"]}
    assert measured >= {(name, way) for name in passes() for way in ways}
    table = (tmp_path / "table.md").read_text()
    assert all(f"| {name} |" in table for name in (*PEERS, *ENCODERS))
    for picture in PICTURES:
        assert (tmp_path / picture).stat().st_size > 10_000


def test_every_encoder_is_compared():
    ours = [pair.ours.build(NARROW) for family in FAMILIES for pair in family.pairs]
    compared = {type(module) for encoder in ours for module in encoder.modules()}
    public = [getattr(setfold, name) for name in setfold.__all__]
    classes = [found for found in public if isinstance(found, type)]
    encoders = {
        c for c in classes if issubclass(c, setfold.SetEncoder) and not inspect.isabstract(c)
    }
    assert encoders - compared == {setfold.ChunkAverage, setfold.PublishedSlotSetEncoder}
