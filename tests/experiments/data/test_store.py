from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.data import mnist, store
from experiments.data.prepare import DATASETS
from setfold import FileError
from setfold.core import persist as files
from tests.experiments.data.making import SQUARE, make_folder, plain

MAPS = Path("/proc/self/maps")


def test_held_out_are_the_same_share_of_each_class():
    labels = torch.tensor([0] * 500 + [1] * 500 + [2] * 77)
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))]
    stay, out = store.hold_out(labels, 100)
    assert sorted(stay.tolist() + out.tolist()) == list(range(len(labels)))
    assert labels[out].bincount().tolist() in ([46, 47, 7], [47, 46, 7], [46, 46, 8])
    assert torch.equal(out, store.hold_out(labels, 100)[1])


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, folder, progress, monkeypatch):
    path = tmp_path / "mnist.npz"
    pixels, labels = np.zeros((12, 28, 28), np.uint8), np.zeros(12, np.uint8)
    np.savez(path, x_train=pixels, y_train=labels, x_test=pixels, y_test=labels)
    prepared = mnist.prepare(path, folder, progress)
    before = prepared.read_bytes()

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(FileError, match=r"the disk is full. Free some space"):
        mnist.prepare(path, folder, progress)
    assert list(folder.iterdir()) == [prepared]
    assert prepared.read_bytes() == before


@pytest.mark.parametrize("name", ["modelnet40", "celeba"])
def test_an_interruption_leaves_nothing(name, tmp_path, folder):
    make_folder(tmp_path, {"list_eval_partition.txt": "1.jpg 0\n", "some/1.jpg": plain((1, 2, 3))})
    make_folder(tmp_path / "some", {f"cup/{split}/cup.off": SQUARE for split in ("train", "test")})

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        DATASETS[name].prepare(tmp_path / "some", folder, interrupt)
    assert not folder.exists()


def test_a_changed_file_is_noticed(tmp_path, folder, progress):
    pixels, labels = np.zeros((12, 28, 28), np.uint8), np.zeros(12, np.uint8)
    np.savez(tmp_path / "m.npz", x_train=pixels, y_train=labels, x_test=pixels, y_test=labels)
    prepared = mnist.prepare(tmp_path / "m.npz", folder, progress)
    content = bytearray(prepared.read_bytes())
    content[-1] ^= 1
    prepared.write_bytes(content)
    with pytest.raises(FileError, match="checksum"):
        mnist.load()


@pytest.mark.skipif(not MAPS.exists(), reason="only Linux says what is mapped")
def test_tensors_are_mapped_from_disk(folder):
    path = store.write("big", folder, {"a": torch.zeros(5_000_000)}, {})
    tensors, _ = store.read("big", "")
    address = tensors["a"].data_ptr()
    ranges = [
        [int(bound, 16) for bound in line.split()[0].split("-")]
        for line in MAPS.read_text().splitlines()
        if line.endswith(path.name)
    ]
    assert any(start <= address < end for start, end in ranges)
