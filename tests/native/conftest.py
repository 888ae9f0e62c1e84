"""Every test here runs with the kernels of each instruction set that the CPU has."""

from __future__ import annotations

import pytest

from setfold.native import library, threads


@pytest.fixture(params=library.available() or [None])
def isa(request):
    if request.param is None:
        pytest.skip(library.describe())
    with library.using(request.param):
        yield request.param


@pytest.fixture
def many_threads(monkeypatch):
    """Two threads for every call, however small."""
    monkeypatch.setattr(threads, "THREADED_WORK", 1)
    monkeypatch.setattr(threads.torch, "get_num_threads", lambda: 2)
