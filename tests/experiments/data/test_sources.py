import io
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from experiments.data import mnist, modelnet40, sources
from experiments.data.prepare import DATASETS
from setfold import FileError
from tests.experiments.data.making import SQUARE, make_folder, make_zip


@pytest.mark.parametrize("name", DATASETS)
def test_a_source_that_is_not_there(name, tmp_path, folder, progress):
    with pytest.raises(FileError, match="nowhere"):
        DATASETS[name].prepare(tmp_path / "nowhere", folder, progress)
    with pytest.raises(FileError, match=r"nowhere\.npz"):
        DATASETS[name].prepare(tmp_path / "nowhere.npz", folder, progress)
    assert not folder.exists()


def test_a_truncated_zip(tmp_path, folder, progress):
    whole = make_zip(tmp_path / "ModelNet40.zip", {"cup/train/cup_1.off": SQUARE})
    whole.write_bytes(whole.read_bytes()[:60])
    with pytest.raises(FileError, match=r"ModelNet40\.zip is truncated or not a zip"):
        modelnet40.prepare(whole, folder, progress)


def test_a_zip_with_a_damaged_member(tmp_path):
    path = tmp_path / "some.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "x" * 100)
    path.write_bytes(path.read_bytes().replace(b"xxx", b"xyx", 1))
    with (
        sources.open_files(path) as found,
        pytest.raises(FileError, match=r"a\.txt in .*some\.zip"),
    ):
        found.read("a.txt")


def test_an_npz_of_objects_or_without_an_array_is_refused(tmp_path, folder, progress):
    path = tmp_path / "mnist.npz"
    np.savez(path, x_train=np.zeros((1, 28, 28), np.uint8))
    with pytest.raises(FileError, match="y_train"):
        mnist.prepare(path, folder, progress)
    objects = np.array([{}], dtype=object)
    np.savez(path, x_train=objects, y_train=objects, x_test=objects, y_test=objects)
    with pytest.raises(FileError, match="allow_pickle"):
        mnist.prepare(path, folder, progress)
    path.write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(FileError, match=r"cannot read .*mnist\.npz"):
        mnist.prepare(path, folder, progress)


def test_hidden_files_are_left_out(tmp_path):
    contents = {"a/b.off": "", "__MACOSX/a/._b.off": "", "a/.DS_Store": "", "._x": ""}
    make_zip(tmp_path / "some.zip", contents)
    make_folder(tmp_path / "some", contents)
    for root in (tmp_path / "some.zip", tmp_path / "some"):
        with sources.open_files(root) as found:
            assert found.paths == ["a/b.off"]


def test_the_centre_is_cut_out_and_made_smaller_without_aliasing():
    picture = np.zeros((218, 178, 3))
    picture[20:198] = 100  # the central square
    picture[20:198, ::2] += 50  # stripes finer than the result: they must become even
    picture[20:109, :, 0] += 80
    content = io.BytesIO()
    Image.fromarray(picture.astype(np.uint8)).save(content, "PNG")
    pixels = sources.read_picture(content.getvalue(), "some", 64)
    assert pixels.shape == (64, 64, 3)
    assert pixels.dtype == torch.uint8
    inner = pixels[:, 1:-1].float()
    torch.testing.assert_close(inner[..., 1], torch.full((64, 62), 125.0), atol=12, rtol=0)
    torch.testing.assert_close(inner[:31, :, 0], torch.full((31, 62), 205.0), atol=12, rtol=0)
    torch.testing.assert_close(inner[33:, :, 0], torch.full((31, 62), 125.0), atol=12, rtol=0)
