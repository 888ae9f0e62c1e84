"""Settings that all tests share."""

from __future__ import annotations

import gc
import os
import random

gc.disable()  # until all tests are collected

# One thread, also in the libraries of numpy and scikit-learn and in the processes that tests start:
# the tests are small and run side by side, and what they find must not depend on the machine. These
# libraries read the variables when they are loaded.
for library in ("OMP", "MKL", "OPENBLAS"):
    os.environ[f"{library}_NUM_THREADS"] = "1"

import hypothesis  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)

hypothesis.settings.register_profile(
    "setfold", deadline=None, max_examples=25, derandomize=True, print_blob=True
)
hypothesis.settings.load_profile("setfold")


def pytest_collection_modifyitems(items):
    """Run long tests first: no worker ends with one, and none that idles takes over a part."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call():
    """Once more: which fixtures drew before depends on whether an earlier test made them."""
    seed(1)


def seed(number):
    """Let a test draw the same numbers, whichever tests ran before in this process."""
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def pytest_collection_finish():
    """Set aside what was imported: collecting garbage looks at half a million objects otherwise."""
    gc.collect()
    gc.freeze()
    gc.enable()
