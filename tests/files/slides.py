"""Slides as the tools of pathology store them, each written as they write it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
import torch

PATCH, DIM = 256, 8
ATTRIBUTES = {  # of the coordinates, as TRIDENT writes them
    "patch_size": 256,
    "patch_size_level0": 512,
    "level0_magnification": 40,
    "target_magnification": 20,
    "overlap": 0,
    "name": "slide",
    "level0_width": 100_000,
    "level0_height": 80_000,
}


class Slide(NamedTuple):
    """The features (n, d) and the upper left corners (n, 2) of some patches."""

    features: np.ndarray
    coords: np.ndarray


def draw_slide(patches=30, seed=0, dtype="f4"):
    """Patches row by row, ten in a row."""
    draw, number = np.random.default_rng(seed), np.arange(patches)
    features = draw.standard_normal((patches, DIM)).astype(dtype)
    return Slide(features, np.stack([number % 10, number // 10], 1) * PATCH)


def write_growing(path, arrays, attributes=None):
    """Write datasets that can grow, one chunk per patch."""
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            chunks, longest = (1, *array.shape[1:]), (None, *array.shape[1:])
            node = file.create_dataset(name, data=array, maxshape=longest, chunks=chunks)
            node.attrs.update((attributes or {}).get(name, {}))


def clam(path, slide):
    write_growing(path, {"features": slide.features, "coords": slide.coords.astype("i4")})


def clam_in_batches(path, slide):
    """The features of a batch of patches are appended to those of the batches before."""
    first = Slide(slide.features[:7], slide.coords[:7])
    clam(path, first)
    with h5py.File(path, "a") as file:
        for name, array in slide._asdict().items():
            file[name].resize(len(array), axis=0)
            file[name][7:] = array[7:]


def trident(path, slide):
    attributes = {"features": {"name": "slide", "savetodir": "out"}, "coords": ATTRIBUTES}
    write_growing(path, slide._asdict(), attributes)


def batch_of_one(path, slide):
    write_growing(path, {"features": slide.features[None], "coords": slide.coords})


def batch_with_batched_coords(path, slide):
    with h5py.File(path, "w") as file:
        file["features"], file["coords"] = slide.features[None], slide.coords[None]


def annotated(path, slide):
    """With datasets of other lengths, with texts, and with labels of patches."""
    labels = np.arange(len(slide.features)) % 2
    trident(path, slide)
    with h5py.File(path, "a") as file:
        file["annots"], file["patch_labels"], file["barcode"] = np.zeros((7, 4)), labels, ["a"] * 5
        file["mask/thumbnail"] = np.zeros((9, 11), "u1")


def clam_pt(path, slide):
    torch.save(torch.from_numpy(slide.features), path)


def dict_pt(path, slide):
    arrays = slide._asdict().items()
    torch.save({name: torch.from_numpy(array) for name, array in arrays}, path)


def torchmil(path, slide):
    np.save(path, slide.features)


LAYOUTS = {
    "clam": ("h5", clam),
    "clam in batches": ("h5", clam_in_batches),
    "trident": ("h5", trident),
    "batch of one": ("h5", batch_of_one),
    "batch with coords": ("hdf5", batch_with_batched_coords),
    "annotated": ("h5", annotated),
    "clam pt": ("pt", clam_pt),
    "dictionary": ("pt", dict_pt),
    "torchmil": ("npy", torchmil),
}
PLACED = [n for n in LAYOUTS if n not in ("clam pt", "torchmil")]  # those with coordinates


def write_slide(folder: Path, layout: str, slide: Slide, name: str = "slide") -> Path:
    suffix, write = LAYOUTS[layout]
    path = folder / f"{name}.{suffix}"
    write(path, slide)
    return path
