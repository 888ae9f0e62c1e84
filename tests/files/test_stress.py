"""Stress tests with realistic sizes; they take minutes, so they only run with: make stress."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import setfold

pytestmark = pytest.mark.skipif(
    not os.environ.get("SETFOLD_STRESS"), reason="takes minutes; set SETFOLD_STRESS=1 to run"
)
WIDTH, SLOTS = 16, 16


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    setfold.save(setfold.SlotSetEncoder(WIDTH, SLOTS, 32, 64), path)
    return path


def write(folder, ids, files, seed=0):
    """Write rows whose values are seeded by the number of the file."""
    folder.mkdir()
    for number, some in enumerate(np.array_split(ids, files)):
        table = pa.table({"event": some, **columns(number, len(some), seed)})
        pq.write_table(table, folder / f"part {number:03d}.parquet", row_group_size=1 << 17)
    return folder


def columns(number, count, seed=0):
    generator = np.random.default_rng((seed, number))
    elements = generator.standard_normal((count, WIDTH), dtype=np.float32)
    return {f"f{i}": elements[:, i] for i in range(WIDTH)}


MORTAL = """
import runpy, signal, sys
signal.setitimer(signal.ITIMER_PROF, float(sys.argv.pop(1)))  # SIGPROF kills it
runpy.run_module("setfold.cli", run_name="__main__")
"""


def typed(*words, life=0):
    """Start the command in a new process, which is killed after some seconds of CPU time, if any."""
    command = [sys.executable, "-c", MORTAL, str(life), *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def cpu_seconds():
    """CPU time of the processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def encoded(model, folder, out, memory, *words):
    """Run the command, and return its summary."""
    options = ["--set", "event", "--out", out, "--memory", memory, "--json", *words]
    process = typed("encode", model, folder, *options)
    text, errors = process.communicate()
    assert process.returncode == 0, errors
    return json.loads(text)


def reference(model, folder, wanted):
    """Return the counts of all sets, and the encodings of some, computed in float64."""
    encoder = setfold.load(model).double()
    with torch.no_grad():
        slots = encoder.initial_state(1).slots[0]
        queries = encoder.to_query(encoder.norm(slots)).numpy()
    key, value = (
        [p.detach().numpy() for p in layer.parameters()]
        for layer in (encoder.to_key, encoder.to_value)
    )
    counts, sums = {}, {name: np.zeros((SLOTS, 64)) for name in wanted}
    for path in sorted(folder.iterdir()):
        table = pq.read_table(path)
        ids = table["event"].to_numpy()
        elements = np.stack([table[f"f{i}"].to_numpy() for i in range(WIDTH)], 1)
        for name, count in zip(*np.unique(ids, return_counts=True), strict=True):
            counts[int(name)] = counts.get(int(name), 0) + int(count)
        for name in wanted:
            own = elements[ids == name].astype(np.float64)
            scores = (own @ key[0].T + key[1]) @ queries.T / 8
            weights = 1 / (1 + np.exp(-scores)) + 1e-8
            weights /= weights.sum(1, keepdims=True)
            sums[name] += weights.T @ (own @ value[0].T + value[1])
    return counts, {name: total / counts[name] for name, total in sums.items()}


def assert_right(model, folder, out, sample):
    found = pq.read_table(out)
    names = found["set"].to_numpy()
    assert (np.diff(names) > 0).all()
    wanted = np.random.default_rng(0).choice(names, sample, replace=False).tolist()
    counts, encodings = reference(model, folder, wanted)
    assert dict(zip(names.tolist(), found["count"].to_pylist(), strict=True)) == counts
    for name in wanted:
        place = int(np.searchsorted(names, name))
        encoding = np.array(found["encoding"][place].as_py()).reshape(SLOTS, 64)
        np.testing.assert_allclose(encoding, encodings[name], rtol=1e-4, atol=1e-6)


def test_twenty_million_elements_of_sets_of_very_different_size(tmp_path, model):
    generator = np.random.default_rng(0)
    weights = 1 / np.arange(1, 2001) ** 1.2
    ids = generator.choice(2000, 20_000_000, p=weights / weights.sum())
    folder = write(tmp_path / "in", ids, 40)
    facts = encoded(model, folder, tmp_path / "out.parquet", "1GB")
    print(facts)
    assert facts["elements"] == 20_000_000
    assert facts["peak_memory"] < 1_000_000_000
    assert_right(model, folder, tmp_path / "out.parquet", 20)


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_two_million_small_sets(tmp_path, model, is_shuffled):
    ids = np.repeat(np.arange(2_000_000), 5)
    if is_shuffled:
        np.random.default_rng(0).shuffle(ids)
    folder = write(tmp_path / "in", ids, 20)
    facts = encoded(model, folder, tmp_path / "out.parquet", "1GB")
    print(facts)
    assert (facts["sets"], facts["elements"]) == (2_000_000, 10_000_000)
    assert facts["spills"] > 0
    assert facts["peak_memory"] < 1_000_000_000
    found = pq.read_table(tmp_path / "out.parquet", columns=["set", "count"])
    assert (found["set"].to_numpy() == np.arange(2_000_000)).all()
    assert (found["count"].to_numpy() == 5).all()


def test_killed_twenty_times(tmp_path, model):
    ids = np.random.default_rng(0).integers(0, 150_000, 3_000_000)
    folder = write(tmp_path / "in", ids, 6)
    before = cpu_seconds()
    whole = encoded(model, folder, tmp_path / "whole.parquet", "600MB")
    life = cpu_seconds() - before
    assert whole["spills"] > 0
    out, kills, generator = tmp_path / "parts.parquet", 0, random.Random(0)
    options = ["--set", "event", "--out", out, "--memory", "600MB", "--resume"]
    expected = (tmp_path / "whole.parquet").read_bytes()
    while kills < 20:
        share = generator.uniform(0.1, 0.5)
        process = typed("encode", model, folder, *options, life=share * life)
        process.communicate()
        assert process.returncode in (0, -signal.SIGPROF)
        kills += process.returncode != 0
        if out.exists():  # complete, because it is renamed last; start another run
            assert out.read_bytes() == expected
            out.unlink()
            shutil.rmtree(f"{out}.work", ignore_errors=True)
    encoded(model, folder, out, "600MB", "--resume")
    assert out.read_bytes() == expected


def test_a_disk_that_is_full(tmp_path, model):
    ids = np.random.default_rng(0).integers(0, 100_000, 2_000_000)
    folder, small = write(tmp_path / "in", ids, 4), tmp_path / "small disk"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60m", "none", small], check=False)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        options = ["--set", "event", "--out", small / "out.parquet", "--memory", "600MB"]
        process = typed("encode", model, folder, *options)
        _, errors = process.communicate()
        assert process.returncode == 2
        assert "is full" in errors
        assert "--resume" in errors
        assert not (small / "out.parquet").exists()
        subprocess.run(["mount", "-o", "remount,size=2g", small], check=True)
        encoded(model, folder, small / "out.parquet", "600MB", "--resume")
        encoded(model, folder, tmp_path / "whole.parquet", "600MB")
        whole = (tmp_path / "whole.parquet").read_bytes()
        assert (small / "out.parquet").read_bytes() == whole
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_slide_of_two_million_patches(tmp_path):
    """4 GB in the layout of CLAM and TRIDENT, a chunk per patch."""
    patches, width, rows, path = 2_000_000, 1024, 20_000, tmp_path / "slide.h5"
    draw, tissue = np.random.default_rng(0), 1600  # patches in a row
    try:
        with h5py.File(path, "w") as file:
            shapes = {"features": (width, "f2"), "coords": (2, "i8")}
            for name, (size, kind) in shapes.items():
                file.create_dataset(name, (0, size), kind, maxshape=(None, size), chunks=(1, size))
            for first in range(0, patches, rows):
                number = np.arange(first, first + rows)
                for name in shapes:
                    file[name].resize(first + rows, axis=0)
                file["features"][first:] = draw.standard_normal((rows, width), dtype=np.float32)
                file["coords"][first:] = np.stack([number % tissue, number // tissue], 1) * 224
        torch.manual_seed(0)
        model = tmp_path / "model.safetensors"
        setfold.save(setfold.GatedAttentionPool(width, 128), model)
        heat, picture = tmp_path / "heat.parquet", tmp_path / "heat.png"
        outs = {"encode": ["--out", tmp_path / "e.npz"]}
        outs["weights"] = ["--out", heat, "--picture", picture]
        for command, out in outs.items():
            with typed(command, model, path, *out, "--memory", "900MB") as process:
                _, status, usage = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
                assert not status, process.stderr.read()
            print(command, usage.ru_maxrss // 1000, "MB")
            assert usage.ru_maxrss < 1_000_000  # in units of 1024 bytes
    finally:
        path.unlink(missing_ok=True)
    weights = pq.read_table(heat, columns=["weight"])["weight"].to_numpy()
    assert len(weights) == patches
    assert abs(weights.astype(np.float64).sum() - 1) < 1e-3
    assert picture.stat().st_size < 5_000_000


def test_two_runs_at_once(tmp_path, model):
    ids = np.random.default_rng(0).integers(0, 1000, 2_000_000)
    folder = write(tmp_path / "in", ids, 4)
    options = ["--set", "event", "--out", tmp_path / "out.parquet"]
    processes = [typed("encode", model, folder, *options) for _ in range(2)]
    ends = [(process.communicate()[1], process.returncode) for process in processes]
    assert sorted(code for _, code in ends) == [0, 2]
    (errors,) = (errors for errors, code in ends if code)
    assert "another process is writing" in errors or "exists. Choose another output" in errors
    assert_right(model, folder, tmp_path / "out.parquet", 5)
