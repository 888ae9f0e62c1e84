"""Rows of users, models for them, and what a store must hold: sets of rows, encoded by plain calls."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch

import setfold

NAMES = [f"user {number}" for number in range(7)]
FEATURES = ["x", "y"]


def slots(seed=0, **options):
    """A model whose states can lose elements, in float64."""
    torch.manual_seed(seed)
    return setfold.SlotSetEncoder(2, 4, 6, 5, aggregate="mean", **options).double().eval()


def pool(*aggregates):
    return setfold.Pool(2, list(aggregates) or "mean").double().eval()


def events(seed, count=20, names=NAMES, **columns):
    """Random rows of random sets."""
    generator = np.random.default_rng(seed)
    rows = pd.DataFrame(generator.standard_normal((count, 2)), columns=FEATURES)
    rows.insert(0, "user", generator.choice(names, count))
    return rows.assign(**columns)


def assert_holds(sets, model, *tables, names=NAMES, key="user", **options):
    """A store must hold the rows of some tables, and nothing else, of its sets."""
    rows = pd.concat(tables) if tables else events(0, 0)
    for name in names:
        own = rows[rows[key] == name]
        elements = torch.tensor(own[FEATURES].to_numpy(np.float64))
        assert sets.count([name], **options) == [len(own)], name
        with torch.no_grad():
            expected = model(elements.unsqueeze(0))
        torch.testing.assert_close(sets.encode([name], **options), expected, rtol=1e-9, atol=1e-9)
