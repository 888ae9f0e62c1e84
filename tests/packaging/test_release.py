"""Checks of wheels find what is wrong with them."""

from __future__ import annotations

import zipfile

import pytest

from hatch_build import TARGETS, respell
from release.checks import COMMON_EXPORTS, WheelError, check_exports, check_library, check_wheel
from release.libraries import Library

X86 = {"base", "v3", "v4"}
KERNELS = {f"setfold_{name}_{isa}" for name in ("sums", "ragged_sums") for isa in X86}
LINUX = Library(
    "Linux",
    "x86_64",
    frozenset(KERNELS | COMMON_EXPORTS),
    frozenset({"libc.so.6", "libm.so.6"}),
    (2, 14),
    False,
)
NEON = frozenset({"setfold_sums_neon"} | COMMON_EXPORTS)
MACOS = Library(
    "Darwin", "arm64", NEON, frozenset({"/usr/lib/libSystem.B.dylib"}), (11, 0, 0), True
)


def test_libraries_as_they_should_be_pass():
    check_library(LINUX, TARGETS["linux-x86_64"])
    check_library(MACOS, TARGETS["macos-arm64"])
    check_library(LINUX._replace(machine="aarch64", exports=NEON), TARGETS["linux-aarch64"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"machine": "aarch64"}, "made for"),
        ({"system": "Darwin"}, "made for"),
        ({"needs": frozenset({"libgomp.so.1"})}, "libgomp"),
        ({"version": (2, 34)}, "glibc"),
        ({"exports": LINUX.exports - {"setfold_sums_v4"}}, "setfold_sums_v4"),
    ],
)
def test_a_library_that_loads_only_here_fails(change, message):
    with pytest.raises(WheelError, match=message):
        check_library(LINUX._replace(**change), TARGETS["linux-x86_64"])


@pytest.mark.parametrize("change", [{"is_signed": False}, {"version": (14, 0, 0)}])
def test_macos_needs_a_signature_and_an_old_version(change):
    with pytest.raises(WheelError):
        check_library(MACOS._replace(**change), TARGETS["macos-arm64"])


@pytest.mark.parametrize(
    "exports",
    [
        KERNELS | COMMON_EXPORTS - {"setfold_supports"},
        KERNELS | COMMON_EXPORTS | {"memcpy"},
        KERNELS | COMMON_EXPORTS | {"setfold_sums_v5"},
    ],
)
def test_exports_are_the_kernels_and_nothing_else(exports):
    with pytest.raises(WheelError):
        check_exports(frozenset(exports), X86)


@pytest.mark.parametrize(
    ("name", "names", "purelib"),
    [
        ("setfold-1-py3-none-linux_x86_64.whl", [], "true"),
        ("setfold-1-py3-none-any.whl", ["setfold/native/lib/setfold_kernels.so"], "true"),
        ("setfold-1-py3-none-any.whl", [], "false"),
    ],
)
def test_the_pure_wheel_has_neither_library_nor_platform(tmp_path, name, names, purelib):
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        archive.writestr("setfold-1.dist-info/WHEEL", f"Root-Is-Purelib: {purelib}\n")
        for each in names:
            archive.writestr(each, "")
    with pytest.raises(WheelError, match="must"):
        check_wheel(tmp_path / name, None)


def test_zig_spells_cpus_with_underscores():
    assert respell("-march=x86-64-v4") == "-march=x86_64_v4"
    assert respell("-mprefer-vector-width=512") == "-mprefer-vector-width=512"
