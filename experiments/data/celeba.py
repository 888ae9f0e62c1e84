"""CelebA: faces, 64x64 or 32x32 pixels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from experiments.data import sources, store
from setfold import FileError

SIDE: Final = 64
PARTITION = "list_eval_partition.txt"
HELP = (
    "Download img_align_celeba.zip and list_eval_partition.txt of CelebA (Aligned & Cropped Images)"
    " into one folder, from https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html, and pass the zip or"
    " the unpacked folder img_align_celeba. For non-commercial research only; pictures and derived"
    " data must not be redistributed."
)


class Images(NamedTuple):
    """Pictures of each split."""

    pixels: dict[str, Tensor]  # (n, side, side, 3) uint8


class Picture(NamedTuple):
    """A picture to prepare: name for messages, split, and content of the file."""

    name: str
    split: int  # 0, 1 or 2, as in the partition file
    read: Callable[[], bytes]


@cache
def load(*, side: Literal[32, 64] = SIDE, made_up: bool = False) -> Images:
    """Load the pictures with the official split into "train", "validation" and "test".

    Args:
        side: side of the pictures in pixels; with 64 they are memory-mapped.
        made_up: whether to return a few synthetic pictures instead, which need no file.
    """
    if made_up:
        pixels, sizes = _blobs(128), [96, 16, 16]
    else:
        tensors, _ = store.read("celeba", HELP)
        pixels, sizes = tensors["pixels"], tensors["split"].bincount(minlength=3).tolist()
    if side == SIDE // 2:
        pixels = torch.cat([_halve(some) for some in pixels.split(1000)])
    return Images(store.in_splits(pixels, sizes))


def _halve(pixels: Tensor) -> Tensor:
    """Average blocks of 2x2 pixels, rounded."""
    rows = pixels[:, ::2].short() + pixels[:, 1::2]  # (n, side / 2, side, 3)
    return ((rows[:, :, ::2] + rows[:, :, 1::2] + 2) // 4).to(torch.uint8)


def _blobs(count: int) -> Tensor:
    """Make synthetic pictures (count, 64, 64, 3): four coloured blobs on a coloured ground."""
    random = torch.Generator().manual_seed(0)
    colours = 4 * torch.rand(count, 4, 1, 3, generator=random) - 2
    ground = 2 * torch.rand(count, 1, 1, 3, generator=random) - 1
    centres = torch.rand(count, 4, 2, 1, generator=random)
    widths = 0.1 + 0.2 * torch.rand(count, 4, 1, 1, generator=random)
    near = torch.exp(-(((torch.linspace(0, 1, SIDE) - centres) / widths) ** 2))  # (n, 4, 2, 64)
    down, across = near[:, :, 0], near[:, :, 1]
    coloured = (across[..., None] * colours).flatten(2)  # (n, 4, 64 * 3)
    logits = (down.mT @ coloured).view(count, SIDE, SIDE, 3) + ground
    return (255 * torch.sigmoid(logits)).to(torch.uint8)


def prepare(source: Path, folder: Path, progress: store.Progress) -> Path:
    """Write celeba.safetensors.

    Args:
        source: the zip or the folder img_align_celeba, with list_eval_partition.txt in the same
            folder; or an npz of JPEG files (jpeg_bytes, offsets), split 8:1:1 in order.
        folder: folder for the file.
        progress: callback with the number of finished pictures and the total.
    """
    if source.suffix == ".npz":
        return _write(_compact(source), folder, progress)
    with sources.open_files(source) as files:
        return _write(_aligned(files), folder, progress)


def _write(pictures: list[Picture], folder: Path, progress: store.Progress) -> Path:
    """Decode and write pictures; they must be sorted by split."""
    pixels = torch.empty(len(pictures), SIDE, SIDE, 3, dtype=torch.uint8)
    for i, picture in enumerate(pictures):
        pixels[i] = sources.read_picture(picture.read(), picture.name, SIDE)
        progress(i + 1, len(pictures))
    splits = torch.tensor([picture.split for picture in pictures], dtype=torch.uint8)
    tensors = {"pixels": pixels, "split": splits}
    return store.write("celeba", folder, tensors, {"splits": store.SPLITS})


def _compact(source: Path) -> list[Picture]:
    """List the pictures in an npz file."""
    arrays = sources.read_arrays(source, "jpeg_bytes", "offsets")
    content, bounds = arrays["jpeg_bytes"], arrays["offsets"].tolist()
    tenth = (len(bounds) - 1) // 10
    splits = [0] * (len(bounds) - 1 - 2 * tenth) + [1] * tenth + [2] * tenth
    return [
        Picture(f"picture {i} of {source}", split, content[start:end].tobytes)
        for i, (split, (start, end)) in enumerate(zip(splits, pairwise(bounds), strict=True))
    ]


def _aligned(files: sources.Files) -> list[Picture]:
    """List the pictures in a folder or a zip, sorted by split."""
    splits = _partition(files.root.absolute().parent / PARTITION)
    paths = {path.rpartition("/")[2]: path for path in files.paths}
    missing = sorted(splits.keys() - paths.keys())
    if missing:
        raise FileError(
            f"{files.root} lacks {len(missing)} of the {len(splits)} pictures in {PARTITION}, for "
            f"example {missing[0]}. Unpack or download it again."
        )
    return [
        Picture(str(files.root / paths[name]), splits[name], partial(files.read, paths[name]))
        for name in sorted(splits, key=lambda name: (splits[name], name))
    ]


def _partition(path: Path) -> dict[str, int]:
    """Read the split of each picture: 0, 1 or 2."""
    if not path.is_file():
        raise FileError(
            f"{path} does not exist. It contains the split into training and test pictures. "
            "Download it from CelebA's page (folder Eval) and put it there."
        )
    parts = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        words = line.split()
        if len(words) != 2 or words[1] not in ("0", "1", "2"):
            raise FileError(
                f"{path}, line {number}: expected a picture's name and 0, 1 or 2; got {line!r}. "
                "Download it again."
            )
        parts[words[0]] = int(words[1])
    return parts
