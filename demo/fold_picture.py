"""The figure of the large set: its elements, the streamed encoding, and peak memory."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from demo import galaxy
from demo.ways import WAYS, WRONG, Report, make_encoder

DARK, MIDDLE, LIGHT = "#21305a", "#7d8597", "#c3c8d4"  # distinct in greyscale


def draw(path: Path, results: dict[str, Report]) -> None:
    """Draw the three panels to a file."""
    figure = Figure(
        figsize=(11.5, 4.4), layout="constrained"
    )  # without pyplot, so it works headless
    left, middle, right = figure.subplots(1, 3)
    size = max(results["streamed"].readings)
    draw_set(left, size)
    draw_readings(middle, results["streamed"], results[WRONG])
    draw_memory(right, size, [results[way].memory / 1e6 for way in WAYS])
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def draw_set(axes: Axes, size: int) -> None:
    """Draw some elements, coloured by the slot with the largest attention weight."""
    encoder = make_encoder()
    elements = galaxy.block(0)[:, :size]
    favourite = encoder.weights(encoder.initial_state(), elements)[0].argmax(-1).numpy()  # (n,)
    elements = elements[0]
    places, shades = (
        elements[:, :2].numpy(),
        favourite / encoder.num_slots,
    )  # avoids the palest colour
    axes.scatter(places[:, 0], places[:, 1], 3, shades, cmap="viridis", vmin=0, vmax=1, linewidth=0)
    for slot in np.unique(favourite):
        own = places[favourite == slot]
        # label the element nearest to the median, which itself can be outside a spiral arm
        x, y = own[np.square(own - np.median(own, 0)).sum(1).argmin()]
        halo = [withStroke(linewidth=4, foreground="white")]
        axes.text(x, y, str(slot + 1), fontsize=14, weight="bold", path_effects=halo, ha="center")
    axes.set(xlim=(-4, 4), ylim=(-4, 4), aspect="equal", xlabel="x", ylabel="y")
    axes.set_title(
        f"A: {len(places):,} of the {size:,} stars,\ncoloured by slot (1 to {encoder.num_slots})"
    )


def draw_readings(axes: Axes, streamed: Report, wrong: Report) -> None:
    """Plot the distance between the encoding of the stream so far and the final one."""
    seen, apart = np.array(list(streamed.distances(streamed).items())[:-1]).T
    axes.loglog(seen, apart, "o-", color=DARK, markersize=5, label="streamed")
    expected = apart[0] * np.sqrt(seen[0] / seen)
    axes.loglog(seen, expected, ":", color=MIDDLE, label="proportional to 1 / √elements")
    (error,) = wrong.distances(streamed).values()
    axes.axhline(error, color=DARK, linestyle="--", label="WRONG: slots redrawn per chunk")
    axes.set(xlabel="stars that have arrived", ylabel="relative difference to the final encoding")
    axes.set_title("B: how the encoding converges\nwhile the stars arrive")
    axes.legend(frameon=False, loc="lower left")


def draw_memory(axes: Axes, size: int, megabytes: list[float]) -> None:
    """Plot the peak memory of each way."""
    names = ["streamed", "split\n(per process)", "shuffled", "whole"]
    bars = axes.bar(names, megabytes, color=[DARK, DARK, LIGHT, LIGHT], width=0.6)
    axes.bar_label(bars, [f"{value:.0f}" for value in megabytes], padding=3)
    held = size * galaxy.FEATURES * 8 / 1e6
    axes.axhline(held, color=MIDDLE, linestyle=":", zorder=0)
    axes.text(-0.3, held, f"size of the set: {held:.0f} MB", va="bottom", color=DARK)
    axes.set(ylabel="peak memory above start (MB)", ymargin=0.1)
    axes.set_title("C: peak memory of each way\nto fold the set")
