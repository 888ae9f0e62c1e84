"""Wheels built with and without a C compiler: what they contain and what they are called."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from release.checks import check_exports
from release.libraries import read_library
from setfold.native import build
from tests.examples import ROOT
from tests.packaging.test_build import compiles

LIBRARY = f"setfold/native/lib/{build.library_name(platform.system())}"
INPUTS = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "CHANGELOG.md")
HOOKS = "import sys, hatchling.build as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The files of a clone that building reads, with a stale library of an earlier build."""
    root = tmp_path_factory.mktemp("clone")
    for name in INPUTS:
        shutil.copy(ROOT / name, root)
    ignored = shutil.ignore_patterns("__pycache__", "lib")
    shutil.copytree(ROOT / "setfold", root / "setfold", ignore=ignored)
    (root / LIBRARY).parent.mkdir()
    (root / LIBRARY).write_text("stale")
    return root


@pytest.fixture
def small(clone, tmp_path):
    """A clone without kernels, which compiles at once."""
    root = tmp_path / "clone"
    shutil.copytree(clone, root)
    sources = root / "setfold/native/src"
    for kernel in set(sources.glob("*.c")) - {sources / "cpu.c"}:
        kernel.unlink()
    return root


def make(hook, clone, out, **environ):
    """What pip does in a build environment: call a hook of the backend."""
    out.mkdir(exist_ok=True)
    command = [sys.executable, "-c", HOOKS, hook, str(out)]
    inherited = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "SETFOLD_TARGET"}}
    done = subprocess.run(
        command, cwd=clone, capture_output=True, text=True, env={**inherited, **environ}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out / done.stdout.split()[-1], done.stdout + done.stderr


@pytest.fixture
def hasty(tmp_path):
    """A compiler that does not optimize much: that takes long, and is not what is tested here."""
    path = tmp_path / "hasty-cc"
    path.write_text(f'#!/bin/sh\nexec {shlex.join(build.find_compiler())} "$@" -O1\n')
    path.chmod(0o755)
    return path


def unpack(wheel, to):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(to)
        (record,) = (name for name in archive.namelist() if name.endswith("/WHEEL"))
        return archive.namelist(), archive.read(record).decode()


def import_from(folder, cwd):
    """Encode with the setfold in a folder; returns where it was imported from."""
    code = (
        "import setfold, torch; print(setfold.__file__); "
        "setfold.SlotSetEncoder(3, 4, 8, 8).eval()(torch.ones(2, 5, 3))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@compiles
def test_with_a_compiler_the_wheel_has_the_library_and_the_tag_of_the_platform(
    clone, tmp_path, hasty
):
    wheel, said = make("build_wheel", clone, tmp_path / "dist", CC=str(hasty))
    assert wheel.name.split("-", 2)[2].startswith("py3-none-")
    assert not wheel.name.endswith("-any.whl")
    assert "setfold: compiled kernels for" in said
    names, record = unpack(wheel, tmp_path / "installed")
    assert names.count(LIBRARY) == 1
    assert "Root-Is-Purelib: false" in record
    installed = tmp_path / "installed"
    assert (installed / LIBRARY).read_bytes() != b"stale"
    assert (
        build.digest_of(ROOT / "setfold/native/src").encode() in (installed / LIBRARY).read_bytes()
    )
    exports = read_library(installed / LIBRARY).exports
    check_exports(exports, set(build.instruction_sets(platform.machine())))
    assert import_from(installed, tmp_path).is_relative_to(installed)
    assert (clone / LIBRARY).read_text() == "stale"  # the clone is left as it was


@pytest.mark.parametrize("environ", [{"CC": "no-such-compiler"}, {"PATH": "/no-such-folder"}])
def test_without_a_compiler_the_wheel_is_pure_and_says_so_in_a_line(clone, tmp_path, environ):
    wheel, said = make("build_wheel", clone, tmp_path / "dist", **environ)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert said.count("setfold: no compiled kernels") == 1
    names, record = unpack(wheel, tmp_path / "installed")
    assert not [name for name in names if name.startswith("setfold/native/lib/")]
    assert "setfold/native/src/cpu.c" in names
    assert "Root-Is-Purelib: true" in record
    assert import_from(tmp_path / "installed", tmp_path).is_relative_to(tmp_path / "installed")


@compiles
def test_an_editable_install_compiles_in_place(small, tmp_path):
    wheel, _ = make("build_editable", small, tmp_path / "dist")
    assert wheel.name.endswith("-py3-none-any.whl")
    names, _ = unpack(wheel, tmp_path / "installed")
    assert [name for name in names if name.endswith(".pth")]
    assert LIBRARY not in names
    assert (small / LIBRARY).read_bytes() != b"stale"


def test_an_editable_install_without_a_compiler_removes_a_stale_library(small, tmp_path):
    _, said = make("build_editable", small, tmp_path / "dist", CC="no-such-compiler")
    assert said.count("setfold: no compiled kernels") == 1
    assert not (small / LIBRARY).exists()


@compiles
def test_the_source_distribution_has_sources_alone_and_builds(small, tmp_path):
    archive, _ = make("build_sdist", small, tmp_path / "dist")
    with tarfile.open(archive) as contents:
        contents.extractall(tmp_path, filter="data")
    root = tmp_path / archive.name.removesuffix(".tar.gz")
    assert not (root / "setfold/native/lib").exists()
    wheel, _ = make("build_wheel", root, tmp_path / "dist")
    names, _ = unpack(wheel, tmp_path / "installed")
    assert LIBRARY in names


def test_a_pure_wheel_can_be_asked_for(clone, tmp_path):
    wheel, said = make("build_wheel", clone, tmp_path / "dist", SETFOLD_TARGET="none")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "setfold:" not in said
