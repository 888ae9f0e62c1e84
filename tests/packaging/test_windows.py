"""Encoders import neither fcntl nor resource, which Windows does not have."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
sys.modules["fcntl"] = sys.modules["resource"] = None
import setfold, torch
encoder = setfold.SlotSetEncoder(3, 4, 8, 8)
setfold.fold(encoder, [torch.ones(1, 5, 3)] * 2).sum().backward()
state = encoder.update(encoder.initial_state(1), torch.ones(1, 5, 3))
encoder.readout(state)
"""


def test_encoders_work_without_modules_of_unix():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
