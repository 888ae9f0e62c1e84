"""Fixtures for runs on files."""

from __future__ import annotations

import math
import os

import pytest

from setfold.files import journal, plan
from setfold.files.budget import Budget
from setfold.files.tables import spill


@pytest.fixture
def tight(monkeypatch):
    """Little memory, small batches and shards, and a checkpoint after each step."""
    budget = Budget(batch_rows=64, store_bytes=20_000, batches=8)
    monkeypatch.setattr(plan, "split_memory", lambda *_: budget)
    monkeypatch.setattr(plan, "SHARD_ROWS", 300)
    monkeypatch.setattr(spill, "BUCKETS", 4)
    monkeypatch.setattr(journal, "SAVE_SHARE", math.inf)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # slow, and called very often
