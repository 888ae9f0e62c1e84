import gzip

import numpy as np
import pytest
import torch

from experiments.data import mnist
from setfold import FileError
from tests.experiments.data.making import make_folder


def idx(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim])
    return head + b"".join(size.to_bytes(4, "big") for size in array.shape) + array.tobytes()


def digits() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "train-images-idx3-ubyte": random.integers(0, 256, (24, 28, 28), dtype=np.uint8),
        "train-labels-idx1-ubyte": np.arange(24, dtype=np.uint8) % 10,
        "t10k-images-idx3-ubyte": random.integers(0, 256, (5, 28, 28), dtype=np.uint8),
        "t10k-labels-idx1-ubyte": np.arange(5, dtype=np.uint8),
    }


@pytest.mark.parametrize(
    ("rename", "pack"),
    [
        (lambda name: name, lambda content: content),
        (lambda name: f"{name}.gz", gzip.compress),
        (lambda name: name.replace("-idx", ".idx"), lambda content: content),
    ],
    ids=["plain", "gzip", "dots"],
)
def test_idx_files(rename, pack, tmp_path, folder, progress, seen):
    arrays = digits()
    make_folder(tmp_path / "m", {rename(name): pack(idx(a)) for name, a in arrays.items()})
    mnist.prepare(tmp_path / "m", folder, progress)
    assert seen[-1] == (4, 4)
    found = mnist.load()
    assert torch.equal(found.images["test"], torch.tensor(arrays["t10k-images-idx3-ubyte"]))
    assert found.labels["test"].tolist() == [0, 1, 2, 3, 4]
    assert len(found.images["validation"]) == 2
    # Pictures stay with their labels.
    by_content = {
        image.tobytes(): label for image, label in zip(*list(arrays.values())[:2], strict=True)
    }
    for split in ("train", "validation"):
        for image, label in zip(found.images[split], found.labels[split], strict=True):
            assert by_content.pop(image.numpy().tobytes()) == label
    assert not by_content


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "train-images-idx3-ubyte",
            lambda c: b"\0\0\x08\x01" + c[4:],
            "magic number 2049; expected 2051",
        ),
        ("t10k-labels-idx1-ubyte", lambda c: b"<html>", "expected 2049 for labels"),
        ("t10k-images-idx3-ubyte", lambda c: c[:-1], "truncated or too long"),
        ("t10k-images-idx3-ubyte", lambda c: c[:9], "truncated or too long"),
        ("t10k-labels-idx1-ubyte", lambda c: idx(np.zeros(4, np.uint8)), "4 test labels"),
        ("train-labels-idx1-ubyte", None, r"neither .*train-labels-idx1-ubyte.*all four"),
    ],
)
def test_broken_idx_files_are_named(name, change, message, tmp_path, folder, progress):
    contents = {key: idx(array) for key, array in digits().items()}
    broken = contents.pop(name)
    if change is not None:
        contents[name] = change(broken)
    make_folder(tmp_path / "m", contents)
    with pytest.raises(FileError, match=message):
        mnist.prepare(tmp_path / "m", folder, progress)


def test_a_truncated_gzip(tmp_path, folder, progress):
    contents = {f"{key}.gz": gzip.compress(idx(array)) for key, array in digits().items()}
    contents["train-images-idx3-ubyte.gz"] = contents["train-images-idx3-ubyte.gz"][:-50]
    make_folder(tmp_path / "m", contents)
    with pytest.raises(FileError, match=r"cannot read .*train-images-idx3-ubyte\.gz"):
        mnist.prepare(tmp_path / "m", folder, progress)
