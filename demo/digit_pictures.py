"""Pictures of the digits for the page's grid, and the plot of errors."""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from demo.arriving import SLOTS, WHOLE, WRONG, Arrived
from demo.digits import SIDE
from demo.fold_picture import DARK, LIGHT, MIDDLE
from demo.streaming import PIXELS_SEEN

NOT_SEEN = np.array([70, 98, 160], dtype=np.uint8)  # blue, for pixels that have not arrived
LOOKS = {SLOTS: ("o-", DARK), WHOLE: ("s--", MIDDLE), WRONG: ("^:", "#b4442e")}


def painted(image: NDArray[Any], pixels: NDArray[Any] | None = None) -> bytes:
    """Encode a digit (784,) as PNG; with `pixels`, all other pixels are blue."""
    grey = ((image + 1) * 127.5).round().clip(0, 255).astype(np.uint8)
    colours = np.repeat(grey[:, None], 3, 1)  # (784, 3)
    if pixels is not None:
        hidden = np.ones(len(colours), dtype=bool)
        hidden[pixels] = False
        colours[hidden] = NOT_SEEN
    file = BytesIO()
    Image.fromarray(colours.reshape(SIDE, SIDE, 3)).save(file, "PNG", optimize=True)
    return file.getvalue()


def draw_errors(path: Path, arrived: Arrived) -> None:
    """Plot the error against the number of pixels."""
    figure = Figure(figsize=(7, 4.4), layout="constrained")  # without pyplot, so it works headless
    axes = figure.subplots()
    for way, (line, colour) in LOOKS.items():
        axes.plot(PIXELS_SEEN, arrived.outcomes[way].errors, line, color=colour, label=way)
    axes.set_xscale("log", base=2)
    axes.set_xticks(PIXELS_SEEN, map(str, PIXELS_SEEN))
    axes.set(
        xlabel="pixels that have arrived (of 784)",
        ylabel="mean squared error per pixel",
        ylim=(0, None),
    )
    axes.set_title(f"Error of completed digits, mean over {len(arrived.unseen.images)} digits")
    axes.grid(color=LIGHT, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
