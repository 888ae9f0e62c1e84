"""A PostgreSQL server for tests, from the installed programs, without a network."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest

from setfold.core.persist import hold

USERS = ("postgres", "nobody")  # PostgreSQL refuses to run as root
SETTINGS = {
    "listen_addresses": "",
    "max_connections": "60",
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


def find_programs():
    """Return the folder of the programs of PostgreSQL, or skip the test."""
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for folder in folders:
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    pytest.skip("there are no programs of PostgreSQL: initdb is not in the PATH")


class Server:
    """A server with its files.

    Args:
        folder: Its folder, which must not be longer than the path of a socket may be.
        settings: Settings that differ from `SETTINGS`.
    """

    def __init__(self, folder, **settings):
        self.folder, self.settings = Path(folder), SETTINGS | settings
        self.programs, self.data = find_programs(), Path(folder) / "data"
        self.account = None
        if os.getuid() == 0:
            names = {entry.pw_name: entry for entry in pwd.getpwall()}
            self.account = next((names[name] for name in USERS if name in names), None)
            if self.account is None:
                pytest.skip("PostgreSQL does not run as root, and there is no other user")

    @property
    def control(self):
        """The command that starts and stops it."""
        return [str(self.programs / "pg_ctl"), "--pgdata", str(self.data), "--wait", "--silent"]

    def run(self, *words, check=True):
        """Run a program as the user of the server."""
        options = {}
        if self.account is not None:
            entry = self.account
            options = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
        return subprocess.run(
            [*map(str, words)],
            check=check,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL if not check else None,
            cwd=self.folder,
            **options,
        ).returncode

    def create(self):
        """Make the files of a new server."""
        self.folder.mkdir(parents=True)
        if self.account is not None:
            os.chown(self.folder, self.account.pw_uid, self.account.pw_gid)
        self.run(
            *(self.programs / "initdb", "--pgdata", self.data, "--username", "postgres"),
            *("--auth", "trust", "--encoding", "UTF8", "--no-locale", "--no-sync"),
        )
        lines = [f"{name} = '{value}'" for name, value in self.settings.items()]
        lines.append(f"unix_socket_directories = '{self.folder}'")
        with (self.data / "postgresql.conf").open("a") as file:
            file.write("\n".join(lines) + "\n")

    def start(self):
        """Start it, and wait until it takes connections."""
        self.run(*self.control, "--log", self.folder / "log", "start")

    def stop(self, mode="immediate"):
        """Stop it; "immediate" is a crash."""
        self.run(*self.control, "--mode", mode, "stop", check=False)

    def is_running(self):
        return self.run(self.programs / "pg_ctl", "--pgdata", self.data, "status", check=False) == 0

    def url(self, schema=None):
        """Return the URL of a schema; of a new one if there is no name."""
        schema = schema or f"s{uuid.uuid4().hex}"
        return f"postgresql://postgres@/postgres?host={self.folder}&schema={schema}"


def shared_server(root):
    """Return a server that all processes of a test run share.

    It is stopped when the last of them has ended, however that happens: a process holds a lock as
    long as it lives.

    Args:
        root: A folder of the test run.
    """
    import fcntl

    find_programs()
    number = root.stat().st_ino
    folder = Path(tempfile.gettempdir()) / f"setfold-postgres-{number}"
    server = Server(folder, fsync="off", synchronous_commit="on")
    with hold(root / "postgres.lock", wait=True):
        users = root / "postgres.users"
        handle = os.open(users, os.O_CREAT | os.O_RDWR)  # locked until this process ends
        fcntl.flock(handle, fcntl.LOCK_SH)
        if not folder.exists():
            server.create()
            server.start()
            stop = [*server.control, "--mode", "immediate", "stop"]
            words = [sys.executable, "-c", STOPPER, str(folder), str(users)]
            if server.account is not None:
                stop = ["setpriv", f"--reuid={server.account.pw_uid}", "--clear-groups", *stop]
            in_background = ["sh", "-c", 'exec "$@" < /dev/null > /dev/null 2>&1 &', "sh"]
            subprocess.run([*in_background, *words, *stop], check=True, start_new_session=True)
    return server


def wait_until(condition, seconds=60):
    """Wait until a condition holds."""
    last = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < last, "waited too long"
        time.sleep(0.01)
