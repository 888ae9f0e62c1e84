"""The benchmark runs, in its quick form; what it measures is not judged here."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import setfold
from bench import disk
from bench.__main__ import PARTS, steps
from bench.encoders import ENCODERS, FAMILIES
from bench.folds import GRADIENTS, passes
from bench.gradients import MODELS, asked_for
from bench.peers import PEERS
from bench.plan import FULL, GRAPH_LIMIT, NARROW, QUICK, SHAPES
from bench.results import MemoryCase, Results, Way

ROOT = Path(__file__).parent.parent
PICTURES = (
    "time.png",
    "memory.png",
    "encoders_time.png",
    "encoders_memory.png",
    "gradients.png",
)


def test_the_quick_benchmark_runs(tmp_path):
    command = [sys.executable, "-W", "error", "-m", "bench", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    results = json.loads((tmp_path / "results.json").read_text())
    for found, names in (("peers", PEERS), ("encoders", ENCODERS)):
        assert len(results[found]) == len(SHAPES) * 2 * 2  # passes and lengths
        assert set().union(*(cell["seconds"] for cell in results[found])) == set(names)
    assert [fold["name"] for fold in results["folds"]] == list(passes())
    assert {target["number"] for target in results["targets"]} == set(range(1, 13))
    ways = {"forward+backward", "fold, forward", "fold, forward+backward"}
    measured = {(case["name"], case["way"]) for case in results["memory"]}
    assert measured >= {(name, way) for name in passes() for way in ways}
    trained = [(cost["model"], cost["n"]) for cost in results["training steps"]]
    assert trained == [(model.title, n) for model in MODELS for n in QUICK.gradient_lengths]
    assert [cost["files"] for cost in results["files"]] == [40, 40, 4]
    table = (tmp_path / "table.md").read_text()
    steps = [label for model in MODELS for label in model.lines]
    assert all(f"| {name} |" in table for name in (*PEERS, *ENCODERS, *steps))
    for picture in PICTURES:
        assert (tmp_path / picture).stat().st_size > 10_000
    assert not any(found.is_dir() for found in tmp_path.iterdir())  # the set on disk is gone


def test_each_step_belongs_to_one_part(tmp_path):
    everything = [step.name for step in steps(QUICK, tmp_path)]
    first, *others = everything
    parts = [step.name for part in PARTS for step in steps(QUICK, tmp_path, part)]
    assert [name for name in parts if name != first] == others


def test_autograd_is_asked_only_for_what_will_fit():
    longer, longest = 100_000, 1_000_000
    for model in MODELS:
        for name, way in model.lines.values():
            results = Results(FULL)
            case = MemoryCase(name, way, longest)
            if way is Way.WHOLE:
                assert not asked_for(case, results, FULL)  # not even the shorter set did fit
            results.memory[MemoryCase(name, way, longer)] = GRAPH_LIMIT / 10
            assert asked_for(case, results, FULL)
            results.memory[MemoryCase(name, way, longer)] = GRAPH_LIMIT / 9
            assert asked_for(case, results, FULL) == (way is not Way.WHOLE)


def test_no_more_chunks_are_drawn_than_there_are():
    results = Results(FULL)
    asked = [way for way in GRADIENTS if asked_for(MemoryCase("any", way, 50_000), results, FULL)]
    assert asked == [Way.EXACT, Way.TENSOR, Way.UNBIASED_1, Way.UNBIASED_4, Way.SUBSET]


def test_a_full_disk_is_reported(tmp_path, monkeypatch):
    usage = disk.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: usage._replace(free=1_000))
    results = Results(QUICK)
    disk.measure(results, QUICK, tmp_path)
    assert "left out" in results.omissions[0]
    assert not results.targets
    assert not list(tmp_path.iterdir())


def test_every_encoder_is_compared():
    ours = [pair.ours.build(NARROW) for family in FAMILIES for pair in family.pairs]
    compared = {type(module) for encoder in ours for module in encoder.modules()}
    public = [getattr(setfold, name) for name in setfold.__all__]
    classes = [found for found in public if isinstance(found, type)]
    encoders = {
        c for c in classes if issubclass(c, setfold.SetEncoder) and not inspect.isabstract(c)
    }
    assert encoders <= compared
