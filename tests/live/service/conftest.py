"""Services on new stores: in this thread, in another one, and in another process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from starlette.testclient import TestClient

import setfold
from setfold import live
from setfold.live.service import ServiceOptions, make_app
from setfold.live.service.server import make_server

HERE = "http://127.0.0.1"


def new_store(folder, model=None, **options):
    """A store whose sets have the mean of x and y as encoding."""
    return live.create(folder / "live.db", model or setfold.Pool(2, "mean"), **options)


def body(number, rows, **more):
    """An update as JSON; rows are (user, x, y)."""
    named = [dict(zip(("user", "x", "y"), row, strict=True)) for row in rows]
    return {"batch": ["a", number], "set": "user", "features": ["x", "y"], "rows": named, **more}


@contextmanager
def client_of(sets, raise_errors=True, **options):
    app = make_app(sets, ServiceOptions(**options))
    with TestClient(app, base_url=HERE, raise_server_exceptions=raise_errors) as client:
        yield client


@pytest.fixture
def sets(request, tmp_path):
    """A store in a file; tests that are marked with `on_both` run in PostgreSQL, too."""
    in_file = getattr(request, "param", "sqlite") == "sqlite"
    url = tmp_path / "live.db" if in_file else request.getfixturevalue("server").url()
    with live.create(url, setfold.Pool(2, "mean"), dtype="float64") as made:
        yield made


on_both = pytest.mark.parametrize("sets", ["sqlite", "postgres"], indirect=True)


@pytest.fixture
def client(sets):
    with client_of(sets) as made:
        yield made


@contextmanager
def served(sets, **options):
    """Serve in another thread; yields the port and the server."""
    server, bound = make_server(sets, ServiceOptions(**options), "127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    port = bound.getsockname()[1]  # it listens already: connections wait until they are accepted
    thread.start()
    try:
        yield port, server
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def commanded(store, *arguments, token=None):
    """Serve in another process; yields the process and its address."""
    environment = {name: value for name, value in os.environ.items() if name != "SETFOLD_TOKEN"}
    if token is not None:
        environment["SETFOLD_TOKEN"] = token
    command = [sys.executable, "-m", "setfold.cli", "live", "serve", str(store), "--port", "0"]
    process = subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        line = process.stdout.readline()
        found = re.fullmatch(r"listening on (http://127\.0\.0\.1:\d+)\n", line)
        assert found, line + process.stderr.read()
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()
