"""Stores in both databases, and a clock that stands still."""

from __future__ import annotations

import os

import pytest

from setfold.live import times
from tests.live.server import shared_server


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A PostgreSQL server, which all processes of the test run share."""
    root = tmp_path_factory.getbasetemp()
    return shared_server(root.parent if "PYTEST_XDIST_WORKER" in os.environ else root)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request, tmp_path):
    """Where a new store can be, in each database."""
    if request.param == "sqlite":
        return str(tmp_path / "live.db")
    return request.getfixturevalue("server").url()


@pytest.fixture
def store_url(tmp_path):
    """Where a new store can be, in a file."""
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
