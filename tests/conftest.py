"""Settings that all tests share."""

from __future__ import annotations

import hypothesis
import torch

# One thread: the tests are small, and what they find must not depend on the machine.
torch.set_num_threads(1)

hypothesis.settings.register_profile(
    "setfold", deadline=None, max_examples=25, derandomize=True, print_blob=True
)
hypothesis.settings.load_profile("setfold")
