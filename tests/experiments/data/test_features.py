import io
import os
import zipfile

import numpy as np
import pytest
import torch

from experiments.data import features, sources, tiny_imagenet
from experiments.data.features import Extraction
from experiments.data.prepare import DATASETS, with_module
from setfold import FileError, InputError
from setfold.core import persist as files
from tests.experiments.data.making import make_folder, make_zip, plain


class Colours(torch.nn.Module):
    """Six features of a picture: the mean of each channel, and twice that, shuffled."""

    def forward(self, pictures):
        mean = pictures.mean((2, 3))
        return torch.cat([mean, 2 * mean.roll(1, dims=1)], dim=1)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "colours.pt2"
    dynamic = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(Colours(), (torch.rand(2, 3, 16, 16),), dynamic_shapes=dynamic)
    torch.export.save(program, path)
    return path


def extraction(module: str, **changed) -> Extraction:
    settings = {"side": 16, "mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25), "dims": 3}
    return Extraction(module, batch_size=4, **(settings | changed))


HERE = f"{__name__}:Colours"
REDS, BLUES = [(250, 10 * i, 0) for i in range(6)], [(0, 10 * i, 250) for i in range(6)]


def tiny() -> dict[str, str | bytes]:
    """Tiny ImageNet's layout, with two classes."""
    red = {f"t/train/n2/images/n2_{i}.JPEG": plain(c, 20, 30) for i, c in enumerate(REDS)}
    blue = {f"t/train/n1/images/n1_{i}.JPEG": plain(c, 20, 30) for i, c in enumerate(BLUES)}
    val = {"t/val/images/val_0.JPEG": plain(REDS[2], 64, 64)}
    val |= {"t/val/images/val_1.JPEG": plain(BLUES[2], 64, 64)}
    tables = {
        "t/val/val_annotations.txt": "val_0.JPEG\tn2\t0\t0\t9\t9\nval_1.JPEG\tn1\t0\t0\t9\t9\n",
        "t/words.txt": "n0\tnothing\nn1\tblue, as the sky\nn2\tred\n",
        "t/test/images/test_0.JPEG": b"never read",
    }
    return red | blue | val | tables


@pytest.mark.parametrize("make", [make_zip, make_folder])
def test_features_of_tiny_imagenets_layout(make, exported, tmp_path, folder, progress, seen):
    source = make(tmp_path / "tiny", tiny())
    data = with_module(extraction(str(exported)))
    assert data.prepare(source, folder, progress) == folder / "tiny_imagenet.safetensors"
    assert seen == [(4, 14), (8, 14), (12, 14), (14, 14)]
    _, tensors, _ = files.read(folder / "tiny_imagenet.safetensors", "data")
    assert tensors["train_features"].dtype == torch.int8
    assert tensors["scale"].shape == (3,)
    found = tiny_imagenet.load()
    assert found.names == ["blue, as the sky", "red"]
    assert found.labels["test"].tolist() == [1, 0]
    # Distances survive: PCA to all dimensions that there are is a rotation.
    both = torch.cat([found.features["train"], found.features["validation"]])
    labels = torch.cat([found.labels["train"], found.labels["validation"]])
    red, blue = found.features["test"]
    colours = (torch.tensor([REDS[2], BLUES[2]]) / 255 - 0.5) / 0.25
    expected = Colours()(colours[..., None, None]).diff(dim=0).norm()
    torch.testing.assert_close((red - blue).norm(), expected, rtol=0.03, atol=0)
    torch.testing.assert_close(both[labels == 1].mean(0), red, atol=0.5, rtol=0)
    torch.testing.assert_close(both.mean(0), torch.zeros(3), atol=0.5, rtol=0)


def test_features_of_a_plain_folder(tmp_path, folder, progress):
    contents = {f"red/{i}.png": plain(colour, 9, 9) for i, colour in enumerate(REDS)}
    contents |= {f"blue/{i}.jpg": plain(colour, 9, 9) for i, colour in enumerate(BLUES)}
    source = make_folder(tmp_path / "some", contents)
    with_module(extraction(HERE, dims=2)).prepare(source, folder, progress)
    found = tiny_imagenet.load()
    assert found.names == ["blue", "red"]
    assert found.features["test"].shape == (2, 2)  # a tenth of twelve, rounded up
    assert found.labels["test"].tolist() == [0, 1]
    assert len(found.features["train"]) + len(found.features["validation"]) == 10


def test_pictures_in_folders_for_train_and_val(tmp_path):
    make_folder(tmp_path, {f"{s}/{k}/1.jpg": "" for s in ("train", "val") for k in ("a", "b")})
    with sources.open_files(tmp_path) as found:
        pictures = features.find_pictures(found)
    assert {(picture.split, picture.kind) for picture in pictures} == {
        ("train", "a"),
        ("train", "b"),
        ("val", "a"),
        ("val", "b"),
    }


def test_pictures_that_are_not_in_order(tmp_path, folder, progress):
    data = with_module(extraction(HERE))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileError, match="no pictures in folders"):
        data.prepare(tmp_path / "empty", folder, progress)
    unknown = make_zip(tmp_path / "u.zip", {"train/a/1.jpg": b"", "val/c/2.jpg": b""})
    with pytest.raises(FileError, match=r"val/c/2\.jpg of an unknown class"):
        data.prepare(unknown, folder, progress)
    corrupt = make_zip(tmp_path / "c.zip", tiny() | {"t/train/n1/images/n1_3.JPEG": b"?"})
    with pytest.raises(FileError, match=r"cannot read the picture .*n1_3\.JPEG"):
        data.prepare(corrupt, folder, progress)
    with pytest.raises(FileError, match=r"features of pictures.*--module"):
        DATASETS["tiny_imagenet"].prepare(corrupt, folder, progress)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("colours", "expected FILE.pt2 or package.module:factory"),
        ("no_such_package:factory", "No module named 'no_such_package'"),
        (f"{__name__}:NoSuchThing", "NoSuchThing"),
        ("builtins:dict", "returned a dict; expected an nn.Module"),
        ("torch.nn:Identity", None),
    ],
)
def test_modules_by_name(module, message):
    if message is None:
        assert isinstance(features.load_module(module), torch.nn.Identity)
    else:
        with pytest.raises(InputError, match=message):
            features.load_module(module)


def test_a_module_is_in_eval_mode():
    assert not features.load_module("torch.nn:Dropout").training


class Scalar(torch.nn.Module):
    def forward(self, pictures):
        return pictures.mean(0)


class Pair(torch.nn.Module):
    def forward(self, pictures):
        return pictures, pictures


class OtherSide(torch.nn.Module):
    def forward(self, pictures):
        return pictures.view(-1, 3 * 7 * 7)


@pytest.mark.parametrize(
    ("module", "dims", "message"),
    [
        ("Colours", 7, "cannot keep 7 dimensions of 6 features.*use 1 to 6"),
        ("Colours", 0, "cannot keep 0 dimensions"),
        ("Scalar", 2, r"to features \(1, ...\); got \(3, 16, 16\)"),
        ("Pair", 2, "got tuple"),
        ("OtherSide", 2, "failed on pictures.*Set --side"),
    ],
)
def test_modules_that_do_not_fit(module, dims, message, tmp_path, folder, progress, seen):
    source = make_zip(tmp_path / "tiny.zip", tiny())
    data = with_module(extraction(f"{__name__}:{module}", dims=dims))
    with pytest.raises(InputError, match=message):
        data.prepare(source, folder, progress)
    assert not seen  # noticed with the first picture, before all the others


class Trap:
    """What a pickle can do: call anything when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_an_exported_file_is_not_unpickled(exported, tmp_path):
    trapped, sample, sprung = tmp_path / "trapped.pt2", io.BytesIO(), tmp_path / "sprung"
    torch.save(Trap(sprung), sample)
    with zipfile.ZipFile(exported) as archive, zipfile.ZipFile(trapped, "w") as target:
        for name in archive.namelist():
            pickled = "sample_inputs" in name
            target.writestr(name, sample.getvalue() if pickled else archive.read(name))
    before = dict(os.environ)
    with pytest.raises(FileError, match=r"cannot load .*trapped\.pt2.*only tensors"):
        features.load_module(str(trapped))
    assert not sprung.exists()
    assert dict(os.environ) == before
    with pytest.raises(Exception):  # noqa: B017, PT011 - however torch puts it
        torch.export.load(trapped)
    assert sprung.exists()  # so the trap was one


def test_exported_files_that_cannot_be_read(tmp_path):
    with pytest.raises(FileError, match=r"does not exist.*torch\.export\.save"):
        features.load_module(str(tmp_path / "no.pt2"))
    (tmp_path / "bad.pt2").write_bytes(b"bad")
    with pytest.raises(FileError, match=r"cannot load .*bad\.pt2"):
        features.load_module(str(tmp_path / "bad.pt2"))


def test_compact_features(tmp_path, folder, progress):
    random = np.random.default_rng(0)
    train = random.integers(-127, 128, (40, 256)).astype(np.int8)
    val = random.integers(-127, 128, (4, 256)).astype(np.int8)
    scale = random.random(256, dtype=np.float32)
    np.savez(
        tmp_path / "t.npz",
        x_train=train,
        y_train=np.repeat([0, 1], 20).astype(np.uint8),
        x_val=val,
        y_val=np.array([1, 1, 0, 0], np.uint8),
        scale=scale,
        words=np.array(["fish", "frog"]),
    )
    tiny_imagenet.prepare(tmp_path / "t.npz", folder, progress)
    found = tiny_imagenet.load()
    torch.testing.assert_close(found.features["test"], torch.from_numpy(val * scale))
    assert found.labels["test"].tolist() == [1, 1, 0, 0]
    assert found.labels["validation"].tolist() == [0, 0, 1, 1]
    assert found.names == ["fish", "frog"]
