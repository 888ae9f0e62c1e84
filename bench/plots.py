"""Figures of the results: time and memory against the number of elements; the roofline."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # works headless

import matplotlib.pyplot as plt

from bench.encoders import FAMILIES, Family
from bench.folds import passes
from bench.gradients import ALL_AT_ONCE, BY_HAND, MODELS, Model
from bench.memory import BESIDE_PEERS, STREAM
from bench.peers import OURS, PEERS
from bench.plan import FOLD_CHUNK, GRADIENT_CHUNK, GRAPH_LIMIT, NARROW, SHAPES, Shape
from bench.results import Cell, Results, Way, pass_name

# Okabe and Ito's colour-blind safe palette. In greyscale, dashes and markers tell lines apart.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#8C564B")
DASHES = ("-", "--", "-.", ":")
MARKERS = ("s", "^", "D", "v", "P", "X", "<", ">", "h")
INK = "black"
THICK = {"color": INK, "linewidth": 3.2, "markersize": 7, "zorder": 5}
SMALLEST = 0.1  # MB; smaller values, including 0, are drawn here on the logarithmic axis

Style = dict[str, Any]


def write(results: Results, directory: Path) -> dict[str, str]:
    """Write all figures that have data; returns their names and captions."""
    peers, encoders = bool(results.cells), bool(results.encoder_cells)
    with_memory = bool(results.memory)
    figures = (
        ("time", "Time against n", _draw_time, peers),
        ("roofline", "Arithmetic and its limits", _draw_roofline, bool(results.rooflines)),
        ("encoders_time", "Time of every encoder against n", _draw_encoder_time, encoders),
        ("memory", "Memory against n", _draw_memory, with_memory and peers),
        (
            "encoders_memory",
            "Memory of every encoder against n, whole and folded",
            _draw_encoder_memory,
            with_memory and encoders,
        ),
        (
            "gradients",
            "Time and memory of one training step against n",
            _draw_gradients,
            bool(results.training_steps),
        ),
    )
    written = {}
    for name, caption, draw, measured in figures:
        if measured:
            file = f"benchmark_{name}.png"
            figure = draw(results)
            figure.savefig(directory / file, dpi=150)
            plt.close(figure)
            written[file] = caption
    return written


# ---- the Slot Set Encoder and its peers ----------------------------------------------------------


def _peer_styles() -> dict[str, Style]:
    """Return the style of each name, the same in both figures; setfold is black and thick."""
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


# ---- the limits of the core ----------------------------------------------------------------------


def _draw_roofline(results: Results) -> Any:
    """Draw operations per second against operations per byte, below both limits of the core."""
    arithmetic = median(found.peak_operations for found in results.rooflines) / 1e9
    reading = median(found.peak_bytes for found in results.rooflines) / 1e9
    figure, axes = plt.subplots(figsize=(8, 5.2))
    ridge, right = arithmetic / reading, 2 * max(r.intensity for r in results.rooflines)
    left, right = min(1.0, ridge / 2), max(right, 2 * ridge)
    roof = [reading * left, arithmetic, arithmetic]
    axes.plot([left, ridge, right], roof, color=INK, linewidth=2)
    axes.annotate(
        f"arithmetic, {arithmetic:.0f} GFLOP/s",
        (right, arithmetic),
        (0, 5),
        textcoords="offset points",
        ha="right",
    )
    axes.annotate(
        f"reading, {reading:.1f} GB/s",
        (left, reading * left),
        (12, 0),
        textcoords="offset points",
    )
    for shape, colour, marker in zip(SHAPES, COLOURS, MARKERS, strict=False):
        for found in (found for found in results.rooflines if found.shape == shape):
            place = found.intensity, found.operations / found.seconds / 1e9
            share = f"{found.arithmetic_share:.0%}"
            beside, side = ((8, -4), "left") if found.backward else ((-8, -4), "right")
            axes.annotate(share, place, beside, textcoords="offset points", fontsize=9, ha=side)
            axes.plot(
                *place,
                color=colour,
                marker=marker,
                markersize=9,
                linestyle="none",
                markerfacecolor="white" if found.backward else colour,
                label=f"{_spelled(shape)}, {pass_name(found.backward)}",
            )
    _finish_axes(axes)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel("counted operations per byte of the set")
    axes.set_ylabel("GFLOP/s")
    axes.set_title(f"{OURS} and the limits of one core; % of its arithmetic")
    figure.legend(loc="lower center", ncols=2, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.15, 1, 1))
    return figure


# ---- every encoder, one panel per family ---------------------------------------------------------


def _family_styles(family: Family) -> dict[str, Style]:
    """Pairs share colour and marker; setfold's lines are solid, peers' are dashed and hollow."""
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
            folded.text(
                0.5, 0.7, "none of these encoders folds", ha="center", transform=folded.transAxes
            )
        _finish_axes(whole)
        _finish_axes(folded)
        folded.set_xlabel("elements n")
    for row, seen in zip(grid, ("whole set", "folded"), strict=True):
        row[0].set_ylabel(f"{seen}, peak memory (MB)")
    _label_families(grid)
    figure.suptitle(
        f"Peak memory above the input for one set, {_spelled(NARROW)}\n"
        f"top: whole set in one call, forward+backward; "
        f"bottom: folded in chunks of {FOLD_CHUNK:,}, forward+backward (dotted: forward only)"
    )
    figure.tight_layout()
    return figure


def _label_families(grid: Any) -> None:
    """Add a title above and a legend below each column."""
    for column, family in zip(grid.T, FAMILIES, strict=True):
        column[0].set_title(family.title)
        handles, labels = column[0].get_legend_handles_labels()
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2)}
        column[1].legend(handles, labels, frameon=False, fontsize=9, handlelength=3.2, **place)


# ---- training steps ------------------------------------------------------------------------------


def _step_styles() -> dict[str, Style]:
    """Exact gradients are black and thick, autograd is dashed, sampled gradients are thin."""
    thin = {"linewidth": 1.5, "markersize": 5, "zorder": 6}
    hollow = {**thin, "color": COLOURS[2], "markerfacecolor": "white"}
    return {
        ALL_AT_ONCE: {"color": COLOURS[0], "linestyle": "--", "marker": "s", "linewidth": 2},
        BY_HAND: {"color": COLOURS[1], "linestyle": "-.", "marker": "^", "linewidth": 2},
        Way.EXACT: {**THICK, "marker": "o"},
        Way.TENSOR: {**THICK, "linestyle": ":", "marker": "*", "markersize": 11},
        Way.UNBIASED_1: {**hollow, "marker": "v"},
        Way.UNBIASED_4: {**hollow, "marker": "D", "linestyle": "--"},
        Way.UNBIASED_16: {**hollow, "marker": "P", "linestyle": ":", "markersize": 7},
        Way.SUBSET: {**thin, "color": COLOURS[3], "linestyle": ":", "marker": "X"},
    }


def _draw_gradients(results: Results) -> Any:
    figure, grid = plt.subplots(2, 2, figsize=(11, 8.8), sharex=True, sharey="col")
    for (times, memory), model in zip(grid, MODELS, strict=True):
        _plot_steps(times, memory, results, model)
        times.set_ylabel(f"{model.title}\nCPU time (s)")
        memory.set_ylabel("peak memory above the input (MB)")
    for axes, title in zip(grid[0], ("time of a step", "memory of a step"), strict=True):
        axes.set_title(title)
    for axes in grid[-1]:
        axes.set_xlabel("elements n")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.suptitle(
        f"One training step on one set, one CPU core, {_spelled(NARROW)}, "
        f"chunks of {GRADIENT_CHUNK:,}"
    )
    figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False, handlelength=3.2)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    return figure


def _plot_steps(times: Any, memory: Any, results: Results, model: Model) -> None:
    styles = _step_styles()
    costs = [cost for cost in results.training_steps if cost.model == model.title]
    for label, (name, way) in model.lines.items():
        shown = {c.length: c.timings.seconds(label) for c in costs if label in c.timings.samples}
        times.plot(list(shown), list(shown.values()), label=label, **styles[label])
        _plot_memory(memory, results, name, way, results.plan.gradient_lengths, styles[label])
    memory.axhline(GRAPH_LIMIT, color="0.5", linewidth=1)
    where = memory.get_yaxis_transform()
    what = f"above {GRAPH_LIMIT / 1e3:.0f} GB, autograd was not run"
    memory.text(0.01, GRAPH_LIMIT * 1.15, what, color="0.4", transform=where)
    _finish_axes(times)
    _finish_axes(memory)


# ---- helpers -------------------------------------------------------------------------------------


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
