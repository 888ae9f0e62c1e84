"""What all jobs are tried with."""

from __future__ import annotations

import math
import os

import pytest

from setfold.files import journal as work
from setfold.files import plan
from setfold.files.budget import Division
from setfold.files.tables import spill


@pytest.fixture
def tight(monkeypatch):
    """Very little memory, small batches and small pieces, a save after each step: everything happens."""
    monkeypatch.setattr(plan, "divide", lambda *_: Division(rows=64, budget=20_000))
    monkeypatch.setattr(plan, "PIECE_ROWS", 300)
    monkeypatch.setattr(spill, "BUCKETS", 4)
    monkeypatch.setattr(work, "SAVE_SHARE", math.inf)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a disk's time, many times over
