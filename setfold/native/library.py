"""Load the compiled kernels and choose an instruction set.

`SETFOLD_NATIVE=0` switches them off; `SETFOLD_NATIVE=v3` chooses an instruction set by name.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from setfold.errors import InputError
from setfold.native.build import digest_of, instruction_sets, library_in_place

VARIABLE = "SETFOLD_NATIVE"
SOURCES = Path(__file__).resolve().parent / "src"

_POINTER, _INTEGER, _CHOICE, _FLOAT = (
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int,
    ctypes.c_float,
)
_BATCH = [_POINTER, _INTEGER, _POINTER, _INTEGER, _INTEGER, _INTEGER, _INTEGER]
_SCORES = [_POINTER, _INTEGER, _CHOICE]
SIGNATURES: dict[str, list[Any]] = {  # as in the sources
    "sums": [*_BATCH, *_SCORES, _POINTER],
    "encode": [_POINTER, _INTEGER, _INTEGER, *_SCORES, _POINTER, _INTEGER, _FLOAT, _POINTER],
    "encode_slots": [_POINTER, _POINTER, _FLOAT, _POINTER, _INTEGER, _POINTER],
    "encode_slots_back": [_POINTER] * 5,
    "gradients": [*_BATCH, *_SCORES, *[_POINTER] * 4, _INTEGER],
    "softmax": [*_BATCH, _POINTER, _INTEGER, _POINTER, _POINTER],
    "extrema": [*_BATCH, *_SCORES, _POINTER, _INTEGER, _FLOAT, _POINTER, _POINTER],
    "totals": [*_BATCH, _POINTER],
    "ragged_sums": [_POINTER, _POINTER, *[_INTEGER] * 3, *_SCORES, _POINTER],
    "ragged_totals": [_POINTER, _POINTER, *[_INTEGER] * 3, _POINTER],
    "ragged_extremes": [_POINTER, _POINTER, *[_INTEGER] * 3, _CHOICE, _POINTER],
    "placed_sums": [_POINTER, _POINTER, _CHOICE, _POINTER],
    "placed_extrema": [_POINTER, _POINTER, _FLOAT, _POINTER],
    "stack_columns": [*[_POINTER] * 3, _INTEGER, _INTEGER, _POINTER],
    "add_at": [_POINTER, _POINTER, _INTEGER, _INTEGER, _POINTER],
    "encode_ids": [_POINTER, _INTEGER, _POINTER, _POINTER, _POINTER],
    "group": [_POINTER, _INTEGER, _INTEGER, _POINTER],
}
SLOW = "base"  # an instruction set that is used only if it is asked for


class Kernels(NamedTuple):
    """The kernels for one instruction set, each a function of pointers and numbers."""

    isa: str
    sums: Callable[..., int]
    encode: Callable[..., int]
    encode_slots: Callable[..., int]
    encode_slots_back: Callable[..., int]
    gradients: Callable[..., int]
    softmax: Callable[..., int]
    extrema: Callable[..., int]
    totals: Callable[..., int]
    ragged_sums: Callable[..., int]
    ragged_totals: Callable[..., int]
    ragged_extremes: Callable[..., int]
    placed_sums: Callable[..., int]
    placed_extrema: Callable[..., int]
    stack_columns: Callable[..., int]
    add_at: Callable[..., int]
    encode_ids: Callable[..., int]
    group: Callable[..., int]


class Choice:
    """The kernels that run in this process, and why.

    Attributes:
        kernels: the compiled kernels; None if there are none.
        reason: why there are none.
    """

    def __init__(self) -> None:
        self.library, self.reason = _load()
        self.kernels: Kernels | None = None
        wanted = os.environ.get(VARIABLE, "")
        if wanted == "0":
            self.reason = f"{VARIABLE}=0 switches them off"
        elif self.library is not None:
            names = supported(self.library)
            if wanted and wanted not in names:
                raise InputError(
                    f"{VARIABLE} must be 0 or one of {', '.join(names)}, the instruction sets of "
                    f"this CPU; got {wanted!r}."
                )
            if not wanted and names == [SLOW]:
                self.reason = "this CPU has no AVX2, and without it torch's kernels are faster"
            else:
                self.use(wanted or names[-1])

    def use(self, isa: str | None) -> None:
        self.kernels = None
        if isa is not None:
            assert self.library is not None
            found = {name: getattr(self.library, f"setfold_{name}_{isa}") for name in SIGNATURES}
            for name, function in found.items():
                function.argtypes, function.restype = SIGNATURES[name], ctypes.c_int
            self.kernels = Kernels(isa, **found)


def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None and the reason."""
    path = library_in_place()
    if not path.exists():
        return None, "they were not compiled when setfold was installed; see docs/installing.md"
    try:
        if not _is_whole(path):
            raise OSError("the file is truncated")
        library = ctypes.CDLL(str(path))
        library.setfold_sources.restype = ctypes.c_char_p
        current = library.setfold_sources().decode() == digest_of(SOURCES)
    except (OSError, AttributeError) as error:
        return None, f"{path} cannot be loaded: {error}"
    if not current:
        return None, f"{path} was compiled from other sources: run `make native`"
    return library, ""


def _is_whole(path: Path) -> bool:
    """Whether an ELF file is as long as its header says: loading a truncated one ends the process."""
    with path.open("rb") as file:
        header = file.read(64)
    if header[:5] != b"\x7fELF\x02":  # 64 bits
        return True
    order: Literal["little", "big"] = "little" if header[5:6] == b"\x01" else "big"
    sections, size, number = (
        int.from_bytes(header[start:stop], order) for start, stop in ((40, 48), (58, 60), (60, 62))
    )
    return path.stat().st_size >= sections + size * number  # the last thing in the file


def supported(library: ctypes.CDLL) -> list[str]:
    """The instruction sets that this CPU supports, the fastest last."""
    names = instruction_sets(platform.machine())
    return [name for name in names if library.setfold_supports(name.encode())]


choice = Choice()


def available() -> list[str]:
    """The instruction sets for which there are kernels that run here, the fastest last."""
    return [] if choice.library is None else supported(choice.library)


@contextmanager
def using(isa: str | None) -> Iterator[None]:
    """Run the kernels of one instruction set, or none, for tests and benchmarks."""
    before = choice.kernels
    choice.use(isa)
    try:
        yield
    finally:
        choice.kernels = before


def describe() -> str:
    """One line: which kernels run here, and why.

    >>> describe().startswith(("compiled", "plain torch"))
    True
    """
    if choice.kernels is None:
        return f"plain torch: no compiled kernels, because {choice.reason or 'none is chosen'}"
    names = ", ".join(available())
    return f"compiled for {choice.kernels.isa}; this CPU supports {names} ({VARIABLE} chooses)"
