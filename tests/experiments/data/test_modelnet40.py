import numpy as np
import pytest
import torch

from experiments.data import meshes, modelnet40
from setfold import FileError
from setfold.core import persist as files
from tests.experiments.data.making import SQUARE, make_folder, make_zip


def shapes(**changed: str) -> dict[str, str]:
    """Two classes of a few meshes; one has the header that some of ModelNet40's have."""
    contents = {
        "ModelNet40/bowl/train/bowl_0001.off": SQUARE,
        "ModelNet40/bowl/test/bowl_0002.off": SQUARE.replace("OFF\n", "OFF"),
        "ModelNet40/cup/train/cup_0001.off": (
            "OFF\n3 1 0 # a comment\n0 0 0\n0 0 1\n\n0 1 0\n3 0 1 2 255 0 0\n"
        ),
        "ModelNet40/cup/test/cup_0002.off": SQUARE,
        "ModelNet40/README.txt": "",
    }
    return contents | changed


@pytest.mark.parametrize("make", [make_zip, make_folder])
def test_meshes_become_clouds(make, tmp_path, folder, progress, seen):
    source = make(tmp_path / "ModelNet40", shapes())
    path = modelnet40.prepare(source, folder, progress)
    assert path == folder / "modelnet40.safetensors"
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    _, tensors, description = files.read(path, "data")
    assert description == {"classes": ["bowl", "cup"], "missing": []}
    assert tensors["train_labels"].tolist() == [0, 1]
    clouds = modelnet40.load()
    assert clouds.classes == ["bowl", "cup"]
    bowl, cup = torch.cat([clouds.points["train"], clouds.points["validation"]])
    assert bowl.shape == (2048, 3)
    assert bowl.dtype == torch.float32
    for points in (bowl, cup):
        torch.testing.assert_close(points.mean(0), torch.zeros(3), atol=1e-3, rtol=0)
        torch.testing.assert_close(points.norm(dim=1).max(), torch.tensor(1.0), atol=1e-4, rtol=0)
    assert bowl[:, 2].abs().max() == 0  # it lies in the plane z = 0, the cup's in x = 0
    assert cup[:, 0].abs().max() == 0


def test_points_of_a_shape_depend_on_its_name_alone(tmp_path, folder, progress):
    few = make_zip(tmp_path / "few.zip", shapes())
    more = make_zip(tmp_path / "more.zip", shapes() | {"ModelNet40/ant/train/ant_1.off": SQUARE})
    _, one, _ = files.read(modelnet40.prepare(few, folder, progress))
    _, two, _ = files.read(modelnet40.prepare(more, tmp_path / "other", progress))
    assert torch.equal(one["train_points"], two["train_points"][1:])
    assert not torch.equal(two["train_points"][0], two["train_points"][1])  # both are squares


def test_points_are_uniform_by_area():
    # A triangle of area 8, one of area 1 beside it, and one without area.
    vertices = np.array([[0, 0, 0], [4, 0, 0], [0, 4, 0], [9, 9, 5], [10, 9, 5], [9, 11, 5.0]])
    mesh = meshes.Mesh(vertices, np.array([[0, 1, 2], [3, 4, 5], [0, 1, 1]]))
    points = meshes.sample(mesh, 90_000, "some")
    # Undo the scaling by what is known of the shape: the two planes are 5 apart.
    points *= 5 / (points[:, 2].max() - points[:, 2].min())
    large = points[points[:, 2] < points[:, 2].mean()]
    assert abs(len(large) / 90_000 - 8 / 9) < 0.005  # five standard deviations
    large -= [*large[:, :2].min(axis=0), 0]
    x, y = large[:, 0], large[:, 1]
    assert (x + y).max() < 4.01
    # Quarters of the large triangle by its midlines: each holds a quarter of the points.
    quarters = [x > 2, y > 2, x + y < 2, (x < 2) & (y < 2) & (x + y > 2)]
    assert all(abs(quarter.mean() - 0.25) < 0.01 for quarter in quarters)


def test_polygons_become_fans():
    content = b"OFF 5 2 0\n0 0 0\n1 0 0\n1 1 0\n0 1 0\n0 2 0\n5 0 1 2 4 3 0.5 0.5 0.5\n2 0 1\n"
    assert meshes.parse_off(content).triangles.tolist() == [[0, 1, 2], [0, 2, 4], [0, 4, 3]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("ply\n", "starts with 'ply"),
        ("", "starts with ''"),
        ("OFF\n", "malformed"),
        ("OFF BINARY\n", "malformed"),
        ("OFF\n3 0 0\n0 0 0\n1 0 0\n0 1 0\n", "0 faces: no surface"),
        ("OFF\n3 1 0\n0 0 0\n1 0 0\n0 1 0\n", "only 3 lines follow"),
        ("OFF\n3 1 0\n0 0 0\n1 0 0\n0 x 0\n3 0 1 2\n", "malformed"),
        ("OFF\n3 1 0\n0 0\n1 0\n0 1\n3 0 1 2\n", "malformed"),
        ("OFF\n3 1 0\n0 0 0\n1 0 0\n0 1 0\n3 0 1 3\n", "not among the 3"),
        ("OFF\n3 1 0\n0 0 0\n1 0 0\n0 1 0\n3 0 1 -1\n", "not among the 3"),
        ("OFF\n3 1 0\n0 0 0\n1 0 0\n0 1 0\n3 0 1\n", "malformed"),
        ("OFF\n3 1 0\n0 0 0\n1 0 0\n0 1 0\n2 0 1\n", "malformed"),
        ("OFF\n3 1 0\n0 0 0\n1 0 0\n2 0 0\n3 0 1 2\n", "area is 0"),
        ("OFF\n3 1 0\n0 0 0\nnan 0 0\n2 1 0\n3 0 1 2\n", "area is nan"),
    ],
)
def test_broken_meshes_are_named(content, message, tmp_path, folder, progress):
    name = "ModelNet40/cup/test/cup_0002.off"
    source = make_zip(tmp_path / "m.zip", shapes(**{name: content}))
    with pytest.raises(FileError, match=message) as caught:
        modelnet40.prepare(source, folder, progress)
    assert f"m.zip/{name}" in str(caught.value)
    assert "Download it again" in str(caught.value)
    assert not folder.exists()


def test_a_folder_without_meshes(tmp_path, folder, progress):
    make_folder(tmp_path / "some", {"a/train/x.ply": ""})
    with pytest.raises(FileError, match=r"0 files.*Pass ModelNet40\.zip"):
        modelnet40.prepare(tmp_path / "some", folder, progress)


def test_compact_modelnet40(tmp_path, folder, progress):
    random = np.random.default_rng(0)
    arrays = {
        "x_train": random.integers(-2047, 2048, (20, 2048, 3)).astype(np.int16),
        "y_train": np.repeat([0, 1], 10).astype(np.uint8),
        "x_test": random.integers(-2047, 2048, (3, 2048, 3)).astype(np.int16),
        "y_test": np.array([1, 0, 1], np.uint8),
    }
    names = {"classes": np.array(["bowl", "cup"]), "missing": np.array(["cup_0009"])}
    np.savez(tmp_path / "m.npz", **arrays, **names, scale=np.float32(1 / 2047))
    path = modelnet40.prepare(tmp_path / "m.npz", folder, progress)
    assert files.read(path)[2] == {"classes": ["bowl", "cup"], "missing": ["cup_0009"]}
    clouds = modelnet40.load()
    assert clouds.labels["validation"].tolist() == [0, 1]
    assert clouds.labels["train"].tolist() == [0] * 9 + [1] * 9
    expected = torch.from_numpy(arrays["x_test"] * np.float32(1 / 2047))
    torch.testing.assert_close(clouds.points["test"], expected)
    together = torch.cat([clouds.points["train"], clouds.points["validation"]])
    expected = arrays["x_train"].astype(np.float64).sum() / 2047
    assert together.sum(dtype=torch.float64).item() == pytest.approx(expected, rel=1e-5)
