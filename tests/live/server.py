"""A PostgreSQL server for tests, from the installed programs, without a network."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from bench import server
from setfold.core.persist import hold

SETTINGS = {
    "shared_buffers": "32MB",
    "full_page_writes": "off",  # these servers crash, but their machine does not
}
STOPPER = """
import fcntl, shutil, subprocess, sys
with open(sys.argv[2]) as users:
    fcntl.flock(users, fcntl.LOCK_EX)  # when all processes that use it have ended
    subprocess.run(sys.argv[3:], check=False)
    shutil.rmtree(sys.argv[1], ignore_errors=True)
"""


class Server(server.Server):
    """A server with its files; the test is skipped if there is no PostgreSQL.

    Args:
        folder: Its folder, which must not be longer than the path of a socket may be.
        settings: Settings that differ from `SETTINGS`.
    """

    def __init__(self, folder, **settings):
        try:
            super().__init__(folder, **SETTINGS | settings)
        except server.NoServerError as error:
            pytest.skip(str(error))


def shared_server(root):
    """Return a server that all processes of a test run share.

    It is stopped when the last of them has ended, however that happens: a process holds a lock as
    long as it lives.

    Args:
        root: A folder of the test run.
    """
    import fcntl

    number = root.stat().st_ino
    folder = Path(tempfile.gettempdir()) / f"setfold-postgres-{number}"
    shared = Server(folder, fsync="off", synchronous_commit="on")
    with hold(root / "postgres.lock", wait=True):
        users = root / "postgres.users"
        handle = os.open(users, os.O_CREAT | os.O_RDWR)  # locked until this process ends
        fcntl.flock(handle, fcntl.LOCK_SH)
        if not folder.exists():
            shared.create()
            shared.start()
            stop = [*shared.control, "--mode", "immediate", "stop"]
            words = [sys.executable, "-c", STOPPER, str(folder), str(users)]
            if shared.account is not None:
                stop = ["setpriv", f"--reuid={shared.account.pw_uid}", "--clear-groups", *stop]
            in_background = ["sh", "-c", 'exec "$@" < /dev/null > /dev/null 2>&1 &', "sh"]
            subprocess.run([*in_background, *words, *stop], check=True, start_new_session=True)
    return shared


def wait_until(condition, seconds=60):
    """Wait until a condition holds."""
    last = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < last, "waited too long"
        time.sleep(0.01)
