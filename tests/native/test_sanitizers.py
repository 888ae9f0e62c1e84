"""The kernel tests with a library that reports invalid memory accesses and undefined behaviour.

`make stress` runs this. The tests run in a copy of setfold, in a process that preloads the
sanitizer's library. A report ends that process, and so fails this test.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from setfold.native import build
from tests.examples import ROOT

SUITES = ("tests/native", "tests/kernels")

pytestmark = [
    pytest.mark.skipif("SETFOLD_STRESS" not in os.environ, reason="set SETFOLD_STRESS=1"),
    pytest.mark.skipif(platform.system() != "Linux", reason="preloads with LD_PRELOAD"),
]


def sanitizer():
    """The library to preload, of the compiler that `build` uses."""
    command = [*build.find_compiler(), "-print-file-name=libasan.so"]
    found = Path(subprocess.check_output(command, text=True).strip())
    if not found.is_absolute():
        pytest.skip("the compiler has no address sanitizer")
    return found.resolve()


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of setfold and its tests, with kernels that check themselves."""
    root = tmp_path_factory.mktemp("sanitized")
    ignored = shutil.ignore_patterns("__pycache__", "lib")
    for name in ("setfold", "tests"):
        shutil.copytree(ROOT / name, root / name, ignore=ignored)
    for name in ("pyproject.toml", "hatch_build.py", "release"):
        (root / name).symlink_to(ROOT / name)
    out = root / build.library_in_place().relative_to(ROOT)
    build.build_for_this_machine(out, sanitize=True)
    return root


def run(copy, *command):
    environ = {name: value for name, value in os.environ.items() if name != "SETFOLD_STRESS"}
    environ |= {
        "PYTHONPATH": str(copy),
        "LD_PRELOAD": str(sanitizer()),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python frees little at exit
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, *command]
    return subprocess.run(command, cwd=copy, env=environ, capture_output=True, text=True)


def test_kernels(copy):
    loaded = run(copy, "-c", "from setfold.native import library; print(library.choice.library)")
    assert str(copy) in loaded.stdout, loaded.stdout + loaded.stderr
    suites = [name for name in SUITES if list((copy / name).glob("test_*.py"))]
    done = run(copy, "-m", "pytest", "-p", "no:cacheprovider", *suites)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]


def test_the_sanitizer_reports_what_is_wrong(copy, tmp_path):
    """A kernel that reads one number too many ends the process."""
    sources = tmp_path / "src"
    shutil.copytree(ROOT / "setfold/native/src", sources)
    for kernel in set(sources.glob("*.c")) - {sources / "cpu.c"}:
        kernel.unlink()
    (sources / "wrong.c").write_text(
        '#include <stdlib.h>\n#include "export.h"\n'
        "PUBLIC float wrong(int n) {\n"
        "    volatile float *numbers = calloc(n, sizeof(float));\n"
        "    float last = numbers[n];\n    free((void *)numbers);\n    return last;\n}\n"
    )
    out = tmp_path / "wrong.so"
    compiler = build.find_compiler()
    build.compile_library(compiler, {"base": ()}, out, flags=build.SANITIZE, sources=sources)
    done = run(copy, "-c", f"import ctypes; ctypes.CDLL({str(out)!r}).wrong(7)")
    assert "heap-buffer-overflow" in done.stderr
    assert done.returncode != 0
