"""Compile the C kernels into one shared library, in `setfold/native/lib`.

Every kernel is compiled once for each instruction set of the machine, and `cpu.c` once for all.
Installing setfold runs this module by its path, before setfold and torch can be imported: it needs
the standard library only. `python -m setfold.native.build` compiles in place if the sources have changed.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
COMMON = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
)
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-O1", "-g")
X86 = {
    "base": ("-march=x86-64",),
    "v3": ("-march=x86-64-v3",),
    "v4": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
}
INSTRUCTION_SETS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "x86_64": X86,
    "amd64": X86,  # Windows
    "aarch64": {"neon": ()},
    "arm64": {"neon": ()},  # macOS, Windows
}
SUFFIXES = {"darwin": ".dylib", "windows": ".dll"}


class BuildError(Exception):
    """The kernels cannot be compiled here. setfold works without them, more slowly."""


def instruction_sets(machine: str) -> Mapping[str, tuple[str, ...]]:
    """The instruction sets of a machine, and the compiler's flags for each.

    >>> sorted(instruction_sets("x86_64")), sorted(instruction_sets("riscv64"))
    (['base', 'v3', 'v4'], ['base'])
    """
    return INSTRUCTION_SETS.get(machine.lower(), {"base": ()})


def library_name(system: str) -> str:
    """The file name of the library on Linux, Darwin or Windows.

    >>> library_name("Linux"), library_name("Windows")
    ('setfold_kernels.so', 'setfold_kernels.dll')
    """
    return "setfold_kernels" + SUFFIXES.get(system.lower(), ".so")


def library_in_place() -> Path:
    """Where the library of this machine is, if there is one."""
    return FOLDER / "lib" / library_name(platform.system())


def digest_of(sources: Path) -> str:
    """A digest of all that decides what the library contains, except for the compiler."""
    digest = hashlib.sha256(repr((COMMON, INSTRUCTION_SETS)).encode())
    for path in sorted(sources.glob("*.[ch]")):
        digest.update(f"\n{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def find_compiler() -> list[str]:
    """The command of the C compiler: $CC if it is set, otherwise cc, gcc or clang.

    Raises:
        BuildError: if there is none.
    """
    chosen = shlex.split(os.environ.get("CC", ""))
    names = chosen[:1] or ["cc", "gcc", "clang"]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise BuildError(f"no C compiler: {', '.join(names)} not found")
    return [found, *chosen[1:]]


def compile_library(
    compiler: Sequence[str],
    isas: Mapping[str, Sequence[str]],
    out: Path,
    *,
    flags: Iterable[str] = (),
    sources: Path = FOLDER / "src",
) -> None:
    """Compile all sources and link them; `out` appears complete or not at all.

    Args:
        compiler: the command of GCC or Clang, with what it needs to compile for another machine.
        isas: the names of the instruction sets, each with its flags.
        out: the library to write.
        flags: for all compilations and for linking, in addition to the common ones.
        sources: the folder of `cpu.c` and the kernels.

    Raises:
        BuildError: with the first error of the compiler.
    """
    kernels = sorted(set(sources.glob("*.c")) - {sources / "cpu.c"})
    first = next(iter(isas))  # cpu.c runs on all machines
    jobs = [(sources / "cpu.c", first)] + [(kernel, isa) for isa in isas for kernel in kernels]
    common = [*compiler, *COMMON, *flags, f"-DSOURCES={digest_of(sources)}"]
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".building-") as name:

        def compile_one(job: tuple[Path, str]) -> str:
            source, isa = job
            built = str(Path(name, f"{source.stem}-{isa}.o"))
            _run([*common, *isas[isa], f"-DISA={isa}", "-c", str(source), "-o", built])
            return built

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, jobs))
        linked = str(Path(name, out.name))
        _run([*common, "-shared", *objects, "-o", linked, "-lm"])
        os.replace(linked, out)  # processes that have loaded the old library keep it


def build_for_this_machine(out: Path, sanitize: bool = False) -> str:
    """Compile with the system's compiler, and check that Python can load the result.

    Returns:
        A line that says what was built.

    Raises:
        BuildError: if there is no compiler, if it fails, or if the library does not load.
    """
    compiler, isas = find_compiler(), instruction_sets(platform.machine())
    compile_library(compiler, isas, out, flags=SANITIZE if sanitize else ())
    if not sanitize:  # it loads only beside the sanitizer's own libraries
        try:
            ctypes.CDLL(str(out))
        except OSError as error:
            out.unlink()
            raise BuildError(f"{compiler[0]} made a library that does not load: {error}") from None
    return f"setfold: compiled kernels for {', '.join(isas)} with {compiler[0]}"


def notice(error: BuildError) -> str:
    """The line for users when the kernels cannot be compiled."""
    return f"setfold: no compiled kernels (everything works, more slowly): {error}"


def is_current(library: Path) -> bool:
    """Whether the library was compiled from the sources as they are now: it contains their digest."""
    return library.exists() and digest_of(FOLDER / "src").encode() in library.read_bytes()


def build_in_place(force: bool = False) -> str:
    """Compile into this folder if something has changed, and return a line that says what was done.

    Without a compiler, an older library is removed: it may not fit the code that loads it.
    """
    library = library_in_place()
    if not force and is_current(library):
        return f"setfold: compiled kernels are up to date ({library})"
    try:
        return build_for_this_machine(library)
    except BuildError as error:
        library.unlink(missing_ok=True)
        return notice(error)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise BuildError(f"{command[0]} does not run: {error}") from None
    if done.returncode != 0:
        lines = done.stderr.splitlines()
        first = next((line for line in lines if "error" in line.lower()), " ".join(lines[:1]))
        raise BuildError(f"{shlex.join(command[:1])} failed: {first}")


def main() -> None:
    """Compile in place, or to a file."""
    parser = argparse.ArgumentParser("python -m setfold.native.build", description=main.__doc__)
    parser.add_argument("--force", action="store_true", help="compile even if nothing has changed")
    parser.add_argument("--sanitize", type=Path, metavar="OUT", help="with sanitizers, into OUT")
    arguments = parser.parse_args()
    if arguments.sanitize is None:
        print(build_in_place(arguments.force))
        return
    try:
        print(build_for_this_machine(arguments.sanitize, sanitize=True))
    except BuildError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
