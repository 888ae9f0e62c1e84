"""Small sources of the kinds that people download."""

import io
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

from experiments.data import celeba, mnist, modelnet40, tiny_imagenet

LOADERS = {
    "modelnet40": modelnet40.load,
    "celeba": celeba.load,
    "mnist": mnist.load,
    "tiny_imagenet": tiny_imagenet.load,
}
SQUARE = "OFF\n4 2 0\n0 0 0\n2 0 0\n2 2 0\n0 2 0\n3 0 1 2\n3 0 2 3\n"


def make_zip(path: Path, contents: dict[str, str | bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return path


def make_folder(path: Path, contents: dict[str, str | bytes]) -> Path:
    for name, content in contents.items():
        target = path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def jpeg(pixels: np.ndarray) -> bytes:
    content = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(content, "JPEG", quality=95)
    return content.getvalue()


def plain(colour: tuple[int, int, int], height: int = 218, width: int = 178) -> bytes:
    return jpeg(np.full((height, width, 3), colour))
