"""What a shared library for Linux, macOS or Windows exports and needs."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import lief

LINKER_SYMBOLS = {"__mh_dylib_header", "___dso_handle"}  # in every library for macOS


class Library(NamedTuple):
    """The facts that decide where a library loads."""

    system: str
    machine: str
    exports: frozenset[str]
    needs: frozenset[str]  # names of other libraries
    version: tuple[int, ...]  # the newest glibc symbol, or the oldest macOS
    is_signed: bool  # macOS on arm64 loads no other


def read_library(path: Path) -> Library:
    """Read a library of any of the three systems."""
    lief.logging.disable()
    binary = lief.parse(path)
    if isinstance(binary, lief.ELF.Binary):
        return _read_elf(binary)
    if isinstance(binary, lief.MachO.Binary):
        return _read_macho(binary)
    if isinstance(binary, lief.PE.Binary):
        return _read_pe(binary)
    raise ValueError(f"{path} is no shared library")


def _read_elf(binary: lief.ELF.Binary) -> Library:
    required = [
        str(version.name).removeprefix("GLIBC_")
        for library in binary.symbols_version_requirement
        for version in library.get_auxiliary_symbols()
    ]
    return Library(
        "Linux",
        binary.header.machine_type.name.lower(),
        frozenset(str(symbol.name) for symbol in binary.exported_symbols),
        frozenset(str(name) for name in binary.libraries),
        max((tuple(map(int, version.split("."))) for version in required), default=()),
        False,
    )


def _read_macho(binary: lief.MachO.Binary) -> Library:
    own = binary[lief.MachO.LoadCommand.TYPE.ID_DYLIB]
    names = {str(symbol.name) for symbol in binary.exported_symbols} - LINKER_SYMBOLS
    build = binary.build_version
    return Library(
        "Darwin",
        binary.header.cpu_type.name.lower().removeprefix("cpu_type_"),
        frozenset(name.removeprefix("_") for name in names),
        frozenset(str(library.name) for library in binary.libraries if library != own),
        () if build is None else tuple(build.minos),
        binary.has_code_signature,
    )


def _read_pe(binary: lief.PE.Binary) -> Library:
    table = binary.get_export()
    return Library(
        "Windows",
        binary.header.machine.name.lower(),
        frozenset() if table is None else frozenset(str(entry.name) for entry in table.entries),
        frozenset(str(library.name).lower() for library in binary.imports),
        (),
        False,
    )
