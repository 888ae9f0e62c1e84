"""Where stores are, and a clock that stands still."""

from __future__ import annotations

import pytest

from setfold.live import times


@pytest.fixture
def store_url(tmp_path):
    """Where a new store can be."""
    return str(tmp_path / "live.db")


class Clock:
    """A clock, in seconds since 1970."""

    def __init__(self):
        self.time = 1_000_000_000

    def now(self):
        return self.time * times.SECOND


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(times, "now", found.now)
    return found
