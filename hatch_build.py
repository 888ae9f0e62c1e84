"""Build hook: compiles the kernels when setfold is installed or a wheel is built.

Without a C compiler, or if it fails, the result is the pure Python version. To build for another
platform, set SETFOLD_TARGET to a name in `TARGETS`, or to "none" for the pure version; then
failures are errors. `make wheels` does so.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.builders.wheel import WheelBuilderConfig
from packaging.tags import platform_tags

ROOT = Path(__file__).resolve().parent


class Target(NamedTuple):
    """A platform that wheels are built for with zig, as a cross compiler."""

    system: str
    machine: str
    triple: str  # of zig: with the oldest version of the system that the library runs on
    tag: str  # of the wheel


TARGETS = {
    "linux-x86_64": Target(
        "Linux",
        "x86_64",
        "x86_64-linux-gnu.2.17",
        "manylinux_2_17_x86_64.manylinux2014_x86_64",
    ),
    "linux-aarch64": Target(
        "Linux",
        "aarch64",
        "aarch64-linux-gnu.2.17",
        "manylinux_2_17_aarch64.manylinux2014_aarch64",
    ),
    "macos-arm64": Target("Darwin", "arm64", "aarch64-macos.11.0", "macosx_11_0_arm64"),
    "macos-x86_64": Target("Darwin", "x86_64", "x86_64-macos.11.0", "macosx_11_0_x86_64"),
    "windows-x86_64": Target("Windows", "amd64", "x86_64-windows-gnu", "win_amd64"),
}


def load_builder() -> ModuleType:
    """`setfold.native.build`, without importing setfold: torch may not be installed yet."""
    path = ROOT / "setfold" / "native" / "build.py"
    spec = importlib.util.spec_from_file_location("setfold_native_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def this_platform() -> str:
    """The tag of a library that was compiled here."""
    if platform.system() == "Linux":  # which glibc it needs is not examined
        return f"linux_{platform.machine()}"
    return next(platform_tags())


def respell(flag: str) -> str:
    """A flag of GCC for zig, which writes names of CPUs with underscores."""
    return "-march=" + flag[7:].replace("-", "_") if flag.startswith("-march=") else flag


class KernelsHook(BuildHookInterface[WheelBuilderConfig]):
    """Adds the compiled library to a wheel, or compiles it in place for an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile. `version` is "standard" or "editable"."""
        builder, target = load_builder(), os.environ.get("SETFOLD_TARGET")
        if target == "none":
            return
        if version == "editable":
            self.app.display_info(builder.build_in_place())
            return
        self._folder = tempfile.TemporaryDirectory(prefix="setfold-")
        folder = Path(self._folder.name)
        if target is not None:
            chosen = TARGETS[target]
            isas = builder.instruction_sets(chosen.machine)
            library, tag = folder / builder.library_name(chosen.system), chosen.tag
            zig = [sys.executable, "-m", "ziglang", "cc", "-target", chosen.triple]
            spelled = {name: [respell(flag) for flag in flags] for name, flags in isas.items()}
            builder.compile_library(zig, spelled, library, flags=["-g0"])
        else:
            library, tag = folder / builder.library_in_place().name, this_platform()
            try:
                self.app.display_info(builder.build_for_this_machine(library))
            except builder.BuildError as error:
                self.app.display_warning(builder.notice(error))
                return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{tag}"
        build_data["force_include"][str(library)] = f"setfold/native/lib/{library.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled for the wheel."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()
