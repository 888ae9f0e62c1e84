"""Attention by distance: the compiled kernel against loops in numpy, and against torch."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import setfold
from setfold.kernels import places
from setfold.native import library, placed
from tests.native.cases import assert_close

pytestmark = pytest.mark.usefixtures("isa")

SHAPES = [(1,), (2,), (40,), (7, 9), (1, 17), (5, 4, 6), (3, 2, 2, 5)]
VALUES = [("features",), ("offsets",), ("squares", "features"), ("features", "offsets", "squares")]


def make(shape, batch=2, length=37, features=2, masked=True, **options):
    """Positions, features, mask, layout and attention of an encoder."""
    draw = torch.Generator().manual_seed(3)
    axes = len(shape)
    grid = setfold.Grid([0.0] * axes, [float(size) for size in shape], shape)
    encoder = setfold.PlacedSlotEncoder(axes + features, grid, **options)
    elements = torch.rand(batch, length, axes + features, generator=draw)
    elements[..., :axes] *= torch.tensor(shape) * 1.2  # some are outside
    mask = torch.rand(batch, length, generator=draw) < 0.7 if masked else None
    if masked:
        mask[-1] = False
    layout = encoder.prepare(())
    positions, rest, mask, _ = encoder._split(elements, mask, layout)
    return positions, rest, mask, layout, encoder._attention


def near_of(arguments):
    positions, _, _, layout, attention = arguments
    return places._neighbourhood(positions, layout, attention)


def contributions(arguments):
    """For each set, element and slot: its weight, and values (V,). Plain loops."""
    positions, features, mask, layout, attention = arguments
    width, reach = layout.widths.item(), attention.reach
    nodes = [*itertools.product(*map(range, attention.shape))]
    for b, i in np.ndindex(*positions.shape[:2]):
        if mask is not None and not mask[b, i]:
            continue
        x = positions[b, i].double().numpy()
        offsets = [(x - node) / width for node in nodes]
        squares = [float(offset @ offset) for offset in offsets]
        weights = [math.exp(-s / 2) if s <= reach**2 else 0.0 for s in squares]
        total = sum(weights) if attention.normalized else 1.0
        for slot, weight in enumerate(weights):
            if weight == 0:
                continue
            kinds = {
                "features": features[b, i].double().numpy(),
                "offsets": offsets[slot],
                "squares": offsets[slot] ** 2 - 1,
            }
            yield b, slot, weight / total, np.concatenate([kinds[k] for k in attention.values])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("values", VALUES, ids="+".join)
def test_sums(shape, values):
    for attention, squared in itertools.product(["softmax", "kernel"], [False, True]):
        arguments = make(shape, attention=attention, values=values, width=0.7, reach=2.3)
        found = placed.placed_sums(*arguments[:3], near_of(arguments), values, squared)
        assert found.dtype == torch.float64
        expected = np.zeros(found.shape)
        for b, slot, weight, value in contributions(arguments):
            parts = [value, value**2] if squared else [value]
            expected[b, slot] += weight * np.concatenate([*parts, [1.0]])
        assert_close(found, expected)
        assert np.array_equal(found.numpy()[..., -1] == 0, expected[..., -1] == 0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("values", VALUES, ids="+".join)
@pytest.mark.parametrize("largest", [True, False])
def test_extrema(shape, values, largest):
    arguments = make(shape, values=values, width=0.4, reach=2.0, outside="drop")
    found = placed.placed_extrema(*arguments[:3], near_of(arguments), values, largest)
    assert found.dtype == torch.float32
    pick, worst = (np.maximum, -np.inf) if largest else (np.minimum, np.inf)
    expected = np.full(found.shape, worst)
    for b, slot, weight, value in contributions(arguments):
        expected[b, slot] = pick(expected[b, slot], weight * value)
    assert_close(found, expected)


@pytest.mark.parametrize("shape", [(300,), (40, 50), (9, 9, 9)], ids=str)
@pytest.mark.parametrize("width", [0.25, 0.6, 1.0])
@pytest.mark.parametrize("reach", [1.0, 2.0, 3.0, 12.0])
def test_the_slots_that_are_touched_are_those_of_torch(shape, width, reach):
    """On half units and quarters, where many slots are exactly at the reach."""
    arguments = make(shape, length=300, width=width, reach=reach, masked=False)
    positions = ((arguments[0] * 4).round() / 4, *arguments[1:])
    rounded = [positions, ((arguments[0] * 7).round() / 7, *arguments[1:]), arguments]
    for case in rounded:
        found = places.placed_sums(*case, squared=False)
        with library.using(None):
            expected = places.placed_sums(*case, squared=False)
        assert torch.equal(found == 0, expected == 0)
        assert_close(found, expected)
        best = places.placed_extrema(*case, largest=True)
        with library.using(None):
            assert_close(best, places.placed_extrema(*case, largest=True))


def test_features_are_read_in_place_and_rows_of_a_chunk_too():
    whole = make((8, 9), length=50)
    for rows in (slice(0, 13), slice(13, 50)):
        parts = [part[:, rows] for part in whole[:3]]
        found = placed.placed_sums(*parts, near_of(whole), ("features",), True)
        copies = [part.contiguous() for part in parts]
        again = placed.placed_sums(*copies, near_of(whole), ("features",), True)
        assert torch.equal(found, again)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_numbers_are_refused_unless_they_are_hidden(bad):
    positions, features, _, layout, attention = make((8, 9), masked=False)
    near = near_of((positions, features, None, layout, attention))
    mask = torch.ones(positions.shape[:2], dtype=torch.bool)
    for tensor in (positions, features):
        mask[1, 30] = True
        before = tensor[1, 30, 1].item()
        tensor[1, 30, 1] = bad
        for function in (placed.placed_sums, placed.placed_extrema):
            arguments = (positions, features, mask, near, ("features",), False)
            assert function(*arguments) is None
            mask[1, 30] = False
            assert function(*arguments) is not None
            mask[1, 30] = True
        tensor[1, 30, 1] = before


def test_what_the_kernel_cannot_do_is_left_to_torch():
    arguments = make((8, 9))
    positions, features, mask = arguments[:3]
    near = near_of(arguments)

    def run(p=positions, f=features, m=mask, n=near):
        return placed.placed_sums(p, f, m, n, ("features",), False)

    assert run() is not None
    assert run(p=positions.double()) is None
    assert run(p=positions[:, :-1]) is None
    assert run(p=positions[..., :1]) is None
    assert run(f=features.transpose(1, 2)) is None
    assert run(m=mask[:, 1:]) is None
    assert run(n=near._replace(windows=(9, 9))) is None
    assert run(n=near._replace(windows=(0, 9))) is None
    assert run(n=near._replace(reach=math.inf)) is None
    assert run(n=near._replace(width=math.nan)) is None
    assert run(n=near._replace(shape=(1 << 25, 1))) is None
    several = setfold.PlacedSlotEncoder(3, setfold.Grid(0, 1, 4), width=[0.5, 0.6, 0.7, 0.8])
    assert places._neighbourhood(positions, several.prepare(()), several._attention) is None
