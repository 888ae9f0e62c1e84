"""Checks of a wheel: its tags, its library, and that it works where it can run."""

from __future__ import annotations

import fnmatch
import os
import platform
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from packaging.tags import Tag
from packaging.utils import parse_wheel_filename

from hatch_build import Target, load_builder
from release.libraries import Library, read_library

BUILDER = load_builder()
FOLDER = "setfold/native/lib/"
COMMON_EXPORTS = {"setfold_supports", "setfold_sources"}
ALLOWED = {
    "Linux": ["libc.so.6", "libm.so.6", "libpthread.so.0", "ld-linux-*.so.*"],
    "Darwin": ["/usr/lib/libSystem.B.dylib"],
    "Windows": ["kernel32.dll", "api-ms-win-crt-*.dll"],
}
NEWEST_GLIBC = (2, 17)
OLDEST_MACOS = (11, 0, 0)
TRY = """
import ctypes, sys
import setfold, torch
setfold.SlotSetEncoder(3, 4, 8, 8).eval()(torch.ones(2, 5, 3))
for name in sys.argv[1:]:
    ctypes.CDLL(name).setfold_supports(b"base")
print(setfold.__file__)
"""


class WheelError(Exception):
    """A wheel that must not be published."""


def require(holds: bool, message: str) -> None:
    """Raise WheelError unless `holds`."""
    if not holds:
        raise WheelError(message)


def check_wheel(wheel: Path, target: Target | None) -> str:
    """Check a wheel of a target, or the pure one if it is None; returns a line about it.

    Raises:
        WheelError: if it must not be published.
    """
    tag = "any" if target is None else target.tag
    _, _, _, tags = parse_wheel_filename(wheel.name)
    expected = {Tag("py3", "none", part) for part in tag.split(".")}
    require(tags == expected, f"{wheel.name}: tags must be {sorted(map(str, expected))}")
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
            names = archive.namelist()
        (metadata,) = Path(folder).glob("*.dist-info/WHEEL")
        purelib = f"Root-Is-Purelib: {str(target is None).lower()}"
        require(purelib in metadata.read_text(), f"{wheel.name}: must have {purelib}")
        found = [name for name in names if name.startswith(FOLDER)]
        wanted = [] if target is None else [FOLDER + BUILDER.library_name(target.system)]
        require(found == wanted, f"{wheel.name}: has {found}, must have {wanted}")
        facts = "no library"
        if target is not None:
            path = Path(folder, wanted[0])
            library = read_library(path)
            check_library(library, target)
            facts = f"{path.stat().st_size >> 10} KiB, {len(library.exports)} functions"
        if target is None or runs_here(target):
            try_wheel(Path(folder), wanted)
            facts += ", works here"
    return f"{wheel.name}: {facts}"


def check_library(library: Library, target: Target) -> None:
    """Check machine, exported functions, dependencies and versions.

    Raises:
        WheelError: if one of them is not as the target needs it.
    """
    machine = {"aarch64": "arm64"}.get(library.machine, library.machine)
    wanted = {"aarch64": "arm64"}.get(target.machine, target.machine)
    require((library.system, machine) == (target.system, wanted), f"made for {machine}")
    check_exports(library.exports, set(BUILDER.instruction_sets(target.machine)))
    allowed = ALLOWED[target.system]
    unexpected = [
        name for name in library.needs if not any(fnmatch.fnmatch(name, a) for a in allowed)
    ]
    require(not unexpected, f"needs {unexpected}, which may be absent")
    if target.system == "Linux":
        require(library.version <= NEWEST_GLIBC, f"needs glibc {library.version}")
    if target.system == "Darwin":
        require(library.version == OLDEST_MACOS, f"is for macOS {library.version}")
        require(library.is_signed or target.machine != "arm64", "has no signature")


def check_exports(exports: frozenset[str], isas: set[str]) -> None:
    """Check that the kernels are the same for every instruction set, and nothing else is exported.

    Raises:
        WheelError: if a function is missing or too many.
    """
    missing = COMMON_EXPORTS - exports
    require(not missing, f"lacks {sorted(missing)}")
    kernels = exports - COMMON_EXPORTS
    stems = {name.rpartition("_")[0] for name in kernels}
    wanted = {f"{stem}_{isa}" for stem in stems for isa in isas}
    strangers = [stem for stem in stems if not stem.startswith("setfold_")]
    require(not strangers, f"exports {strangers}")
    require(kernels == wanted, f"exports differ: {sorted(kernels ^ wanted)}")
    sources = BUILDER.FOLDER / "src"
    require(bool(kernels) or len(list(sources.glob("*.c"))) == 1, "exports no kernels")


def runs_here(target: Target) -> bool:
    """Whether this machine can load the library of a target."""
    here = platform.system(), platform.machine().lower()
    return here == (target.system, target.machine)


def try_wheel(folder: Path, libraries: list[str]) -> None:
    """Encode a set with the unpacked wheel, and load its libraries.

    Raises:
        WheelError: with what Python said.
    """
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", TRY, *(str(folder / name) for name in libraries)]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    require(done.returncode == 0, done.stderr)
    require(done.stdout.startswith(str(folder)), f"imported {done.stdout}")
