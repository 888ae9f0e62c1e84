"""Slots with places against plain loops, the papers' formulas, and what is their own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

import setfold
from setfold.encoders.placed_slots import AGGREGATES
from setfold.kernels import places as kernel
from tests import reference
from tests.examples import run_program
from tests.small import TIGHT, assert_loops_agree, draw
from tests.strategies import DIM_IN, cases, placed_slot_encoders


def cloud(*shape, seed=0):
    """Elements in the unit box, a few of them outside."""
    return 0.5 + 0.4 * draw(*shape, seed=seed)


def grid(*shape, learned=False):
    return setfold.Grid([0.0] * len(shape), [1.0] * len(shape), shape, learned)


def small(places=None, dim_in=4, **options):
    encoder = setfold.PlacedSlotEncoder(dim_in, places or grid(5, 4), **options)
    return encoder.double().eval()


# ---- against loops -------------------------------------------------------------------------------


@given(encoder=placed_slot_encoders(), case=cases(), masked=st.booleans())
def test_the_encoding_is_what_the_loops_say(encoder, case, masked):
    encoder = encoder.double()
    loops = lambda rows: reference.placed_slots(encoder, rows)  # noqa: E731
    assert_loops_agree(encoder, loops, case.elements, case.mask if masked else None, rtol=1e-9)


@pytest.mark.parametrize("attention", ["softmax", "kernel"])
@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("shape", [(40,), (12, 13), (9, 8, 7)], ids=len)
def test_large_grids_are_what_the_loops_say(shape, aggregate, attention):
    values = ["features", "offsets", "squares"]
    encoder = small(grid(*shape), 4, aggregate=aggregate, attention=attention, values=values)
    elements = cloud(1, 60, 4)
    expected = reference.placed_slots(encoder, elements[0])
    np.testing.assert_allclose(encoder(elements)[0].detach(), expected, rtol=1e-9, atol=1e-12)


def test_the_set_convolution_of_convcnp():
    """E(Z)(x) = sum_i [1, y_i] exp(-|x - x_i|^2 / 2 l^2), then the data divided by the density."""
    length, elements = 0.07, cloud(2, 50, 3).clamp(0, 1)
    places = grid(16, 16)
    encoder = small(
        places,
        3,
        width=length * 16,
        attention="kernel",
        aggregate=["density", "weighted_mean"],
        reach=12,
    )
    where = (torch.cartesian_prod(torch.arange(16), torch.arange(16)) + 0.5) / 16
    squared = (elements[:, :, None, :2] - where).square().sum(-1)
    weights = torch.exp(-squared / (2 * length**2))
    density = weights.sum(1)
    signal = torch.einsum("bnk,bn->bk", weights, elements[..., 2]) / density
    assert_close(encoder(elements), torch.stack([density, signal], -1), **TIGHT)


def test_fisher_vectors():
    """G_mu = sum_i g_ij (x_i - mu_j) / s, G_s = sum_i g_ij [(x_i - mu_j)^2 / s^2 - 1]."""
    sigma, elements = 0.2, cloud(2, 50, 3).clamp(0, 1)
    places = grid(3, 3, 3)
    encoder = small(
        places, 3, width=3 * sigma, reach=12, values=["offsets", "squares"], aggregate="sum"
    )
    centres = (torch.cartesian_prod(*[torch.arange(3.0).double()] * 3) + 0.5) / 3
    offsets = (elements[:, :, None] - centres) / sigma  # (B, n, K, 3)
    posterior = torch.softmax(-0.5 * offsets.square().sum(-1), -1).unsqueeze(-1)
    expected = torch.cat([(posterior * v).sum(1) for v in (offsets, offsets.square() - 1)], -1)
    assert_close(encoder(elements), expected, **TIGHT)


# ---- weights -------------------------------------------------------------------------------------


def test_weights_beyond_the_reach_are_exactly_zero_and_the_others_are_not():
    encoder, elements = small(grid(20, 20), reach=2.0), cloud(1, 200, 4).clamp(0, 1)
    weights = encoder.weights(encoder.initial_state(), elements)
    centres = (torch.cartesian_prod(torch.arange(20), torch.arange(20)) + 0.5) / 20
    distance = (elements[:, :, None, :2] - centres).norm(dim=-1) * 20 / 0.6
    assert torch.equal(weights > 0, distance <= 2.0)
    assert_close(weights.sum(-1), torch.ones(1, 200, dtype=torch.float64), **TIGHT)


def test_a_window_holds_all_slots_within_reach():
    """Also at the border and for points that training has moved."""
    torch.manual_seed(0)
    places = grid(15, 14, learned=True)
    nn.init.uniform_(places.shift, -0.7, 0.7)
    encoder = small(places, 3, width=[0.3 + 0.02 * (j % 20) for j in range(210)])
    layout, attention = encoder.prepare(()), encoder._attention
    positions = torch.rand(500, 2, dtype=torch.float64) * 16 - 1.5
    everywhere = kernel.pair_all(positions, layout, attention).weights
    near = kernel.pair_near(positions, layout, attention)
    scattered = torch.zeros_like(everywhere).scatter_add(1, near.slots, near.weights)
    assert_close(scattered, everywhere, **TIGHT)


# ---- elements outside ----------------------------------------------------------------------------


@pytest.mark.parametrize("outside", ["clamp", "drop"])
def test_elements_outside_are_counted(outside):
    encoder = small(outside=outside, aggregate="density", attention="kernel")
    elements = torch.tensor([[[0.5, 0.5, 1, 1], [1.5, 0.5, 1, 1], [9, -9, 1, 1]]]).double()
    mask = torch.tensor([[True, True, False]])
    state = encoder.update(encoder.initial_state(), elements)
    assert encoder.outside_count(state).tolist() == [2]
    state = encoder.update(state, elements, mask=mask)
    assert encoder.outside_count(state).tolist() == [3]
    moved = elements.clamp(0, 1)[:, :2] if outside == "clamp" else elements[:, :1]
    found = encoder.update(encoder.initial_state(), elements, mask=mask)
    assert_close(encoder.readout(found), encoder(moved), **TIGHT)


def test_files_say_how_many_elements_were_outside(tmp_path):
    rows, states = tmp_path / "rows.csv", tmp_path / "states.arrow"
    rows.write_text("event,x,y\n" + "1,0.5,0.5\n2,7,0.5\n1,0.2,-3\n2,0.1,0.9\n")
    grid = setfold.Grid((0, 0), (1, 1), (40, 40))
    parts = [setfold.PlacedSlotEncoder(2, grid, outside=choice) for choice in ("clamp", "drop")]
    for encoder, expected in (
        (parts[0], 2),
        (setfold.Composition(setfold.Concat(parts)), 4),
        (setfold.Pool(2, "max"), None),
    ):
        out = tmp_path / f"{expected}.parquet"
        summary = setfold.encode_sets(encoder, rows, out, set="event", states=states)
        assert summary.outside == expected
        again = setfold.readout_states(states, tmp_path / f"again-{expected}.npz")
        assert again.outside == expected
        states.unlink()


# ---- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["softmax", "kernel"])
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_gradients_are_those_of_the_formula(aggregate, attention):
    torch.manual_seed(0)
    places = grid(9, 8, learned=True)
    nn.init.uniform_(places.shift, -0.3, 0.3)
    encoder = small(
        places,
        3,
        aggregate=aggregate,
        attention=attention,
        values=["features", "offsets"],
        learn_width=True,
    )
    elements = cloud(2, 30, 3).clamp(0.01, 0.99).requires_grad_()
    inputs = [elements, places.shift, encoder.log_width]
    factor = draw(*encoder(elements).shape, seed=1)
    found = torch.autograd.grad((encoder(elements) * factor).sum(), inputs)
    with pytest.MonkeyPatch.context() as patch:  # every element with every slot
        patch.setattr(kernel, "needs_plain_formula", lambda: True)
        expected = torch.autograd.grad((encoder(elements) * factor).sum(), inputs)
    for mine, theirs in zip(found, expected, strict=True):
        assert_close(mine, theirs, rtol=1e-9, atol=1e-10)
    folded = setfold.fold(encoder, elements.detach().split(7, 1), gradient="exact")
    again = torch.autograd.grad((folded * factor).sum(), inputs[1:])
    for mine, theirs in zip(again, expected[1:], strict=True):
        assert_close(mine, theirs, rtol=1e-8, atol=1e-9)


def test_a_fixed_grid_has_nothing_to_train():
    assert not list(small().parameters())
    assert not encoder_output(small()).requires_grad


def encoder_output(encoder):
    return encoder(cloud(1, 5, encoder.dim_in))


# ---- removal -------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["softmax", "kernel"])
@pytest.mark.parametrize("shape", [(3, 3), (4, 4), (20, 20)], ids=str)
def test_slots_from_which_all_elements_were_removed_read_as_zeros(shape, attention):
    encoder = small(
        grid(*shape), 3, aggregate=["weighted_mean", "density", "sum"], attention=attention
    ).float()
    for seed in range(20):
        left, right = cloud(2, 300, 3, seed=seed).float().clamp(0, 1).chunk(2)
        left[..., 0], right[..., 0] = 0.1 * left[..., 0], 0.9 + 0.1 * right[..., 0]
        every = torch.cat([left, right], 1)[:, draw(600, seed=seed).argsort()]
        state = encoder.remove(encoder.update(encoder.initial_state(), every), right)
        expected = encoder(left)
        assert_close(encoder.readout(state), expected, rtol=1e-3, atol=1e-3)
        empty = expected[..., 1] == 0
        assert bool(empty.any())
        assert not encoder.readout(state)[empty].any()


# ---- numbers -------------------------------------------------------------------------------------


def test_the_variance_of_features_far_from_zero_does_not_cancel():
    elements = cloud(1, 400, 3)
    elements[..., 2] += 1e8
    encoder = small(grid(2, 2), 3, aggregate="variance")
    state = encoder.initial_state()
    for chunk in elements.split(50, 1):
        state = encoder.update(state, chunk)
    expected = reference.placed_slots(encoder, elements[0])
    np.testing.assert_allclose(encoder.readout(state)[0], expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lower_precisions(dtype):
    elements = cloud(2, 100, 4).to(dtype)
    encoder = small(aggregate=["weighted_mean", "mass"])
    expected = encoder(elements.double())
    found = encoder.to(dtype)(elements)
    assert found.dtype == dtype
    assert_close(found.double(), expected, rtol=0, atol=50 * torch.finfo(dtype).eps)


# ---- normalization -------------------------------------------------------------------------------


def test_a_unit_box_keeps_shapes_and_forgets_place_and_scale():
    model = setfold.LayeredSetEncoder(
        [setfold.UnitBox(4, position=(0, 1))], small(setfold.Grid((-1, -1), (1, 1), (5, 5)))
    ).double()
    elements = cloud(2, 40, 4)
    moved = elements.clone()
    moved[..., :2] = 1000 * moved[..., :2] + torch.tensor([5e4, -7e4])
    assert_close(model(moved), model(elements), rtol=1e-9, atol=1e-9)
    assert_close(setfold.fold(model, elements.split(7, 1)), model(elements), **TIGHT)
    boxed = model.layers[0](elements)[..., :2]
    sides = boxed.amax(1) - boxed.amin(1)
    assert_close(sides.amax(-1), torch.full((2,), 2.0, dtype=torch.float64), **TIGHT)
    before = elements[..., :2].amax(1) - elements[..., :2].amin(1)
    assert_close(sides[:, 0] / sides[:, 1], before[:, 0] / before[:, 1], **TIGHT)


def test_a_set_of_one_element_is_put_in_the_middle():
    assert setfold.UnitBox(2)(torch.tensor([[[7.0, 9.0]]])).tolist() == [[[0.0, 0.0]]]


def zoomed(shape, size, **options):
    """Slots on a grid over the box from -8 to 8, read relative to the box of each set."""
    places = setfold.Grid([-8.0] * len(shape), [8.0] * len(shape), shape)
    parts = [setfold.PlacedSlotEncoder(4, places, **options), setfold.Pool(4, ["max", "min"])]
    head = setfold.Zoom(places, 4, size)
    return setfold.Composition(setfold.Concat(parts), head=head).double().eval()


@pytest.mark.parametrize("shape", [(5,), (4, 6), (3, 4, 5)], ids=len)
def test_zoom_over_the_whole_grid_changes_nothing(shape):
    model = zoomed(shape, shape, aggregate=["density", "weighted_mean"])
    elements = cloud(2, 40, 4)
    elements[:, 0], elements[:, 1] = -8.0, 8.0  # so that the box is the grid's
    alone = model.encoder.encoders["0"](elements)
    assert_close(model(elements), alone, **TIGHT)


@pytest.mark.parametrize("shape", [(400,), (200, 200)], ids=len)
def test_zoom_follows_a_set_that_is_moved_and_scaled(shape):
    size = [6] * len(shape)
    model = zoomed(shape, size, aggregate=["weighted_mean"])
    elements = torch.rand(1, 4000, 4, generator=torch.Generator().manual_seed(0)).double()
    elements[..., 3] = torch.sin(3 * elements[..., 0])
    moved = elements.clone()
    moved[..., : len(shape)] = 4 * moved[..., : len(shape)] - 5
    assert_close(model(moved)[..., -1], model(elements)[..., -1], rtol=0, atol=0.1)
    state = model.initial_state()
    for chunk in elements.split(500, 1):  # in one pass
        state = model.update(state, chunk)
    assert_close(model.readout(state), model(elements), **TIGHT)


def test_zoom_names_what_it_expects():
    zoom = setfold.Zoom(grid(4, 4), 3, (2, 2))
    for encoding in (torch.zeros(1, 6), torch.zeros(1, 16), torch.zeros(1, 16, 1)):
        with pytest.raises(setfold.InputError, match=r"Concat of a PlacedSlotEncoder and a Pool"):
            zoom(encoding)
    with pytest.raises(setfold.InputError, match="2 sizes"):
        setfold.Zoom(grid(4, 4), 3, (2,))


def test_a_slot_set_encoder_over_the_slots_of_a_grid():
    """A hierarchy: the second level runs at readout."""
    first = setfold.PlacedSlotEncoder(4, grid(6, 6), aggregate=["density", "weighted_mean"])
    second = setfold.SlotSetEncoder(first.dim_readout, num_slots=3, dim_slot=4, dim_out=5)
    model = setfold.Composition(first, head=second).double().eval()
    elements = cloud(2, 50, 4)
    assert model(elements).shape == (2, 3, 5)
    assert_close(setfold.fold(model, elements.split(7, 1)), model(elements), **TIGHT)


# ---- the head ------------------------------------------------------------------------------------


def test_a_slot_grid_puts_each_slot_where_it_is():
    places = setfold.Grid((0, 10), (1, 20), (3, 4))
    arranged = setfold.SlotGrid(places.shape)(places.centres().unsqueeze(0))  # (1, 2, 3, 4)
    assert_close(arranged[0, 0, :, 0], torch.tensor([1 / 6, 3 / 6, 5 / 6]))
    assert_close(arranged[0, 1, 0], torch.tensor([11.25, 13.75, 16.25, 18.75]))


def test_convolutions_over_a_grid_are_a_head():
    head = nn.Sequential(setfold.SlotGrid((5, 4)), nn.Conv2d(2, 3, 3), nn.Flatten())
    model = setfold.Composition(small().float(), head=head)
    assert model(cloud(2, 10, 4).float()).shape == (2, 3 * 3 * 2)


# ---- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: setfold.Grid(0, 1, 0), "at least 1"),
        (lambda: setfold.Grid((0, 0), (1, 1), 3), "one number for each axis"),
        (lambda: setfold.Grid(1, 0, 3), "low must be below high"),
        (lambda: setfold.Places([1.0, 2.0]), "points must be"),
        (lambda: setfold.Places([[math.nan]]), "points must be"),
        (lambda: small(position=[0, 0]), "position must be 2 different columns"),
        (lambda: small(dim_in=2, values="features"), "no features"),
        (lambda: small(values=[]), "values must be"),
        (lambda: small(aggregate="median"), "aggregate must be"),
        (lambda: small(width=0), "width must be a positive"),
        (lambda: small(width=[1.0, 2.0]), "one for each slot"),
        (lambda: small(reach=20), "reach must be"),
        (lambda: setfold.PlacedSlotEncoder(3, torch.zeros(2, 2)), "Places"),
    ],
)
def test_wrong_arguments_are_named(build, message):
    with pytest.raises(setfold.InputError, match=message):
        build()


def test_elements_may_be_only_positions():
    encoder = small(grid(3), dim_in=1, aggregate=["density", "weighted_mean"])
    assert encoder.values == ["offsets"]
    assert encoder(cloud(2, 10, DIM_IN)[..., :1]).shape == (2, 3, 2)


# ---- the example ---------------------------------------------------------------------------------


def test_the_example_of_a_lidar_tile_runs(tmp_path, capsys):
    run_program("tile.py", tmp_path / "tile.png", 120_000)
    shown = capsys.readouterr().out
    assert "120,000 points in 65,536 slots, 0 outside" in shown
    assert float(shown.split("differ by ")[1]) < 1e-8
    assert (tmp_path / "tile.png").stat().st_size > 10_000


def test_the_example_that_measures_many_slots_runs(capsys):
    run_program("many_slots.py", 500, 100)
    *times, tables = capsys.readouterr().out.splitlines()
    assert [line[:3] for line in times] == ["1-D", "2-D", "3-D"]
    assert float(tables.split("slots: ")[1].split(" MB instead of 0.10 GB")[0]) < 0.05


def test_the_example_that_draws_slots_runs(tmp_path):
    run_program("places.py", tmp_path / "places.png")
    assert (tmp_path / "places.png").stat().st_size > 10_000
