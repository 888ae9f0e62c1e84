"""Generate slides with and without a lesion, as CLAM and TRIDENT store features of patches.

    python docs/examples/slides.py [SLIDES]     # slides/*.h5, slides.csv; new/*.h5, new.csv

The slides in new/ are a tenth as many, with ten times as many patches. No tissue was seen here:
features are noise around a stain, which differs from slide to slide, and around benign spots, which
all slides have. A lesion is a spot of 1 to 4% of the patches in every second slide, whose features
are shifted in another direction. `lesion` says which patches these are; it is not a feature.
It needs `pip install "setfold[hdf5]"`.
"""

import csv
import sys
from pathlib import Path

import h5py
import numpy as np

DIM, PATCH = 16, 256  # features, pixels
SHIFT, STAIN = 5.0, 0.3  # of a spot, and of a slide; the noise has a deviation of 1

directions = np.random.default_rng(0).standard_normal((2, DIM))
benign, malignant = directions / np.linalg.norm(directions, axis=1, keepdims=True)


def draw_slide(draw: np.random.Generator, ill: bool, side: int) -> dict[str, np.ndarray]:
    """Return the datasets of one slide, with at most `side` patches in a row."""
    y, x = np.indices((side, side)) / side - 0.5
    angle, phases = np.arctan2(y, x), draw.uniform(0, 2 * np.pi, 3)
    edge = 0.4 + sum(0.04 * np.cos((n + 1) * angle + p) for n, p in enumerate(phases))
    places = np.argwhere(np.hypot(x, y) < edge)  # of tissue: row, column
    features = draw.standard_normal((len(places), DIM)) + STAIN * draw.standard_normal(DIM)

    def spot(share: float) -> np.ndarray:
        distance = np.linalg.norm(places - places[draw.integers(len(places))], axis=1)
        return distance <= np.quantile(distance, share)

    for _ in range(draw.integers(1, 4)):
        features[spot(draw.uniform(0.01, 0.04))] += SHIFT * benign
    lesion = spot(draw.uniform(0.01, 0.04)) if ill else np.zeros(len(places), bool)
    features[lesion] += SHIFT * malignant
    return {
        "features": features.astype(np.float16),
        "coords": places[:, ::-1] * PATCH,
        "lesion": lesion,
    }


def write(folder: Path, count: int, side: int, seed: int) -> None:
    """Write slides, and a table of their labels."""
    folder.mkdir(exist_ok=True)
    draw = np.random.default_rng(seed)
    with folder.with_suffix(".csv").open("w", newline="") as table:
        rows = csv.writer(table)
        rows.writerow(["case_id", "slide_id", "tumour"])
        for number in range(count):
            name, ill = f"{folder.name}_{number:02d}", number % 2 == 1
            rows.writerow([f"patient_{number // 2}", name, "yes" if ill else "no"])
            with h5py.File(folder / f"{name}.h5", "w") as file:
                for key, values in draw_slide(draw, ill, side).items():
                    file.create_dataset(key, data=values, chunks=(1, *values.shape[1:]))


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    write(Path("slides"), count, side=20, seed=1)
    write(Path("new"), count // 10, side=64, seed=2)
