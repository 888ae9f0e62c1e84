"""How much memory something takes at its peak, measured in a process of its own; Linux only."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, pathlib, torch, setfold

def status(field):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))

torch.set_num_threads(1)
torch.manual_seed(0)
{setup}
step({small})
ctypes.CDLL(None).malloc_trim(0)
pathlib.Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
step({length})
print(status("VmHWM") - before)
"""

linux_only = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads the kernel's high-water mark"
)


def peak(setup, length, small=50):
    """Bytes that `step(length)` takes beyond what is there after `step(small)`.

    Args:
        setup: the lines that define step, of a number of elements.
        length: the number of elements to measure with.
        small: the number of elements to warm up with.
    """
    script = SCRIPT.format(setup=setup, length=length, small=small)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)
