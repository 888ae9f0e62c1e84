"""Test data in files, and the expected encodings."""

from __future__ import annotations

import itertools
import multiprocessing
from contextlib import contextmanager, suppress

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import setfold
from setfold.files.engines import local
from tests import reference

WIDTH = 3


def encoder(**options):
    torch.manual_seed(0)
    return setfold.SlotSetEncoder(WIDTH, 4, 6, 5, **options).eval()


def rows(count=600, sets=40, seed=0, names=int):
    """Random rows of sets of very different sizes, in random order."""
    generator = np.random.default_rng(seed)
    weights = 1 / np.arange(1, sets + 1)
    ids = generator.choice(sets, count, p=weights / weights.sum())
    elements = generator.standard_normal((count, WIDTH), dtype=np.float32)
    return pa.table(
        {"event": [names(i) for i in ids], **{f"f{i}": elements[:, i] for i in range(WIDTH)}}
    )


def write(folder, table, files=4, name="part-{}.parquet", **options):
    """Write a table to several Parquet files."""
    folder.mkdir(parents=True, exist_ok=True)
    size = -(-len(table) // files)
    for number in range(files):
        path = folder / name.format(number)
        pq.write_table(table.slice(number * size, size), path, row_group_size=150, **options)
    return folder


def expected(model, table):
    """Return count and encoding by set id, computed with plain loops in float64."""
    grouped, slots = {}, model.initial_state(1).slots[0].detach().double().numpy()
    elements = np.stack([table[f"f{i}"].to_numpy() for i in range(WIDTH)], 1).astype(np.float64)
    for name, element in zip(table["event"].to_pylist(), elements, strict=True):
        grouped.setdefault(name, []).append(element)
    return {
        name: (len(each), reference.slot_set(model, np.array(each), slots))
        for name, each in grouped.items()
    }


def assert_encodes(path, model, table):
    """Assert that a Parquet file has the encodings of the sets of a table, sorted by set id."""
    found, wanted = pq.read_table(path), expected(model, table)
    assert found["set"].to_pylist() == sorted(wanted)
    encodings = np.array(found["encoding"].to_pylist())
    for number, (name, count) in enumerate(
        zip(found["set"].to_pylist(), found["count"].to_pylist(), strict=True)
    ):
        assert count == wanted[name][0]
        np.testing.assert_allclose(encodings[number], wanted[name][1].ravel(), rtol=2e-5, atol=2e-6)


def fork(function):
    """Run a function in a forked process."""
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    return process


def encode(model, folder, out, **options):
    return setfold.encode_sets(model, folder, out, save_every=0, **{"set": "event", **options})


@contextmanager
def stopping(monkeypatch, owner, name, call, after):
    """Interrupt the run at the n-th call of a method, before or after the call."""
    original, calls = getattr(owner, name), itertools.count(1)

    def stop(*arguments):
        now = next(calls) == call
        if now and not after:
            raise KeyboardInterrupt
        found = original(*arguments)
        if now:
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(owner, name, stop)
        yield


def interrupt(monkeypatch, model, folder, out, after=5, **options):
    """Interrupt a run after some steps."""
    original = local.steps

    def steps(*arguments):
        for number, step in enumerate(original(*arguments)):
            if number == after:
                raise KeyboardInterrupt
            yield step

    with monkeypatch.context() as patch:
        patch.setattr(local, "steps", steps)
        with pytest.raises(KeyboardInterrupt):
            encode(model, folder, out, **options)
