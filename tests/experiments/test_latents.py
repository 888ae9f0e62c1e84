"""Latents against plain loops; those of CMANP are tested with their encoder."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from experiments.latents import Bottleneck, ConstantMemory
from tests import reference
from tests.small import draw, moved


def build(settings):
    torch.manual_seed(0)
    return moved(settings.build(nn.Sequential(nn.Linear(3, settings.dim), nn.Tanh())))


@torch.no_grad()
def test_every_layer_of_a_bottleneck_reads_all_elements():
    encoder, elements = build(Bottleneck(8, 3, num_layers=3, num_heads=2)), draw(2, 7, 3)
    layers = encoder.network
    for found, features in zip(encoder(elements), encoder.features(elements), strict=True):
        latents = layers.latents.numpy()
        for look, mix in zip(layers.looks, layers.mixes, strict=True):
            latents = reference.sab(mix, reference.mab(look, latents, features.numpy()))
        np.testing.assert_allclose(found, latents, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("settings", [ConstantMemory(8, 3, 2), Bottleneck(8, 3, 2)], ids=str)
def test_latents_attend_to_elements_in_any_order(settings):
    encoder, elements = build(settings), draw(2, 30, 3)
    found = encoder(elements).detach()
    assert found.shape == (2, 3, 8)
    np.testing.assert_allclose(encoder(elements.flip(1)).detach(), found, rtol=1e-9, atol=1e-11)
    assert (found[0] - found[1]).abs().max() > 1e-3
