"""Measure what "encode chunks and average" costs a trained model: a table and docs/chunk_average.png.

Run it from the root of a clone: python docs/examples/chunk_average.py
"""

import os
import runpy
import tempfile
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter, ScalarFormatter

import setfold
from setfold.laws.wrong_way import ChunkAverage

HERE = Path(__file__).parent
SIZES = (2, 4, 8, 16, 32, 64)  # pixels per chunk; the largest digit has 48 pixels of ink
LEAST = 1e-16  # an error of zero, on a logarithmic axis
FOLD, AVERAGE = "#21305a", "#c2410c"


def trained() -> dict:
    """Run digits.py in an empty folder, and return its variables."""
    with tempfile.TemporaryDirectory() as folder:
        before = Path.cwd()
        os.chdir(folder)
        try:
            return runpy.run_path(str(HERE / "digits.py"))
        finally:
            os.chdir(before)


def measure(sizes: tuple[int, ...] = SIZES) -> list[tuple[int, float, float, float, float]]:
    """By chunk size: accuracy and relative error of the fold, then of chunk-and-average."""
    names = trained()
    model, test = names["model"].double(), names["test"]
    elements, mask, labels = (
        names["pixels"][test].double(),
        names["mask"][test],
        names["labels"][test],
    )
    with torch.no_grad():
        whole = model(elements, mask)

    def score(found: torch.Tensor) -> tuple[float, float]:
        accuracy = (found.argmax(1) == labels).double().mean().item()
        return accuracy, ((found - whole).norm() / whole.norm()).item()

    rows = []
    for size in sizes:
        chunks = list(zip(elements.split(size, 1), mask.split(size, 1), strict=True))
        with torch.no_grad():
            folded, averaged = (
                setfold.fold(model, chunks),
                ChunkAverage(model, size)(elements, mask),
            )
        rows.append((size, *score(folded), *score(averaged)))
    return rows


def draw(rows: list[tuple[int, float, float, float, float]], path: Path) -> None:
    """Accuracy and error against the chunk size."""
    figure = Figure(figsize=(9, 3.3), layout="constrained")
    left, right = figure.subplots(1, 2)
    size, fold_accuracy, fold_error, accuracy, error = zip(*rows, strict=True)
    left.plot(size, fold_accuracy, "o-", color=FOLD, label="setfold")
    left.plot(size, accuracy, "s--", color=AVERAGE, label="chunk and average")
    left.set(title="Test accuracy", ylim=(0, 1.05))
    left.yaxis.set_major_formatter(PercentFormatter(1))
    right.plot(size, [max(e, LEAST) for e in fold_error], "o-", color=FOLD, label="setfold")
    right.plot(
        size, [max(e, LEAST) for e in error], "s--", color=AVERAGE, label="chunk and average"
    )
    right.set(title="Relative error of the output", yscale="log", ylim=(LEAST / 10, 1e2))
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(size)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_xlabel("pixels per chunk (64: the whole digit)")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e5e7eb")
    left.legend(loc="lower left", bbox_to_anchor=(0.0, 0.5), frameon=False)
    right.legend(loc="center left", bbox_to_anchor=(0.0, 0.5), frameon=False)
    figure.savefig(path, dpi=180)


def main() -> None:
    """Print the table and draw the figure."""
    rows = measure()
    print(f"{'':18}{'setfold':^22}{'chunk and average':^22}")
    print(f"{'pixels per chunk':18}{'accuracy':>9}{'error':>11}  {'accuracy':>11}{'error':>9}")
    for size, fold_accuracy, fold_error, accuracy, error in rows:
        print(f"{size:<18}{fold_accuracy:9.0%}{fold_error:11.1e}  {accuracy:11.0%}{error:9.1e}")
    draw(rows, HERE.parent / "chunk_average.png")


if __name__ == "__main__":
    main()
