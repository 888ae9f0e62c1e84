"""Plotting: every method has the same colour, marker, dash and hatch in all figures.

    drawing, [left, right] = style.figure(columns=2)
    style.curves(left, {"Deep Sets": {100: {0: -0.41, 1: -0.40}}}, "context pixels", "NLL")
    style.dots(right, {"K = 1": {"Deep Sets": {0: 0.81, 1: 0.82}}}, "accuracy")
    style.legend(drawing)

Lines, markers and bars show means over seeds. Bands and whiskers show the range over seeds.
"""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import fill
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from experiments.statistics import Seeds, mean

WIDTH, DPI, SMALL = 7.0, 150, 8.0  # figure width in inches, resolution, font size in points

# Okabe and Ito's colour-blind safe palette. In greyscale, markers and dashes tell methods apart.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#7F7F7F"

Dash = tuple[float, ...]
SOLID: Dash = ()
LONG: Dash = (6, 2)
SHORT: Dash = (3, 1.5)
DOTTED: Dash = (1, 1.3)
MIXED: Dash = (6, 1.5, 1, 1.5)


@dataclass(frozen=True)
class Look:
    """The appearance of a method.

    Args:
        colour: colour of line, marker and bar; shared by a family of methods.
        marker: matplotlib marker.
        dash: lengths of dashes and gaps in line widths; empty for a solid line.
        hatch: hatch of bars.
        hollow: whether markers and bars are outlines.
    """

    colour: str
    marker: str
    dash: Dash = SOLID
    hatch: str = ""
    hollow: bool = False

    @property
    def line(self) -> dict[str, Any]:
        """Arguments for `Axes.plot`."""
        style = (0, self.dash) if self.dash else "-"
        return {"linestyle": style, "linewidth": 1.5, **self.point}

    @property
    def point(self) -> dict[str, Any]:
        """Arguments for a marker without a line."""
        face = "white" if self.hollow else self.colour
        size = 7.5 if self.marker == "*" else 5.5 if self.marker in ("X", "P") else 4.5
        outline = {"markerfacecolor": face, "markeredgecolor": self.colour, "markeredgewidth": 1}
        return {"color": self.colour, "marker": self.marker, "markersize": size, **outline}

    @property
    def bar(self) -> dict[str, Any]:
        """Arguments for `Axes.bar`; the hatch has the edge colour."""
        face, edge = ("white", self.colour) if self.hollow else (self.colour, "white")
        return {"facecolor": face, "edgecolor": edge, "hatch": self.hatch, "linewidth": 0.8}


# Legends and tables list methods in this order. Methods of one recipe differ without colour, too.
METHODS: dict[str, Look] = {
    "Published": Look(GREY, "_", DOTTED),
    "Deep Sets": Look(BLUE, "o"),
    "Deep Sets, matched": Look(BLUE, "s", SHORT, hatch="//", hollow=True),
    "Deep Sets, untrained": Look(GREY, "o", DOTTED, hatch="oo", hollow=True),
    "Deep Sets, max": Look(SKY, "^", LONG, hatch="||"),
    "Deep Sets, max, matched": Look(SKY, "<", SHORT, hatch="//", hollow=True),
    "Deep Sets, sum": Look(BLUE, "v", DOTTED, hatch="||", hollow=True),
    "PMA": Look(GREEN, "D", MIXED, hatch="\\\\"),
    "PMA, attended": Look(GREEN, "s", LONG, hatch="--"),
    "Set Transformer": Look(PURPLE, "s", hatch="xx"),
    "Set Transformer, chunks averaged": Look(PURPLE, "s", SHORT, hatch="xx", hollow=True),
    "SSE, slots apart, chunks averaged": Look(VERMILION, "*", SHORT, hatch="**", hollow=True),
    "Deep Sets, chunks averaged": Look(BLUE, "o", SHORT, hatch="oo", hollow=True),
    "Gated attention": Look(PURPLE, "3", LONG, hatch=".."),
    "ISAB, max": Look(BLACK, "h", MIXED),
    "Attention, slots apart": Look(GREEN, "d", SHORT, hatch="\\\\", hollow=True),
    "Attention, slots attended": Look(GREEN, "^", DOTTED, hatch="--", hollow=True),
    "SSE, as printed": Look(ORANGE, "X", LONG, hatch="//"),
    "SSE, as printed, scaled": Look(ORANGE, "X", SHORT, hatch="xx", hollow=True),
    "SSE, as printed, learned": Look(ORANGE, "P", MIXED, hatch="++"),
    "SSE, as printed, random": Look(ORANGE, "P", DOTTED, hatch="//", hollow=True),
    "SSE → Set Transformer": Look(BLACK, "p", LONG, hatch="++"),
    "Mean and max": Look(BLUE, "s", SHORT, hatch="++", hollow=True),
    "Maxima of every layer": Look(SKY, "D", MIXED, hatch="\\\\", hollow=True),
    "Max, weighted means, mass": Look(PURPLE, "4", LONG, hatch="++"),
    "Mean, max, slots": Look(PURPLE, "h", DOTTED, hatch="xx", hollow=True),
    "SSE, sharp": Look(ORANGE, "1", SHORT, hatch="--"),
    "SSE, many slots": Look(ORANGE, "2", DOTTED, hatch="..", hollow=True),
    "SSE, slots attended": Look(VERMILION, "8", LONG, hatch="--"),
    "SSE, wide slots": Look(VERMILION, "<", MIXED, hatch="||"),
    "SSE, slots apart": Look(VERMILION, "*"),
    "SSE, slots apart, learned": Look(VERMILION, ">", hatch=".."),
    "SSE, slots apart, random": Look(VERMILION, ">", SHORT, hatch="..", hollow=True),
    "All pixels attended": Look(PURPLE, "D", MIXED, hatch="--", hollow=True),
    "LBANP": Look(SKY, "2", SHORT, hatch="++"),
    "CMANP": Look(ORANGE, "<", hatch="oo", hollow=True),
    "Places, 4 × 4": Look(BLACK, "p", SHORT, hatch="..", hollow=True),
    "Places, 14 × 14": Look(BLACK, "d", hatch="//"),
    "Places, 16 × 16": Look(BLACK, "H", hatch="oo"),
    "Places, 32 × 32": Look(BLACK, "h", SHORT, hatch="xx", hollow=True),
    "Deep Sets, max, varied": Look(SKY, "^", DOTTED, hatch="||", hollow=True),
    "Deep Sets, max, matched, varied": Look(SKY, "D", MIXED, hatch="xx", hollow=True),
    "SSE, as printed, learned, varied": Look(ORANGE, "d", SHORT, hatch="++", hollow=True),
    "SSE, slots apart, varied": Look(VERMILION, "*", DOTTED, hatch="--", hollow=True),
    "Places": Look(GREEN, "v", hatch=".."),
    "Places, varied": Look(GREEN, "8", DOTTED, hatch="..", hollow=True),
    "Linear, mean": Look(GREEN, "H", LONG, hatch="--", hollow=True),
    "Linear, mean, wide": Look(GREEN, "X", DOTTED, hatch="xx", hollow=True),
    "Mean of the features": Look(GREY, "+", SHORT, hatch="++"),
    "Mean of the pixels": Look(GREY, "x", SHORT, hatch="xx"),
    "Whitened mean": Look(PURPLE, "P", LONG, hatch="||"),
    "LDA": Look(PURPLE, "^", DOTTED, hatch="//", hollow=True),
    "Elements with bag labels": Look(GREY, "1", LONG, hatch="//"),
    "Statistics, logistic regression": Look(GREY, "4", DOTTED, hatch="--"),
    "Oracle": Look(BLACK, "x", DOTTED, hatch="....", hollow=True),
}

_OTHERS = tuple(
    Look(colour, marker, dash, hatch)
    for colour, marker, dash, hatch in zip(
        (VERMILION, BLUE, GREEN, PURPLE, ORANGE, SKY, BLACK, GREY),
        ("o", "s", "^", "D", "v", "P", "X", "h"),
        (SOLID, LONG, SHORT, MIXED, DOTTED, LONG, SHORT, MIXED),
        ("", "//", "\\\\", "xx", "..", "||", "--", "++"),
        strict=True,
    )
)


def looks(names: Iterable[str]) -> dict[str, Look]:
    """Return the look of each method, in the order of METHODS; unknown methods come last.

    Unknown methods get a look by a hash of their name, or the next free look.

    >>> list(looks(["mine", "PMA", "Deep Sets"]))
    ['Deep Sets', 'PMA', 'mine']
    """
    names = set(names)
    found = {name: look for name, look in METHODS.items() if name in names}
    for name in sorted(names - found.keys()):
        start = zlib.crc32(name.encode()) % len(_OTHERS)
        filled = [*_OTHERS[start:], *_OTHERS[:start]]
        turn = [*filled, *(replace(look, hollow=True) for look in filled)]
        found[name] = next((look for look in turn if look not in found.values()), turn[0])
    return found


# ---- the sheet -----------------------------------------------------------------------------------

_SHEET: dict[Any, Any] = {
    "font.size": SMALL,
    "axes.titlesize": SMALL + 1,
    "axes.labelsize": SMALL,
    "xtick.labelsize": SMALL - 0.5,
    "ytick.labelsize": SMALL - 0.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "0.35",
    "axes.linewidth": 0.8,
    "xtick.color": "0.35",
    "ytick.color": "0.35",
    "xtick.labelcolor": "black",
    "ytick.labelcolor": "black",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "grid.linewidth": 0.6,
}


def figure(
    columns: int = 1, rows: int = 1, height: float = 2.6, titles: Sequence[str] = ()
) -> tuple[Figure, list[Axes]]:
    """Create an empty figure and return it with its panels, row by row.

    Args:
        columns: number of columns of panels.
        rows: number of rows of panels.
        height: height of a row in inches.
        titles: titles of the first panels.
    """
    with mpl.rc_context(_SHEET):
        drawing = Figure(figsize=(WIDTH, rows * height), layout="constrained")  # works headless
        panels = list(drawing.subplots(rows, columns, squeeze=False).flat)
        for axes, title in zip(panels, titles, strict=False):
            axes.set_title(title)
    return drawing, panels


def legend(drawing: Figure) -> None:
    """Add one legend for all panels below the figure."""
    found: dict[str, Any] = {}
    for axes in drawing.axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(name, handle)
    names = list(looks(found))
    if not names:  # what a figure shows was not run yet
        return
    rows = next(rows for rows in range(1, len(names) + 1) if _legend_width(names, rows) <= WIDTH)
    drawing.set_figheight(drawing.get_figheight() + 0.18 * rows)  # panels keep their height
    handles = [found[name] for name in names]
    place: dict[str, Any] = {"loc": "outside lower center", "ncols": math.ceil(len(names) / rows)}
    drawing.legend(handles, names, frameon=False, fontsize=SMALL, handlelength=3.2, **place)


def _legend_width(names: Sequence[str], rows: int) -> float:
    """Return the width in inches of a legend with this many rows; one column always fits."""
    columns = np.array_split(list(map(len, names)), math.ceil(len(names) / rows))
    return sum(0.62 + 0.062 * int(column.max()) for column in columns) if rows < len(names) else 0


def png(drawing: Figure) -> bytes:
    """Encode the figure as PNG, without dates or versions, so that the bytes are reproducible."""
    buffer = io.BytesIO()
    drawing.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    if any(axes.images for axes in drawing.axes):
        return buffer.getvalue()
    palette = io.BytesIO()  # plots have few colours; a palette takes a third of the bytes
    Image.open(buffer).convert("RGB").quantize(256).save(palette, "png", optimize=True)
    return palette.getvalue()


# ---- what is measured over seeds -----------------------------------------------------------------

Groups = Mapping[str, Mapping[str, Seeds]]
Marks = Mapping[str, Mapping[str, float]]


def curves(
    axes: Axes,
    series: Mapping[str, Mapping[float, Seeds]],
    xlabel: str,
    ylabel: str,
    *,
    log: bool = False,
) -> None:
    """Draw a line for each method: the mean over seeds, with a band for the range.

    Args:
        axes: the panel.
        series: {method: {x: {seed: value}}}.
        xlabel: label of the x axis, with the unit.
        ylabel: label of the y axis, with the unit.
        log: whether the x axis is logarithmic.
    """
    for number, (name, look) in enumerate(looks(series).items()):
        places = sorted(series[name])
        seeds = [series[name][x] for x in places]
        every = math.ceil(len(places) / 10)  # few markers, so that they do not hide the lines
        markers = (2 * number % every, every)  # shifted, so that they do not hide one another
        axes.plot(places, [*map(mean, seeds)], label=name, markevery=markers, **look.line)
        lowest, highest = ([end(each.values()) for each in seeds] for end in (min, max))
        axes.fill_between(places, lowest, highest, color=look.colour, alpha=0.16, linewidth=0)
    axes.set(xlabel=xlabel, ylabel=ylabel, xscale="log" if log else "linear")
    measured = sorted({x for line in series.values() for x in line})
    if len(measured) <= 9:
        axes.xaxis.set_major_locator(FixedLocator(measured))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))


def bars(axes: Axes, groups: Groups, ylabel: str, *, paper: Marks | None = None) -> None:
    """Draw a group of bars for each setting; whiskers show the range over seeds.

    Args:
        axes: the panel.
        groups: {setting: {method: {seed: value}}}.
        ylabel: label of the y axis, with the unit.
        paper: published numbers {setting: {method: value}}, drawn as grey ticks.
    """
    places, room = _places(groups)
    for name, look, shown in _by_method(groups, places):
        heights = [mean(seeds) for seeds in shown.values()]
        axes.bar(list(shown), heights, 0.92 * room, label=name, **look.bar)
        _draw_whiskers(axes, shown, BLACK)
    axes.axhline(0, color="0.35", linewidth=0.8)
    _finish_groups(axes, places, ylabel, paper or {})


def dots(axes: Axes, groups: Groups, ylabel: str, *, paper: Marks | None = None) -> None:
    """Draw markers instead of bars, for values whose distance from zero has no meaning."""
    places, _ = _places(groups)
    for name, look, shown in _by_method(groups, places):
        _draw_whiskers(axes, shown, look.colour)
        means = [mean(seeds) for seeds in shown.values()]
        axes.plot(list(shown), means, label=name, linestyle="none", zorder=4, **look.point)
    for number in range(0, len(groups), 2):
        axes.axvspan(number - 0.5, number + 0.5, color="0.965", zorder=0)
    _finish_groups(axes, places, ylabel, paper or {})


def _places(groups: Groups) -> tuple[Marks, float]:
    """Return the x position of each method in each group, and the width available to it.

    A method's position stays empty in groups without it, unless all groups have one method each.
    """
    names = list(looks(name for group in groups.values() for name in group))
    if all(len(group) == 1 for group in groups.values()):
        return {g: dict.fromkeys(names, float(i)) for i, g in enumerate(groups)}, 0.5
    room = 0.84 / len(names)
    offsets = {name: room * (lane + 0.5 - len(names) / 2) for lane, name in enumerate(names)}
    return {g: {name: i + offsets[name] for name in names} for i, g in enumerate(groups)}, room


def _by_method(groups: Groups, places: Marks) -> Iterator[tuple[str, Look, dict[float, Seeds]]]:
    for name, look in looks(name for group in groups.values() for name in group).items():
        holding = [group for group in groups if name in groups[group]]
        yield name, look, {places[group][name]: groups[group][name] for group in holding}


def _draw_whiskers(axes: Axes, shown: Mapping[float, Seeds], colour: str) -> None:
    halo = [withStroke(linewidth=2.4, foreground="white")]  # visible on dark bars
    for x, seeds in shown.items():
        if len(seeds) > 1:
            ends = [min(seeds.values()), max(seeds.values())]
            axes.plot([x, x], ends, color=colour, linewidth=1.1, zorder=3, path_effects=halo)


def _finish_groups(axes: Axes, places: Marks, ylabel: str, paper: Marks) -> None:
    marks = [
        (places[g][name], value)
        for g in paper
        for name, value in paper[g].items()
        if name in places[g]
    ]
    if marks:
        halo = [withStroke(linewidth=3.4, foreground="white")]
        tick: dict[str, Any] = {"color": GREY, "markersize": 10, "markeredgewidth": 1.8}
        axes.plot(
            *zip(*marks, strict=True), "_", label="Published", path_effects=halo, zorder=5, **tick
        )
    axes.grid(visible=False, axis="x")
    axes.tick_params(axis="x", length=0)
    characters = max(6, int(100 * axes.get_position().width / len(places)))
    axes.set_xticks(range(len(places)), [fill(str(group), characters) for group in places])
    axes.set(xlim=(-0.5, len(places) - 0.5), ylabel=ylabel)


# ---- pictures ------------------------------------------------------------------------------------

_CLASS_COLOURS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, BLACK, GREY, "#6A3D9A", "#8C564B")
_CLASS_MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # with ten colours: 70 pairs
_UNSEEN = (0.9, 0.9, 0.93)


def scatter(
    axes: Axes,
    points: ArrayLike,
    labels: ArrayLike,
    stars: ArrayLike | None = None,
    names: Sequence[str] | None = None,
) -> None:
    """Draw points in the plane by class, and class centroids as stars.

    Args:
        axes: the panel.
        points: (n, 2).
        labels: (n,) class indices.
        stars: (classes, 2), the centroid of each class.
        names: class names, written next to the stars.
    """
    points, labels = np.asarray(points), np.asarray(labels)
    for label in np.unique(labels):
        own, colour = points[labels == label], _CLASS_COLOURS[label % len(_CLASS_COLOURS)]
        shape = _CLASS_MARKERS[label % len(_CLASS_MARKERS)]
        axes.scatter(own[:, 0], own[:, 1], 9, colour, marker=shape, alpha=0.65, linewidth=0)
    for label, (x, y) in enumerate(() if stars is None else np.asarray(stars)):
        colour = _CLASS_COLOURS[label % len(_CLASS_COLOURS)]
        axes.scatter(x, y, 190, colour, marker="*", edgecolor="black", linewidth=0.9, zorder=4)
        if names is not None:
            text = axes.annotate(names[label], (x, y), (6, 4), textcoords="offset points", zorder=5)
            text.set(fontsize=SMALL, weight="bold")
            text.set_path_effects([withStroke(linewidth=2.5, foreground="white")])
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(visible=True, color="0.8")


def images(rows: Mapping[str, ArrayLike]) -> Figure:
    """Draw rows of pictures, such as input, prediction and ground truth.

    Args:
        rows: {name: (n, height, width, 3)}, as uint8 or as numbers in [0, 1]; NaN for pixels that
            were not seen.
    """
    strips = [_strip(np.asarray(pictures)) for pictures in rows.values()]
    high, wide = strips[0].shape[:2]
    names = [fill(name, 16) for name in rows]
    gutter = int(DPI * 0.07 * max(len(line) for name in names for line in name.split("\n"))) + 15
    # An integer number of dots per pixel, so that all pixels have the same size.
    zoom = max(1, (int(WIDTH * DPI) - gutter) // wide)
    right, top = gutter + zoom * wide, zoom * high * len(strips)
    drawing = Figure(figsize=(right / DPI, top / DPI), dpi=DPI)
    axes = drawing.add_axes((gutter / right, 0, 1 - gutter / right, 1))
    axes.imshow(np.concatenate(strips), interpolation="nearest", aspect="auto")
    axes.set_xticks([])
    axes.set_yticks([high * (row + 0.5) for row in range(len(strips))], names, fontsize=SMALL)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return drawing


def _strip(pictures: NDArray[Any]) -> NDArray[Any]:
    """Join pictures with a margin of one pixel: (n, h, w, 3) to (h + 1, n * (w + 1), 3)."""
    if pictures.dtype == np.uint8:
        pictures = pictures / 255
    shown = np.where(np.isnan(pictures), _UNSEEN, pictures.clip(0, 1))
    framed = np.pad(shown, ((0, 0), (0, 1), (0, 1), (0, 0)), constant_values=1)
    return np.concatenate(list(framed), axis=1)
