import numpy as np
import pytest
import torch

from experiments.data import celeba, store
from setfold import FileError
from tests.experiments.data.making import make_folder, make_zip, plain

COLOURS = {"000001.jpg": (250, 0, 0), "000002.jpg": (0, 250, 0), "000003.jpg": (0, 0, 250)}
PARTS = "000001.jpg 2\n000002.jpg 0\n000003.jpg 1\n"


@pytest.mark.parametrize("make", [make_zip, make_folder])
def test_faces(make, tmp_path, folder, progress, seen):
    contents = {f"img_align_celeba/{name}": plain(colour) for name, colour in COLOURS.items()}
    (tmp_path / "list_eval_partition.txt").write_text(PARTS)
    celeba.prepare(make(tmp_path / "img_align_celeba", contents), folder, progress)
    assert seen[-1] == (3, 3)
    for side in (64, 32):
        pixels = celeba.load(side=side).pixels
        for split, colour in zip(("test", "train", "validation"), COLOURS.values(), strict=True):
            expected = torch.tensor(colour).expand(1, side, side, 3).to(torch.uint8)
            torch.testing.assert_close(pixels[split], expected, atol=3, rtol=0)


def test_four_pixels_become_their_mean(folder):
    pixels = torch.randint(256, (3, 64, 64, 3), generator=torch.Generator().manual_seed(0))
    split = torch.tensor([0, 1, 2], dtype=torch.uint8)
    store.write("celeba", folder, {"pixels": pixels.to(torch.uint8), "split": split}, {})
    halved = torch.cat(list(celeba.load(side=32).pixels.values())).double()
    channels = pixels.double().movedim(-1, 1)
    expected = torch.nn.functional.avg_pool2d(channels, 2).movedim(1, -1)
    assert (halved - expected).abs().max() <= 0.5


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (None, r"list_eval_partition\.txt does not exist.*Download it"),
        (PARTS + "000004.jpg 0\n", r"lacks 1 of the 4 pictures.*000004\.jpg"),
        ("000001.jpg 3\n", "line 1: expected a picture's name and 0, 1 or 2"),
        ("000001.jpg\n", "line 1"),
    ],
)
def test_partitions_that_do_not_fit(parts, message, tmp_path, folder, progress):
    source = make_folder(tmp_path / "faces", {name: plain(c) for name, c in COLOURS.items()})
    if parts is not None:
        (tmp_path / "list_eval_partition.txt").write_text(parts)
    with pytest.raises(FileError, match=message):
        celeba.prepare(source, folder, progress)


@pytest.mark.parametrize("content", [b"", b"not a picture", plain((9, 9, 9))[:700]])
def test_a_corrupt_picture_is_named(content, tmp_path, folder, progress):
    (tmp_path / "list_eval_partition.txt").write_text(PARTS)
    contents = {name: plain(colour) for name, colour in COLOURS.items()}
    source = make_zip(tmp_path / "faces.zip", contents | {"000003.jpg": content})
    with pytest.raises(FileError, match=r"cannot read the picture .*faces\.zip/000003\.jpg"):
        celeba.prepare(source, folder, progress)
    assert not folder.exists()


def test_compact_celeba(tmp_path, folder, progress):
    contents = [plain((20 * i, 0, 0), height=109, width=89) for i in range(10)]
    offsets = np.cumsum([0] + [len(content) for content in contents])
    packed = np.frombuffer(b"".join(contents), np.uint8)
    np.savez(tmp_path / "c.npz", jpeg_bytes=packed, offsets=offsets)
    celeba.prepare(tmp_path / "c.npz", folder, progress)
    pixels = celeba.load().pixels
    assert {split: len(some) for split, some in pixels.items()} == {
        "train": 8,
        "validation": 1,
        "test": 1,
    }
    reds = torch.cat(list(pixels.values()))[..., 0].float().mean((1, 2))
    torch.testing.assert_close(reds, torch.arange(10) * 20.0, atol=3, rtol=0)
