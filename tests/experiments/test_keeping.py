"""Sets that grow: encodings from what is kept are those of all pixels."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from experiments.keeping import encode, keep, numbers
from experiments.recipes.neural_processes import DATA

FACES = DATA["CelebA, 32 × 32"]
READERS = FACES.readers()
# Pixels are kept as features, or there is a state: 8 slots of 8 numbers and a mass each, 16 x 16
# places with density, three colours and one number for all, 4 heads of 64 latents of width 32.
KEPT = {
    "Deep Sets": lambda pixels: 64,
    "SSE, slots attended": lambda pixels: 8 * (8 + 1),
    "Places, 16 × 16": lambda pixels: 16 * 16 * 4 + 1,
    "CMANP": lambda pixels: 4 * 64 * (32 + 2),
    "LBANP": lambda pixels: 32 * pixels,
    "All pixels attended": lambda pixels: 64 * pixels,
}


def test_all_methods_are_here():
    assert READERS.keys() == KEPT.keys()


@pytest.mark.parametrize("method", READERS)
@torch.no_grad()
def test_an_encoding_from_what_is_kept_is_that_of_all_pixels(method):
    torch.manual_seed(0)
    model = READERS[method].build(32, 3).eval()
    encoder, pixels = model.encoder, 2 * torch.rand(2, 60, 5) - 1
    kept, seen = None, 0
    for chunk in pixels.split([10, 1, 49], 1):
        kept = keep(encoder, kept, chunk)
        seen += chunk.shape[1]
        assert numbers(kept) == KEPT[method](seen)
        assert_close(encode(encoder, kept), encoder(pixels[:, :seen]), rtol=1e-4, atol=1e-5)


def test_four_of_six_methods_fold():
    folding = {m for m, r in READERS.items() if hasattr(r.build(32, 3).encoder, "initial_state")}
    assert folding == READERS.keys() - {"LBANP", "All pixels attended"}
