"""The results as figures: time and memory against the number of elements."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # no display is needed

import matplotlib.pyplot as plt

from bench.memory import STREAM
from bench.peers import OURS, PEERS
from bench.plan import SHAPES
from bench.results import Results, pass_name

# Okabe and Ito's colours, which colour-blind readers can tell apart; in grey, dashes and markers do.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#8C564B")
DASHES = ("-", "--", "-.", ":")
MARKERS = ("s", "^", "D", "v", "P", "X", "<", ">", "h")
INK = "black"


def write(results: Results, directory: Path) -> None:
    """Write time.png and, where memory was measured, memory.png."""
    directory.mkdir(parents=True, exist_ok=True)
    _draw_time(results, directory / "time.png")
    if results.memory:
        _draw_memory(results, directory / "memory.png")


def _styles() -> dict[str, dict[str, Any]]:
    """A look for each name, the same in all figures: setfold black and thick."""
    others = [peer.name for peer in PEERS.values() if peer.plotted and peer.name != OURS]
    looks: dict[str, dict[str, Any]] = {
        name: {
            "color": COLOURS[number % len(COLOURS)],
            "linestyle": DASHES[number % len(DASHES)],
            "marker": MARKERS[number % len(MARKERS)],
            "linewidth": 1.5,
            "markersize": 5,
        }
        for number, name in enumerate(others)
    }
    thick = {"color": INK, "linewidth": 3.2, "markersize": 7, "zorder": 5}
    ours = {OURS: {**thick, "linestyle": "-", "marker": "o"}}
    return ours | looks | {STREAM: {**thick, "linestyle": ":", "marker": "*", "markersize": 11}}


def _draw_time(results: Results, path: Path) -> None:
    styles = _styles()
    figure, grid = plt.subplots(2, len(SHAPES), figsize=(12, 7.5), sharex=True, sharey="row")
    for (row, backward), (column, shape) in product(enumerate((False, True)), enumerate(SHAPES)):
        axes = grid[row][column]
        cells = [c for c in results.cells if c.shape == shape and c.backward == backward]
        cells.sort(key=lambda cell: cell.length)
        for name in (peer.name for peer in PEERS.values() if peer.plotted):
            shown = [c for c in cells if name in c.timings.samples]
            axes.plot(
                [c.length for c in shown],
                [c.timings.seconds(name) * 1e3 for c in shown],
                label=name,
                **styles[name],
            )
        _finish_axes(axes)
        if row == 0:
            axes.set_title(f"d = {shape.dim_in}, K = {shape.num_slots}, d_out = {shape.dim_out}")
        else:
            axes.set_xlabel("elements n")
        if column == 0:
            axes.set_ylabel(f"{pass_name(backward)}, CPU time (ms)")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.suptitle("Pooling one set on one CPU core", fontsize=13)
    figure.legend(handles, labels, loc="lower center", ncols=5, frameon=False)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    _save(figure, path)


def _draw_memory(results: Results, path: Path) -> None:
    styles = _styles()
    figure, axes = plt.subplots(figsize=(7.5, 5.5))
    for name in dict.fromkeys(point.name for point in results.memory):
        shown = sorted((p.length, p.megabytes) for p in results.memory if p.name == name)
        # a logarithmic axis has no place for 0, which a tiny set can measure as
        heights = [max(megabytes, 0.01) for _, megabytes in shown]
        label = f"{name}, {'forward' if name == STREAM else 'forward+backward'}"
        axes.plot([n for n, _ in shown], heights, label=label, **styles[name])
    _finish_axes(axes)
    axes.set_ylim(bottom=0.3)
    axes.set_xlabel("elements n")
    axes.set_ylabel("peak memory above the input (MB)")
    axes.set_title("Memory for one set of n elements, d = 5, K = 16, d_out = 64")
    figure.legend(loc="lower center", ncols=2, frameon=False)
    figure.tight_layout(rect=(0, 0.14, 1, 1))
    _save(figure, path)


def _finish_axes(axes: Any) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(True, which="major", color="0.88", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=150)
    plt.close(figure)
