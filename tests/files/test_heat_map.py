"""Pictures of weights: what is in a cell, and what cannot be drawn."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from matplotlib import image
from matplotlib.figure import Figure
from typer.testing import CliRunner

import setfold
from setfold import cli
from setfold.files import heat_map
from setfold.files.heat_map import _average, _find_extent, draw_weights
from tests.files.slides import DIM, PATCH, draw_slide, write_slide


def write_heat(path, places, **weights):
    x, y = np.asarray(places, float).T
    pq.write_table(pa.table({"x": x, "y": y, **weights}), path)
    return path


def grid(columns, rows, step=PATCH, start=(0, 0)):
    """Places on a grid, row by row."""
    y, x = np.mgrid[:rows, :columns].reshape(2, -1)
    return np.stack([x, y], 1) * step + np.asarray(start)


def averaged(path, names=("weight",), most=heat_map.MAX_CELLS):
    extent = _find_extent(path)
    side, rows, columns = extent.cells(most)
    return extent, side, _average(path, names, extent.low, side, (rows, columns))


@pytest.mark.parametrize("start", [(0, 0), (1000.1, -77_777.7), (3e6, 5e6)])
@pytest.mark.parametrize("step", [1, 224, 0.1])
def test_a_cell_for_each_patch(tmp_path, start, step):
    weights = np.random.default_rng(0).random(12 * 7)
    path = write_heat(tmp_path / "heat.parquet", grid(12, 7, step, start), weight=weights)
    extent, side, (means,) = averaged(path)
    assert side == pytest.approx(step)
    assert extent.elements == 84
    np.testing.assert_array_equal(means, weights.reshape(7, 12))


def test_the_order_of_patches_does_not_matter(tmp_path):
    draw = np.random.default_rng(0)
    places, weights, order = grid(40, 30), draw.random(1200), draw.permutation(1200)
    a = write_heat(tmp_path / "a.parquet", places, weight=weights)
    b = write_heat(tmp_path / "b.parquet", places[order], weight=weights[order])
    np.testing.assert_array_equal(averaged(a)[2], averaged(b)[2])


def test_tissue_in_several_grids(tmp_path):
    """CLAM begins a grid at each piece of tissue, so that grids do not match."""
    pieces = [grid(10, 10), grid(8, 12, start=(5000, 100)), grid(9, 3, start=(333, 4777))]
    places = np.concatenate(pieces)
    weights = np.arange(len(places)) + 1.0
    path = write_heat(tmp_path / "heat.parquet", places, weight=weights)
    _, side, (means,) = averaged(path)
    assert side == PATCH
    assert sorted(means[np.isfinite(means)]) == weights.tolist()  # no two in a cell


def test_single_patches_far_away(tmp_path):
    """They do not make the cells of all others larger."""
    places = np.concatenate([grid(20, 10), [[9e4, 0], [0, 9e4], [9e4, 9e4]]])
    path = write_heat(tmp_path / "heat.parquet", places, weight=np.ones(len(places)))
    assert averaged(path)[1] == PATCH


def test_more_patches_than_cells_are_averaged(tmp_path):
    places, weights = grid(64, 32), np.random.default_rng(0).random(64 * 32)
    path = write_heat(tmp_path / "heat.parquet", places, weight=weights, other=weights**2)
    _, side, means = averaged(path, ("weight", "other"), most=16)
    assert all(mean.shape == (8, 16) for mean in means)
    cells = (places / side + 1e-6).astype(int)
    for mean, own in zip(means, (weights, weights**2), strict=True):
        for column, row in np.unique(cells, axis=0):
            inside = (cells == (column, row)).all(1)
            assert mean[row, column] == pytest.approx(own[inside].mean(), rel=1e-12)


def test_batches_do_not_matter(tmp_path, monkeypatch):
    path = write_heat(tmp_path / "heat.parquet", grid(30, 30), weight=np.random.rand(900))
    _, side, expected = averaged(path)
    monkeypatch.setattr(heat_map, "BATCH_ROWS", 7)
    assert averaged(path)[1] == side
    np.testing.assert_allclose(averaged(path)[2], expected, rtol=1e-12)


@pytest.mark.parametrize(
    "places", [[[5, 5]], [[5, 5], [5, 5]], [[0, 3], [7, 3]], [[0, 0], [1e9, 1]]], ids=str
)
def test_few_elements(tmp_path, places):
    path = write_heat(tmp_path / "heat.parquet", places, weight=np.ones(len(places)))
    draw_weights(path, ["weight"], "few", tmp_path / "heat.png")
    assert image.imread(tmp_path / "heat.png").ndim == 3


def test_elements_without_a_place_are_not_drawn(tmp_path):
    places = [[0, 0], [np.nan, 1], [1, 1]]
    path = write_heat(tmp_path / "heat.parquet", places, weight=np.array([1.0, 2.0, 3.0]))
    extent, _, (means,) = averaged(path)
    assert (extent.elements, np.nansum(means)) == (2, 4)
    write_heat(path, [[np.nan, 1]], weight=np.ones(1))
    with pytest.raises(setfold.InputError, match="nothing to draw"):
        draw_weights(path, ["weight"], "none", tmp_path / "heat.png")


def drawn(monkeypatch):
    """The figures that are saved from now on."""
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k))
    )
    return figures


@pytest.mark.parametrize("slots", [1, 3])
def test_the_command(tmp_path, monkeypatch, slots):
    figures, slide = drawn(monkeypatch), draw_slide(patches=200)
    torch.manual_seed(0)
    attention = setfold.GatedAttentionPool(DIM, 4)
    model = attention if slots == 1 else setfold.SlotSetEncoder(DIM, slots, 8, 8)
    setfold.save(model, tmp_path / "m.safetensors")
    path = write_slide(tmp_path, "trident", slide, "TCGA-01.2")
    words = ["weights", tmp_path / "m.safetensors", path, "--out", tmp_path / "heat.parquet"]
    words += ["--picture", tmp_path / "heat.png"]
    result = CliRunner().invoke(cli.app, list(map(str, words)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    (figure,) = figures
    assert figure.get_suptitle() == "TCGA-01.2: weights of 200 elements"
    heat = pq.read_table(tmp_path / "heat.parquet")
    names = [name for name in heat.column_names if name.startswith("weight")]
    panels = [axis for axis in figure.axes if axis.images]
    assert len(panels) == len(names) == slots
    top = max(np.max(heat[name]) for name in names)
    for name, axis in zip(names, panels, strict=True):
        (shown,) = axis.images
        np.testing.assert_allclose(shown.get_array().ravel(), heat[name], rtol=1e-6)
        assert shown.get_extent() == [0, 10 * PATCH, 20 * PATCH, 0]  # y points down
        assert shown.get_clim() == (0, pytest.approx(top))
        assert axis.get_title() == ("" if slots == 1 else name)
    assert image.imread(tmp_path / "heat.png").std() > 0.1
    left = {"m.safetensors", path.name, "heat.parquet", "heat.png"}
    assert {found.name for found in tmp_path.iterdir()} == left


@pytest.mark.parametrize(
    ("layouts", "options", "message"),
    [
        (["trident"], {"picture": "heat.jpg"}, "must go to a .png"),
        (["trident"], {"keep": []}, "'x' is not kept. Pass --keep x,y"),
        (["clam pt"], {}, "'x' is not kept"),
        (["trident", "clam"], {}, "shows one set; there are 2"),
        (["trident"], {"exists": True}, "heat.png exists"),
    ],
    ids=lambda value: str(value),
)
def test_what_cannot_be_drawn(tmp_path, layouts, options, message):
    options = dict(options)
    paths = [write_slide(tmp_path, name, draw_slide(), f"s{i}") for i, name in enumerate(layouts)]
    picture = tmp_path / options.pop("picture", "heat.png")
    if options.pop("exists", False):
        picture.touch()
    before = set(tmp_path.iterdir())
    with pytest.raises(setfold.InputError, match=message):
        setfold.weigh_sets(
            setfold.GatedAttentionPool(DIM, 4),
            paths,
            tmp_path / "heat.parquet",
            picture=picture,
            **options,
        )
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("users", [1, 2])
def test_a_set_of_points_in_a_table(tmp_path, monkeypatch, users):
    figures, number = drawn(monkeypatch), np.arange(40)
    table = {"user": number % users, "x": number % 8 * 1.0, "y": number // 8 * 1.0}
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    model, options = setfold.GatedAttentionPool(2, 4), {"set": "user", "features": "x,y"}
    arguments = (model, tmp_path / "rows.parquet", tmp_path / "heat.csv")
    options |= {"keep": ["x", "y"], "picture": tmp_path / "heat.png"}
    if users == 1:
        setfold.weigh_sets(*arguments, **options)
        assert figures[0].get_suptitle() == "0: weights of 40 elements"
        return
    with pytest.raises(setfold.InputError, match="shows one set; there are 2"):
        setfold.weigh_sets(*arguments, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.parquet"]


@pytest.mark.parametrize("x", [["a", "b"], [[1.0], [2.0]]], ids=["text", "lists"])
def test_places_that_are_no_numbers(tmp_path, x):
    pq.write_table(pa.table({"v": [1.0, 2.0], "x": x, "y": [1, 2]}), tmp_path / "rows.parquet")
    model, options = setfold.GatedAttentionPool(1, 4), {"features": "v", "keep": ["x", "y"]}
    options["picture"] = tmp_path / "heat.png"
    with pytest.raises(setfold.InputError, match="needs numbers in the columns x and y; 'x' is"):
        setfold.weigh_sets(model, tmp_path / "rows.parquet", tmp_path / "heat.parquet", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.parquet"]


def test_odd_names_and_places_far_away(tmp_path, monkeypatch):
    """Names are shown as they are, and differences of the largest numbers do not overflow."""
    figures, path = drawn(monkeypatch), tmp_path / "a$_{$.parquet"
    pq.write_table(pa.table({"v": [1.0] * 4, "x": [-1.7e308, 0, 1, 1.7e308], "y": [1] * 4}), path)
    options = {"features": "v", "keep": ["x", "y"], "picture": tmp_path / "heat.png"}
    model = setfold.GatedAttentionPool(1, 4)
    setfold.weigh_sets(model, path, tmp_path / "heat.parquet", **options)
    assert figures[0].get_suptitle() == "a$_{$: weights of 2 elements"
