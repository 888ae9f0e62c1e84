from __future__ import annotations

import io
import itertools

import numpy as np
import pytest
from matplotlib.axes import Axes
from PIL import Image

from experiments import style
from experiments.recipe import Size
from experiments.recipes import all_recipes

OKABE_ITO = {"#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7"}
SERIES = {
    "Deep Sets": {100: {0: 1.0, 1: 2.0, 2: 6.0}, 200: {0: 0.0, 1: 0.0, 2: 3.0}},
    "PMA": {100: {0: 4.0}},
}


def decoded(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def line(axes: Axes, label: str) -> np.ndarray:
    (found,) = [one for one in axes.lines if one.get_label() == label]
    return np.array(found.get_xydata())


def whiskers(axes: Axes) -> list[list[float]]:
    """[x, lowest, highest] of all vertical lines."""
    found = [np.array(one.get_xydata()) for one in axes.lines]
    upright = [ends for ends in found if ends.shape == (2, 2) and ends[0, 0] == ends[1, 0]]
    return [[ends[0, 0], *ends[:, 1]] for ends in upright]


@pytest.mark.parametrize("recipe", all_recipes().values(), ids=lambda recipe: recipe.name)
def test_methods_of_a_recipe_can_be_told_apart_without_colour(recipe):
    names = {"Published", "Oracle", *(run.method for run in recipe.runs(Size.SMALL, 0))}
    if recipe.name == "inconsistency":
        names |= {f"{name}, chunks averaged" for name in names}
    looks = [style.METHODS[name] for name in names & style.METHODS.keys()]
    assert len({(look.marker, look.hollow) for look in looks}) == len(looks)
    for one, other in itertools.combinations(looks, 2):
        assert (one.colour, one.hatch, one.hollow) != (other.colour, other.hatch, other.hollow)
        lines = (one.dash, one.marker, one.hollow), (other.dash, other.marker, other.hollow)
        assert lines[0] != lines[1]


def test_colours_are_those_that_colour_blind_readers_tell_apart():
    assert {look.colour for look in style.METHODS.values()} <= OKABE_ITO | {style.GREY}


def test_listed_methods_come_in_their_order_and_others_last():
    found = style.looks(["b", "PMA", "a", "Deep Sets"])
    assert list(found) == ["Deep Sets", "PMA", "a", "b"]
    assert found["PMA"] is style.METHODS["PMA"]


def test_other_names_have_looks_of_their_own_whatever_the_order():
    names = [f"method {number}" for number in range(16)]
    found = style.looks(names)
    assert found == style.looks(reversed(names))
    assert len(set(found.values())) == 16
    assert len({look.colour for look in style.looks(names[:8]).values()}) == 8


def test_a_single_other_name_looks_the_same_in_every_figure():
    assert style.looks(["exact"])["exact"] == style.looks(["exact", "PMA"])["exact"]


def test_curves_draw_mean_and_range_of_the_seeds():
    _, [axes] = style.figure()
    style.curves(axes, SERIES, "pixels", "NLL")
    assert line(axes, "Deep Sets").tolist() == [[100, 3], [200, 1]]
    corners = axes.collections[0].get_paths()[0].vertices
    heights = {x: sorted({y for place, y in corners if place == x}) for x in (100, 200)}
    assert heights == {100: [1, 6], 200: [0, 3]}
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("pixels", "NLL")


def test_curves_have_ticks_where_something_was_measured():
    drawing, [axes] = style.figure()
    style.curves(
        axes, {"PMA": {1: {0: 0.1}, 100: {0: 0.3}, 6000: {0: 0.4}}}, "support", "y", log=True
    )
    drawing.draw_without_rendering()
    assert axes.get_xscale() == "log"
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "100", "6,000"]


def test_a_long_history_is_not_hidden_by_markers():
    _, [axes] = style.figure()
    style.curves(axes, {"PMA": {epoch: {0: 1.0} for epoch in range(200)}}, "epoch", "y")
    _, every = axes.lines[0].get_markevery()
    assert 200 / every <= 10


@pytest.mark.parametrize("draw", [style.bars, style.dots])
def test_groups_show_mean_and_range_of_the_seeds(draw):
    _, [axes] = style.figure()
    groups = {
        "small": {"Deep Sets": {0: 1.0, 1: 2.0, 2: 6.0}, "PMA": {0: 4.0}},
        "large": {"PMA": {0: 5.0, 1: 7.0}},
    }
    draw(axes, groups, "error", paper={"large": {"PMA": 5.5}})
    # two places of 0.42 in each group; Deep Sets' place in the second one stays empty
    expected = {"Deep Sets": [(-0.21, 3)], "PMA": [(0.21, 4), (1.21, 6)]}
    for name, points in expected.items():
        if draw is style.bars:
            (shown,) = [bars for bars in axes.containers if bars.get_label() == name]
            found = [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in shown]
        else:
            found = line(axes, name).tolist()
        np.testing.assert_allclose(found, points)
    np.testing.assert_allclose(whiskers(axes), [[-0.21, 1, 6], [1.21, 5, 7]])
    np.testing.assert_allclose(line(axes, "Published"), [[1.21, 5.5]])
    assert [text.get_text() for text in axes.get_xticklabels()] == ["small", "large"]


def test_a_method_alone_in_its_group_stands_in_the_middle():
    _, [axes] = style.figure()
    style.bars(axes, {"a": {"Deep Sets": {0: 1.0}}, "b": {"PMA": {0: 1.0}}}, "y")
    middles = [bar.get_x() + bar.get_width() / 2 for bar in axes.patches]
    np.testing.assert_allclose(middles, [0, 1], atol=1e-12)


def test_a_legend_names_each_method_once_in_order():
    drawing, [left, right] = style.figure(columns=2, titles=["a", "b"])
    style.curves(left, {"PMA": {1: {0: 0.0}}, "Deep Sets": {1: {0: 0.0}}}, "x", "y")
    style.curves(right, {"mine": {1: {0: 0.0}}, "Deep Sets": {1: {0: 0.0}}}, "x", "y")
    style.legend(drawing)
    (legend,) = drawing.legends
    assert [text.get_text() for text in legend.texts] == ["Deep Sets", "PMA", "mine"]
    assert [axes.get_title() for axes in (left, right)] == ["a", "b"]


def test_a_legend_of_all_methods_fits_the_page():
    drawing, [axes] = style.figure()
    style.curves(axes, {name: {1: {0: 0.0}} for name in style.METHODS}, "x", "y")
    style.legend(drawing)
    drawing.draw_without_rendering()
    inside = drawing.legends[0].get_window_extent()
    assert inside.x0 >= 0
    assert inside.x1 <= drawing.bbox.x1


def test_scatter_shows_every_class_and_its_centroid():
    _, [axes] = style.figure()
    points = np.arange(12.0).reshape(6, 2)
    style.scatter(axes, points, [0, 1, 2, 0, 1, 2], [[0, 0], [1, 1], [9, 9]], ["a", "b", "c"])
    places = [np.array(shown.get_offsets()) for shown in axes.collections]
    np.testing.assert_array_equal(places[1], points[[1, 4]])
    np.testing.assert_array_equal(np.concatenate(places[3:]), [[0, 0], [1, 1], [9, 9]])
    assert [text.get_text() for text in axes.texts] == ["a", "b", "c"]
    looks = {(str(s.get_facecolor()), str(s.get_paths()[0].vertices)) for s in axes.collections[:3]}
    assert len(looks) == 3


def test_images_are_drawn_pixel_by_pixel():
    truth = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), dtype=np.uint8)
    context = np.where((np.arange(8) < 4)[:, None, None], truth / 255, np.nan)
    shown = decoded(style.png(style.images({"context": context, "truth": truth})))
    zoom = shown.shape[0] // 18  # two rows of 8 pixels and a margin of 1
    left = shown.shape[1] - zoom * 5 * 9
    pixels = shown[zoom // 2 :: zoom, left + zoom // 2 :: zoom]  # (18, 45, 3): their middles
    assert shown.shape[0] == 18 * zoom
    pictures = pixels.reshape(2, 9, 5, 9, 3)[:, :8, :, :8].swapaxes(1, 2)  # (2, 5, 8, 8, 3)
    np.testing.assert_array_equal(pictures[1], truth)
    np.testing.assert_array_equal(pictures[0, :, :4], truth[:, :4])
    assert len(np.unique(pictures[0, :, 4:].reshape(-1, 3), axis=0)) == 1
    blocks = shown[:, left:].reshape(18, zoom, 45, zoom, 3)
    np.testing.assert_array_equal(blocks, np.broadcast_to(pixels[:, None, :, None], blocks.shape))


def test_files_are_the_same_each_time_small_and_without_dates():
    def draw() -> bytes:
        drawing, [axes] = style.figure()
        style.curves(axes, SERIES, "x", "y")
        style.legend(drawing)
        return style.png(drawing)

    content = draw()
    assert content == draw()
    assert len(content) < 120_000
    picture = Image.open(io.BytesIO(content))
    assert picture.width == 1050
    assert not {"Software", "Creation Time", "date"} & set(picture.info)
