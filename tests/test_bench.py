"""The benchmark runs, in its quick form; what it measures is not judged here."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import setfold
from bench import disk, instructions, live, roofline, speed, stores
from bench.__main__ import PARTS, steps
from bench.encoders import ENCODERS, FAMILIES
from bench.folds import GRADIENTS, passes
from bench.gradients import MODELS, asked_for
from bench.peers import ATTENTION, OURS, PEERS
from bench.plan import FULL, GRAPH_LIMIT, NARROW, QUICK, SHAPES, WIDE
from bench.results import TITLES, Cell, LiveCost, MemoryCase, Results, Way
from bench.timing import Timings
from setfold.native import library
from setfold.native.build import BuildError

ROOT = Path(__file__).parent.parent
PICTURES = ("time", "memory", "roofline", "encoders_time", "encoders_memory", "gradients")


@pytest.mark.long
def test_the_quick_benchmark_runs(tmp_path):
    module = "tests.quick_bench"
    command = [sys.executable, "-W", "error", "-m", module, "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    results = json.loads((tmp_path / "results.json").read_text())
    for found, names in (("peers", PEERS), ("encoders", ENCODERS)):
        assert len(results[found]) == len(SHAPES) * 2 * 2  # passes and lengths
        assert set().union(*(cell["seconds"] for cell in results[found])) == set(names)
    assert [fold["name"] for fold in results["folds"]] == list(passes())
    assert {target["number"] for target in results["targets"]} == set(TITLES)
    ways = {"forward+backward", "fold, forward", "fold, forward+backward"}
    measured = {(case["name"], case["way"]) for case in results["memory"]}
    assert measured >= {(name, way) for name in passes() for way in ways}
    trained = [(cost["model"], cost["n"]) for cost in results["training steps"]]
    assert trained == [(model.title, n) for model in MODELS for n in QUICK.gradient_lengths]
    assert [cost["files"] for cost in results["files"]] == [40, 40, 4, 40]
    assert [len(cost["seconds"]) for cost in results["frames"]] == [6]
    found = {(cost["database"], cost["sets touched"]): cost for cost in results["live sets"]}
    assert all(("SQLite", touched) in found for touched in QUICK.live_batches)
    assert all(
        len(cost["CPU seconds"]) == 4 + (kind[0] == "SQLite") for kind, cost in found.items()
    )
    assert results["live sets, service"]["failed"] == 0
    for cost in results["instruction sets"]:
        assert list(cost["seconds"]) == ["torch kernels", *library.available()]
    both = [(list(shape), way) for shape in SHAPES for way in ("forward", "forward+backward")]
    measured = [(list(c["shape"].values()), c["pass"]) for c in results["instruction sets"]]
    assert measured == both
    table = (tmp_path / "benchmark.md").read_text()
    assert library.describe() in " ".join(table.split())
    steps = [label for model in MODELS for label in model.lines]
    assert all(f"| {name} |" in table for name in (*PEERS, *ENCODERS, *steps))
    for picture in PICTURES:
        file = f"benchmark_{picture}.png"
        assert (tmp_path / file).stat().st_size > 10_000
        assert f"]({file})" in table
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


def test_live_sets_need_space(tmp_path, monkeypatch):
    usage = stores.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(stores.shutil, "disk_usage", lambda _: usage._replace(free=1_000))
    results = Results(QUICK)
    for step in steps(QUICK, tmp_path, "live"):
        if "SQLite" in step.name:
            step.run(results)
    (omission,) = results.omissions
    assert "left out: they need" in omission
    assert not results.targets
    assert not list(tmp_path.iterdir())


def test_live_sets_are_judged_by_wall_time_within_rounds(tmp_path):
    results, bench = Results(QUICK), live.LiveBench(QUICK, tmp_path)
    wall = {live.RAW: [1.0, 2.0, 3.0], live.LIVE: [2.0, 2.0, 12.0], live.FEW: [1.0, 1.0, 4.0]}
    cpu = Timings({name: [1.0] * 3 for name in wall})
    bench._judge(results, LiveCost("SQLite", 400, 10, Timings(wall), cpu))
    raw, kept = results.targets
    assert (raw.measured, raw.holds, raw.detail) == (0.5, True, "CPU 1.00×")
    assert (kept.measured, kept.holds) == (2.0, False)


def test_raw_upserts_write_other_bytes_every_time(tmp_path):
    events = stores.Events()
    found = stores.SqliteStores(tmp_path)
    store = found.create("many", 2, 5, events)
    found.fill_raw("many")
    names = [name for (name,) in found.raw.execute("SELECT name FROM raw ORDER BY name")]
    assert [stores.name_of(n).encode() in name for n, name in enumerate(names)] == [True] * 5
    first, second = (events.blobs(5, 100) for _ in range(2))
    for states in (first, second):
        found.upsert(names, states, read=True)
        assert [s for (s,) in found.raw.execute("SELECT state FROM raw ORDER BY name")] == states
    assert len({*first, *second}) == 10
    assert store.count([stores.name_of(n) for n in range(5)]) == [1] * 5
    found.close()


def test_every_encoder_is_compared():
    ours = [pair.ours.build(NARROW) for family in FAMILIES for pair in family.pairs]
    compared = {type(module) for encoder in ours for module in encoder.modules()}
    public = [getattr(setfold, name) for name in setfold.__all__]
    classes = [found for found in public if isinstance(found, type)]
    encoders = {
        c for c in classes if issubclass(c, setfold.SetEncoder) and not inspect.isabstract(c)
    }
    assert encoders <= compared


def test_the_worst_size_counts_against_attention(monkeypatch):
    slow = {1: 2.0, 100: 0.5, 1_000: 3.0}

    def fake(peers, plan, shape, n, backward):
        return Timings({OURS: [1.0], ATTENTION: [slow[n]]})

    monkeypatch.setattr(speed, "_time", fake)
    results = Results(QUICK)
    speed.compare_attention(results, QUICK, NARROW, backward=False)
    anywhere, small = results.targets
    assert (anywhere.measured, small.measured) == (0.5, 3.0)
    assert not anywhere.holds
    assert anywhere.detail == "n = 1: 2.00×, n = 100: 0.50×, n = 1e3: 3.00×"


def test_graphs_of_attention_fit_into_memory(monkeypatch):
    lengths = []
    faster = Timings({OURS: [1.0], ATTENTION: [1.0]})
    monkeypatch.setattr(speed, "_time", lambda *a: lengths.append(a[3]) or faster)
    speed.compare_attention(Results(FULL), FULL, WIDE, backward=True)
    assert lengths == [1, 10, 100, 1_000, 10_000, 100_000]
    lengths.clear()
    speed.compare_attention(Results(FULL), FULL, NARROW, backward=True)
    assert lengths == list(FULL.attention_lengths)


def test_the_slowest_cell_counts_against_a_library_peer():
    results = Results(QUICK)
    times = {"setfold PMA": 1.0, "PyG PMA": 1.5, "setfold DeepSets": 1.0, "PyG DeepSets": 1.1}
    times |= {"setfold SetTransformer": 1.0, "PyG ISAB, PMA": 1.2}
    times |= {"setfold FullSetTransformer": 1.0, "PyG SetTransformer": 1.2}
    for shape, n, factor in ((s, n, f) for s in SHAPES for n, f in ((100, 1.0), (6_000, 2.0))):
        samples = {name: [time] for name, time in times.items()}
        samples["setfold PMA"] = [factor]
        results.encoder_cells.append(Cell(shape, n, False, Timings(samples)))
    speed.judge_library_peers(results)
    found = {(t.claim, t.shape): (t.measured, t.holds) for t in results.targets}
    assert len(found) == 4 * len(SHAPES)
    assert found["setfold PMA vs PyG PMA", WIDE] == (0.75, False)
    assert found["setfold DeepSets vs PyG DeepSets", WIDE] == (1.1, True)


def test_kernels_are_chosen_for_one_call_only():
    before, seen = library.choice.kernels, []
    instructions.with_kernels(None, lambda: seen.append(library.choice.kernels))()
    assert seen == [None]
    assert library.choice.kernels is before


def test_without_a_compiler_a_matrix_product_measures_arithmetic(monkeypatch):
    def fail():
        raise BuildError("no compiler")

    monkeypatch.setattr(roofline, "find_compiler", fail)
    peak = roofline.arithmetic.__wrapped__(8)
    peak.run()
    assert peak.operations == 2 * 8**3


def test_work_is_counted_as_in_the_formula(monkeypatch):
    samples = {"False": [2.0], "True": [8.0], "peak": [0.5], "sum": [0.25]}
    monkeypatch.setattr(roofline, "interleaved", lambda runs, plan: Timings(samples))
    results = Results(QUICK)
    roofline.measure(results, QUICK, NARROW)
    forward, training = results.rooflines
    n, d, slots = forward.length, NARROW.dim_in, NARROW.num_slots
    multiply_adds = n * slots * d  # of one product
    assert forward.operations == 2 * 2 * multiply_adds
    assert training.operations == 5 * 2 * multiply_adds
    assert (forward.bytes_read, training.bytes_read) == (4 * n * d, 8 * n * d)
    peak = roofline.arithmetic(QUICK.product_width).operations / 0.5
    assert forward.arithmetic_share == forward.operations / 2.0 / peak
    assert training.reading_share == 0.25 * 2 / 8.0
