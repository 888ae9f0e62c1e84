"""Rows of sets, and what a store must hold of them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch

import setfold

DIM, HOUR = 3, 3600
NAMES = [f"user {number}" for number in range(8)]


def make_model(seed=0):
    torch.manual_seed(seed)
    return setfold.SlotSetEncoder(DIM, 4, 8, 8).double().eval()


def random_rows(seed, count=30, names=NAMES, **columns):
    """Rows with random features, of random sets."""
    generator = np.random.default_rng(seed)
    features = generator.standard_normal((count, DIM))
    return pa.table(
        {
            "user": pa.array(generator.choice(names, count)),
            **{f"x{place}": features[:, place] for place in range(DIM)},
            **columns,
        }
    )


def timed_rows(seed, hours, now, names=NAMES):
    """Rows whose times are some hours before now, one row for each name and hour."""
    rows = random_rows(seed, len(names) * len(hours))
    users = pa.array([name for _ in hours for name in names])
    at = pa.array([now - HOUR * hour for hour in hours for _ in names])
    return rows.set_column(0, "user", users).append_column("at", at)


def encodings(model, rows, names, key="user"):
    """The encodings of sets, all of whose rows are encoded at once, in float64."""
    model = model.eval()
    with torch.no_grad():
        empty = model.readout(model.initial_state(1))[0]
    found = {}
    if rows.num_rows:
        table = setfold.encode_frame(model, rows, set=key)
        shape = (len(table), *empty.shape)
        flat = table["encoding"].combine_chunks().flatten().to_numpy()
        keys = [key] if isinstance(key, str) else key
        ids = zip(*(table[name].to_pylist() for name in keys), strict=True)
        found = dict(zip(ids, torch.tensor(flat).reshape(shape), strict=True))
    wanted = [name if isinstance(name, tuple) else (name,) for name in names]
    return torch.stack([found.get(name, empty) for name in wanted])


def assert_holds(sets, model, rows, names=NAMES, **options):
    """A store must hold these rows: counts are equal, encodings to 1e-12."""
    ids = rows["user"].to_pylist()
    assert sets.count(names, **options) == [ids.count(name) for name in names]
    expected = encodings(model, rows, names)
    found = sets.encode(names, **options)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
