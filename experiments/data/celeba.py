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
    " into one folder, from https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html, and give the zip,"
    " or the folder img_align_celeba that it holds. For non-commercial research only; the pictures"
    " and what is made of them must not be passed on."
)


class Images(NamedTuple):
    """Pictures of each split."""

    pixels: dict[str, Tensor]  # (n, side, side, 3) uint8


class Picture(NamedTuple):
    """A picture that is to be prepared: its name for messages, its split, its file's content."""

    name: str
    split: int  # 0, 1, 2: as the partition file numbers them
    read: Callable[[], bytes]


@cache
def load(*, side: Literal[32, 64] = SIDE, made_up: bool = False) -> Images:
    """The pictures, with the official split into "train", "validation" and "test".

    Args:
        side: pixels of the pictures' sides; at 64 they stay on disk until they are used.
        made_up: a few pictures of smooth blobs instead, for which no file is needed.
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
    """Averages 2x2 pixels into one, rounded."""
    rows = pixels[:, ::2].short() + pixels[:, 1::2]  # (n, side / 2, side, 3)
    return ((rows[:, :, ::2] + rows[:, :, 1::2] + 2) // 4).to(torch.uint8)


def _blobs(count: int) -> Tensor:
    """Pictures (count, 64, 64, 3) of four coloured blobs each on a coloured ground."""
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
    """Make celeba.safetensors in a folder.

    Args:
        source: the zip or the folder img_align_celeba with list_eval_partition.txt beside it, or
            an npz of JPEG files (jpeg_bytes, offsets), split 8:1:1 in order.
        folder: where the file goes.
        progress: is told how many pictures are done.
    """
    if source.suffix == ".npz":
        return _write(_compact(source), folder, progress)
    with sources.open_files(source) as files:
        return _write(_aligned(files), folder, progress)


def _write(pictures: list[Picture], folder: Path, progress: store.Progress) -> Path:
    """Decode pictures, whose splits are in order, and write them."""
    pixels = torch.empty(len(pictures), SIDE, SIDE, 3, dtype=torch.uint8)
    for i, picture in enumerate(pictures):
        pixels[i] = sources.read_picture(picture.read(), picture.name, SIDE)
        progress(i + 1, len(pictures))
    splits = torch.tensor([picture.split for picture in pictures], dtype=torch.uint8)
    tensors = {"pixels": pixels, "split": splits}
    return store.write("celeba", folder, tensors, {"splits": store.SPLITS})


def _compact(source: Path) -> list[Picture]:
    """The pictures in an npz file."""
    arrays = sources.read_arrays(source, "jpeg_bytes", "offsets")
    content, bounds = arrays["jpeg_bytes"], arrays["offsets"].tolist()
    tenth = (len(bounds) - 1) // 10
    splits = [0] * (len(bounds) - 1 - 2 * tenth) + [1] * tenth + [2] * tenth
    return [
        Picture(f"picture {i} of {source}", split, content[start:end].tobytes)
        for i, (split, (start, end)) in enumerate(zip(splits, pairwise(bounds), strict=True))
    ]


def _aligned(files: sources.Files) -> list[Picture]:
    """The pictures in a folder or a zip, sorted by their splits."""
    splits = _partition(files.root.absolute().parent / PARTITION)
    paths = {path.rpartition("/")[2]: path for path in files.paths}
    missing = sorted(splits.keys() - paths.keys())
    if missing:
        raise FileError(
            f"{files.root} lacks {len(missing)} of the {len(splits)} pictures that {PARTITION} "
            f"names, {missing[0]} for one. Unpack or download it again."
        )
    return [
        Picture(str(files.root / paths[name]), splits[name], partial(files.read, paths[name]))
        for name in sorted(splits, key=lambda name: (splits[name], name))
    ]


def _partition(path: Path) -> dict[str, int]:
    """The split of each picture: 0, 1 or 2."""
    if not path.is_file():
        raise FileError(
            f"there is no {path}. It says which pictures are for training and which for test: "
            "download it from CelebA's page (folder Eval) and put it there."
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
