"""Compiling the kernels: what is compiled, when, and what happens without a compiler."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from setfold.native import build

KERNEL = """
__attribute__((visibility("default"))) int JOIN(twice_, ISA)(int x) { return hidden(x); }
"""
HELPERS = """
#define PASTE(a, b) a##b
#define JOIN(a, b) PASTE(a, b)
static int hidden(int x) { return 2 * x; }
"""
ISAS = build.instruction_sets(platform.machine())


def has_compiler():
    try:
        build.find_compiler()
    except build.BuildError:
        return False
    return True


compiles = pytest.mark.skipif(not has_compiler(), reason="there is no C compiler")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A folder like `setfold/native` with one small kernel."""
    sources = tmp_path / "native" / "src"
    sources.mkdir(parents=True)
    for name in ("cpu.c", "export.h"):
        shutil.copy(build.FOLDER / "src" / name, sources)
    (sources / "twice.h").write_text(HELPERS)
    (sources / "twice.c").write_text('#include "twice.h"\n' + KERNEL)
    shutil.copy(build.__file__, sources.parent)
    return sources.parent


def run(package, *arguments, **environ):
    """Run the copied `build.py` by its path, isolated: it needs nothing but the standard library."""
    command = [sys.executable, "-I", "-S", str(package / "build.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environ})
    assert done.stdout.count("\n") == (done.returncode == 0), done.stdout + done.stderr
    return done


def library_of(package):
    return package / "lib" / build.library_name(platform.system())


@compiles
def test_every_kernel_is_compiled_for_every_instruction_set(package):
    assert "compiled kernels for" in run(package).stdout
    library = ctypes.CDLL(str(library_of(package)))
    assert [getattr(library, f"twice_{isa}")(21) for isa in ISAS] == [42] * len(ISAS)
    assert not hasattr(library, "hidden")
    assert sorted(path.name for path in (package / "lib").iterdir()) == [library_of(package).name]


@compiles
def test_the_library_knows_the_cpu(package):
    run(package)
    library = ctypes.CDLL(str(library_of(package)))
    supported = {isa: library.setfold_supports(isa.encode()) for isa in [*ISAS, "v5", ""]}
    assert supported["v5"] == supported[""] == 0
    assert supported[next(iter(ISAS))] == 1
    cpuinfo = Path("/proc/cpuinfo")
    if "v4" in ISAS and cpuinfo.exists():
        flags = set(cpuinfo.read_text().split("flags")[1].split("\n")[0].split())
        v3 = {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"} <= flags
        assert supported["v3"] == v3
        v4 = {f"avx512{part}" for part in ("f", "bw", "cd", "dq", "vl")} <= flags
        assert supported["v4"] == (v3 and v4)


@compiles
def test_it_is_compiled_again_only_if_a_source_has_changed(package):
    run(package)
    before = library_of(package).stat().st_ino
    (package / "src" / "twice.c").touch()
    assert "up to date" in run(package).stdout
    assert library_of(package).stat().st_ino == before
    (package / "src" / "twice.h").write_text(HELPERS.replace("2 * x", "3 * x"))
    assert "compiled kernels for" in run(package).stdout
    library = ctypes.CDLL(str(library_of(package)))
    assert getattr(library, f"twice_{next(iter(ISAS))}")(21) == 63


@compiles
def test_a_current_library_stays_without_a_compiler(package):
    run(package)
    assert "up to date" in run(package, CC="no-such-compiler").stdout
    assert library_of(package).exists()


@compiles
@pytest.mark.parametrize("reason", ["no compiler", "syntax", "no path"])
def test_failures_are_a_notice_and_remove_what_is_stale(package, reason, tmp_path):
    run(package)
    source = package / "src" / "twice.c"
    source.write_text(source.read_text() + ("}" if reason == "syntax" else "\n"))
    environ = {"no compiler": {"CC": "no-such-compiler"}, "no path": {"PATH": str(tmp_path)}}
    done = run(package, **environ.get(reason, {}))
    assert done.returncode == 0
    assert done.stdout.startswith("setfold: no compiled kernels (everything works, more slowly): ")
    assert ("twice.c" if reason == "syntax" else "not found") in done.stdout
    assert list((package / "lib").iterdir()) == []


@compiles
def test_cc_may_have_arguments(package, monkeypatch):
    (compiler,) = build.find_compiler()
    monkeypatch.setenv("CC", f"{compiler} -DTEST='a b'")
    assert build.find_compiler() == [compiler, "-DTEST=a b"]


def test_a_compiler_that_does_not_run_is_a_build_error(tmp_path):
    broken = tmp_path / "cc"
    broken.write_text("not a program")
    broken.chmod(0o755)
    with pytest.raises(build.BuildError, match="does not run"):
        build.compile_library([str(broken)], {"base": ()}, tmp_path / "out.so")
    assert [path.name for path in tmp_path.iterdir()] == ["cc"]


def test_other_machines_have_the_baseline_alone():
    assert dict(build.instruction_sets("riscv64")) == {"base": ()}
    assert list(build.instruction_sets("AMD64")) == ["base", "v3", "v4"]
    assert list(build.instruction_sets("arm64")) == ["neon"]
