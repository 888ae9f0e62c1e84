"""Settings that all tests share."""

from __future__ import annotations

import gc

import hypothesis
import torch

# One thread: the tests are small, and what they find must not depend on the machine.
torch.set_num_threads(1)

hypothesis.settings.register_profile(
    "setfold", deadline=None, max_examples=25, derandomize=True, print_blob=True
)
hypothesis.settings.load_profile("setfold")


def pytest_collection_finish():
    """Set aside what was imported: collecting garbage looks at half a million objects otherwise."""
    gc.collect()
    gc.freeze()
