"""The results as figures: time and memory against the number of elements."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # no display is needed

import matplotlib.pyplot as plt

from bench.encoders import FAMILIES, Family
from bench.folds import passes
from bench.memory import BESIDE_PEERS, STREAM
from bench.peers import OURS, PEERS
from bench.plan import FOLD_CHUNK, NARROW, SHAPES, Shape
from bench.results import Cell, Results, Way, pass_name

# Okabe and Ito's colours, which colour-blind readers can tell apart; in grey, dashes and markers do.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#8C564B")
DASHES = ("-", "--", "-.", ":")
MARKERS = ("s", "^", "D", "v", "P", "X", "<", ">", "h")
INK = "black"
THICK = {"color": INK, "linewidth": 3.2, "markersize": 7, "zorder": 5}
SMALLEST = 0.1  # MB; a logarithmic axis has no place for 0, which a tiny set can measure as

Style = dict[str, Any]


def write(results: Results, directory: Path) -> list[str]:
    """Write all figures for which there is something to draw; their names."""
    figures = {"time.png": _draw_time, "encoders_time.png": _draw_encoder_time}
    if results.memory:
        figures |= {"memory.png": _draw_memory, "encoders_memory.png": _draw_encoder_memory}
    for name, draw in figures.items():
        figure = draw(results)
        figure.savefig(directory / name, dpi=150)
        plt.close(figure)
    return list(figures)


# ---- the Slot Set Encoder and its peers ----------------------------------------------------------


def _peer_styles() -> dict[str, Style]:
    """A look for each name, the same in both figures: setfold black and thick."""
    others = [peer.name for peer in PEERS.values() if peer.plotted and peer.name != OURS]
    looks: dict[str, Style] = {
        name: {
            "color": COLOURS[number % len(COLOURS)],
            "linestyle": DASHES[number % len(DASHES)],
            "marker": MARKERS[number % len(MARKERS)],
            "linewidth": 1.5,
            "markersize": 5,
        }
        for number, name in enumerate(others)
    }
    ours = {OURS: {**THICK, "linestyle": "-", "marker": "o"}}
    return ours | looks | {STREAM: {**THICK, "linestyle": ":", "marker": "*", "markersize": 11}}


def _draw_time(results: Results) -> Any:
    styles = _peer_styles()
    names = [peer.name for peer in PEERS.values() if peer.plotted]
    figure, grid = plt.subplots(2, len(SHAPES), figsize=(12, 7.5), sharex=True, sharey="row")
    for (row, backward), (column, shape) in product(enumerate((False, True)), enumerate(SHAPES)):
        _plot_times(grid[row][column], results.cells, shape, backward, names, styles)
    for axes, shape in zip(grid[0], SHAPES, strict=True):
        axes.set_title(_spelled(shape))
    _label_time(grid)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.suptitle("Pooling one set on one CPU core", fontsize=13)
    figure.legend(handles, labels, loc="lower center", ncols=5, frameon=False)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    return figure


def _draw_memory(results: Results) -> Any:
    styles = _peer_styles()
    figure, axes = plt.subplots(figsize=(7.5, 5.5))
    for label, (name, way) in BESIDE_PEERS.items():
        doing = "forward" if label == STREAM else "forward+backward"
        style = {**styles[label], "label": f"{label}, {doing}"}
        _plot_memory(axes, results, name, way, results.plan.memory_lengths, style)
    _finish_axes(axes)
    axes.set_ylim(bottom=0.3)
    axes.set_xlabel("elements n")
    axes.set_ylabel("peak memory above the input (MB)")
    axes.set_title(f"Memory for one set of n elements, {_spelled(NARROW)}")
    figure.legend(loc="lower center", ncols=2, frameon=False)
    figure.tight_layout(rect=(0, 0.14, 1, 1))
    return figure


# ---- every encoder, a family to a panel ----------------------------------------------------------


def _family_styles(family: Family) -> dict[str, Style]:
    """Pairs share colour and marker; setfold's lines are solid, others' dashed and hollow."""
    looks: dict[str, Style] = {OURS: {**THICK, "marker": "o"}}
    pairs = [pair for pair in family.pairs if pair.ours.name != OURS]
    for (ours, theirs), colour, marker in zip(pairs, COLOURS, MARKERS, strict=False):
        common = {"color": colour, "marker": marker, "markersize": 6}
        looks[ours.name] = {**common, "linewidth": 2}
        if theirs is not None:
            hollow = {"linestyle": (0, (4, 2)), "linewidth": 1.3, "markerfacecolor": "white"}
            looks[theirs.name] = {**common, **hollow}
    return looks


def _draw_encoder_time(results: Results) -> Any:
    figure, grid = plt.subplots(2, len(FAMILIES), figsize=(16, 8.6), sharex=True, sharey="row")
    for (row, backward), (column, family) in product(enumerate((False, True)), enumerate(FAMILIES)):
        styles = _family_styles(family)
        _plot_times(grid[row][column], results.encoder_cells, NARROW, backward, styles, styles)
    _label_time(grid)
    _label_families(grid)
    figure.suptitle(f"Encoding one set on one CPU core, {_spelled(NARROW)}", fontsize=13)
    figure.tight_layout()
    return figure


def _draw_encoder_memory(results: Results) -> Any:
    plan = results.plan
    figure, grid = plt.subplots(2, len(FAMILIES), figsize=(16, 8.8), sharex=True, sharey=True)
    for (whole, folded), family in zip(grid.T, FAMILIES, strict=True):
        for name, style in _family_styles(family).items():
            style["label"] = name
            dotted = {**style, "linestyle": ":", "linewidth": 1.5, "markersize": 4}
            _plot_memory(whole, results, name, Way.WHOLE, plan.encoder_memory_lengths, style)
            _plot_memory(folded, results, name, Way.TRAINED, plan.fold_lengths, style)
            _plot_memory(folded, results, name, Way.STREAMED, plan.fold_lengths, dotted)
        if not any(pair.ours.name in passes() for pair in family.pairs):
            folded.text(0.5, 0.7, "none of these folds", ha="center", transform=folded.transAxes)
        _finish_axes(whole)
        _finish_axes(folded)
        folded.set_xlabel("elements n")
    for row, seen in zip(grid, ("whole set", "folded"), strict=True):
        row[0].set_ylabel(f"{seen}, peak memory (MB)")
    _label_families(grid)
    figure.suptitle(
        f"Memory above the input for one set, {_spelled(NARROW)}\n"
        f"above: all of it in one call, forward+backward; "
        f"below: folded in chunks of {FOLD_CHUNK:,}, forward+backward, and dotted forward only"
    )
    figure.tight_layout()
    return figure


def _label_families(grid: Any) -> None:
    """Titles above, and below each column what its lines are."""
    for column, family in zip(grid.T, FAMILIES, strict=True):
        column[0].set_title(family.title)
        handles, labels = column[0].get_legend_handles_labels()
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2)}
        column[1].legend(handles, labels, frameon=False, fontsize=9, handlelength=3.2, **place)


# ---- what figures share --------------------------------------------------------------------------


def _plot_times(
    axes: Any,
    cells: list[Cell],
    shape: Shape,
    backward: bool,
    names: Iterable[str],
    styles: dict[str, Style],
) -> None:
    mine = [cell for cell in cells if (cell.shape, cell.backward) == (shape, backward)]
    mine.sort(key=lambda cell: cell.length)
    for name in names:
        shown = [cell for cell in mine if name in cell.timings.samples]
        times = [cell.timings.seconds(name) * 1e3 for cell in shown]
        axes.plot([cell.length for cell in shown], times, label=name, **styles[name])
    _finish_axes(axes)


def _plot_memory(
    axes: Any, results: Results, name: str, way: Way, lengths: tuple[int, ...], style: Style
) -> None:
    found = {n: results.megabytes(name, way, n) for n in lengths}
    shown = {n: max(height, SMALLEST) for n, height in found.items() if not math.isnan(height)}
    if shown:
        axes.plot(list(shown), list(shown.values()), **style)


def _label_time(grid: Any) -> None:
    for row, backward in zip(grid, (False, True), strict=True):
        row[0].set_ylabel(f"{pass_name(backward)}, CPU time (ms)")
    for axes in grid[-1]:
        axes.set_xlabel("elements n")


def _finish_axes(axes: Any) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(True, which="major", color="0.88", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _spelled(shape: Shape) -> str:
    return f"d = {shape.dim_in}, K = {shape.num_slots}, d_out = {shape.dim_out}"
