"""A PostgreSQL server of its own, from the installed programs, without a network."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import uuid
from contextlib import suppress
from pathlib import Path

USERS = ("postgres", "nobody")  # PostgreSQL refuses to run as root
SETTINGS = {"listen_addresses": "", "max_connections": "60"}


class NoServerError(RuntimeError):
    """There is no PostgreSQL here that this process can start."""


def find_programs() -> Path:
    """Return the folder of the programs of PostgreSQL.

    Raises:
        NoServerError: There are none.
    """
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for folder in folders:
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    raise NoServerError("there are no programs of PostgreSQL: initdb is not in the PATH")


def find_account() -> pwd.struct_passwd | None:
    """Return the user of a server; None for the user of this process.

    Raises:
        NoServerError: This user cannot run one, and there is no other.
    """
    if os.getuid() != 0:
        return None
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    for name in USERS:
        if name in names:
            return names[name]
    raise NoServerError("PostgreSQL does not run as root, and there is no other user")


class Server:
    """A server with its files.

    Args:
        folder: Its folder.
        sockets: The folder of its socket, whose path must be short; `folder` if None.
        settings: Settings that differ from `SETTINGS`.

    Raises:
        NoServerError: It cannot run here.
    """

    def __init__(self, folder: Path, sockets: Path | None = None, **settings: str) -> None:
        self.sockets = sockets or Path(folder)
        self.folder, self.settings = Path(folder), SETTINGS | settings
        self.programs, self.data = find_programs(), Path(folder) / "data"
        self.account = find_account()

    @property
    def control(self) -> list[str]:
        """The command that starts and stops it."""
        return [str(self.programs / "pg_ctl"), "--pgdata", str(self.data), "--wait", "--silent"]

    def run(self, *words: str | Path, check: bool = True) -> int:
        """Run a program as the user of the server."""
        entry = self.account
        return subprocess.run(
            [*map(str, words)],
            check=check,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL if not check else None,
            cwd=self.folder,
            user=entry.pw_uid if entry else None,
            group=entry.pw_gid if entry else None,
            extra_groups=[] if entry else None,
        ).returncode

    def create(self) -> None:
        """Make the files of a new server.

        Raises:
            NoServerError: Its user cannot get to them.
        """
        self.folder.mkdir(parents=True)
        if self.account is not None:
            for folder in (self.folder, self.sockets):
                os.chown(folder, self.account.pw_uid, self.account.pw_gid)
            if self.run("test", "-w", self.folder, check=False) != 0:
                raise NoServerError(f"the user {self.account.pw_name} cannot use {self.folder}")
        self.run(
            *(self.programs / "initdb", "--pgdata", self.data, "--username", "postgres"),
            *("--auth", "trust", "--encoding", "UTF8", "--no-locale", "--no-sync"),
        )
        lines = [f"{name} = '{value}'" for name, value in self.settings.items()]
        lines.append(f"unix_socket_directories = '{self.sockets}'")
        with (self.data / "postgresql.conf").open("a") as file:
            file.write("\n".join(lines) + "\n")

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        self.run(*self.control, "--log", self.folder / "log", "start")

    def stop(self, mode: str = "immediate") -> None:
        """Stop it; "immediate" is a crash."""
        self.run(*self.control, "--mode", mode, "stop", check=False)

    def is_running(self) -> bool:
        return self.run(self.programs / "pg_ctl", "--pgdata", self.data, "status", check=False) == 0

    def url(self, schema: str | None = None) -> str:
        """Return the URL of a schema; of a new one if there is no name."""
        schema = schema or f"s{uuid.uuid4().hex}"
        return f"postgresql://postgres@/postgres?host={self.sockets}&schema={schema}"

    def cpu_seconds(self) -> float:
        """Return the CPU time of all its processes so far, with those that have ended."""
        first = (self.data / "postmaster.pid").read_text().split()[0]
        process = Path("/proc") / first
        ticks = sum(_ticks(process)[:4])  # its own, and that of children that have ended
        for child in (process / "task" / first / "children").read_text().split():
            with suppress(OSError):  # it has ended meanwhile
                ticks += sum(_ticks(process.parent / child)[:2])
        return ticks / os.sysconf("SC_CLK_TCK")


def _ticks(process: Path) -> list[int]:
    """Return the CPU time of a process and of its children, user and system, in ticks."""
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    return [int(field) for field in fields[11:15]]
