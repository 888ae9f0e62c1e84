"""`python -m release`: build everything that is published into dist/, and check each file.

zig compiles for all platforms on one machine, so that no other machine is needed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from hatch_build import ROOT, TARGETS
from release.checks import check_wheel

DIST = ROOT / "dist"


def build(kind: str, target: str = "none") -> Path:
    """Build a wheel or the sdist in a folder of its own, and move it to dist/."""
    folder = DIST / f".{target}"
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "SETFOLD_TARGET": target})
    (built,) = folder.iterdir()
    moved = built.replace(DIST / built.name)
    folder.rmdir()
    return moved


def main() -> None:
    """Build and check all."""
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    files = [build("sdist")]
    for target in ["none", *TARGETS]:
        files.append(build("wheel", target))
        print(f"  {check_wheel(files[-1], TARGETS.get(target))}")
    names = [str(path) for path in files]
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *names], check=True)


if __name__ == "__main__":
    main()
