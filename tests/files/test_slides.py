"""Slides in the layouts of CLAM, TRIDENT and torchmil are read without options."""

from __future__ import annotations

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

import setfold
from setfold import cli
from setfold.files.inputs import open_reader
from tests.files.slides import DIM, LAYOUTS, PLACED, Slide, draw_slide, write_growing, write_slide


@pytest.fixture
def model():
    torch.manual_seed(0)
    return setfold.GatedAttentionPool(DIM, 4).eval()


def whole(model, slide):
    """The encoding and the weights of a slide in memory."""
    elements = torch.tensor(slide.features, dtype=torch.float32)[None]
    state = model.update(model.initial_state(1), elements)
    with torch.no_grad():
        return model(elements)[0].numpy(), model.weights(state, elements)[0].numpy()


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_encoding_is_that_of_the_features(tmp_path, model, layout, dtype):
    slide = draw_slide(dtype=dtype)
    path, out = write_slide(tmp_path, layout, slide), tmp_path / "out.npz"
    summary = setfold.encode_sets(model, path, out)
    found = np.load(out)
    np.testing.assert_allclose(found["encoding"][0], whole(model, slide)[0], atol=1e-5)
    assert (found["count"].tolist(), found["set"].tolist()) == ([30], [str(path)])
    bare = layout in ("clam pt", "torchmil")
    assert summary.features == (("elements",) if bare else ("features",))


def test_bfloat16(tmp_path, model):
    """NumPy has no such dtype."""
    features = torch.randn(30, DIM).bfloat16()
    torch.save(features, tmp_path / "slide.pt")
    setfold.encode_sets(model, tmp_path / "slide.pt", tmp_path / "out.npz")
    expected, _ = whole(model, Slide(features.float().numpy(), np.empty(0)))
    found = np.load(tmp_path / "out.npz")["encoding"]
    np.testing.assert_allclose(found[0], expected, atol=1e-5)


def test_what_is_used_is_printed(tmp_path, model):
    setfold.save(model, tmp_path / "m.safetensors")
    path = write_slide(tmp_path, "annotated", draw_slide())
    words = ["encode", tmp_path / "m.safetensors", path, "--out", tmp_path / "out.parquet"]
    result = CliRunner().invoke(cli.app, list(map(str, words)), catch_exceptions=False)
    lines = dict(line.split(":", 1) for line in result.output.splitlines())
    assert lines["features"].strip() == "features"


@pytest.mark.parametrize(
    ("more", "options", "width", "used"),
    [
        ({}, {"features": "!weight"}, 10, ("features", "coords")),
        ({}, {"features": "coords,features"}, 10, ("coords", "features")),
        ({"set": np.arange(30) // 10}, {"set": "set"}, 11, ("coords", "features", "weight")),
    ],
    ids=["excluded", "chosen", "rows of sets"],
)
def test_the_rule_yields_to_options(tmp_path, more, options, width, used):
    """With --set the columns are those of a table, as they always were."""
    arrays = draw_slide()._asdict() | {"weight": np.ones(30)} | more
    write_growing(tmp_path / "slide.h5", arrays)
    encoder = setfold.SummaryStatistics(width)
    summary = setfold.encode_sets(
        encoder, tmp_path / "slide.h5", tmp_path / "out.parquet", **options
    )
    assert sorted(summary.features) == sorted(used)


@pytest.mark.parametrize("kind", [pa.float32(), pa.list_(pa.float32())])
def test_a_plain_column_of_this_name_is_one_of_all(tmp_path, kind):
    values = [1.0, 2.0] if kind == pa.float32() else [[1.0], [2.0]]
    table = pa.table({"features": pa.array(values, kind), "x": [3.0, 4.0]})
    pq.write_table(table, tmp_path / "rows.parquet")
    summary = setfold.encode_sets(
        setfold.SummaryStatistics(2), tmp_path / "rows.parquet", tmp_path / "out.parquet"
    )
    assert summary.features == ("features", "x")


# ---- weights -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", PLACED)
@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_weights_beside_coordinates(tmp_path, model, layout, suffix):
    slide = draw_slide(dtype="f2")
    path, out = write_slide(tmp_path, layout, slide), tmp_path / f"heat.{suffix}"
    summary = setfold.weigh_sets(model, path, out)
    assert (summary.features, summary.kept) == (("features",), ("x", "y"))
    with open_reader(out) as reader:
        assert reader.schema.names == ["set", "row", "x", "y", "weight"]
        heat = pa.Table.from_batches(list(reader.read(["x", "y", "weight"], rows=1000)))
    assert np.stack([heat["x"], heat["y"]], 1).tolist() == slide.coords.tolist()
    np.testing.assert_allclose(heat["weight"], whole(model, slide)[1][:, 0], rtol=1e-4)


@pytest.mark.parametrize(
    ("keep", "names"),
    [(["patch_labels"], ["patch_labels"]), ([], []), (["patch_labels", "coords"], None)],
)
def test_only_what_is_asked_for_is_kept(tmp_path, model, keep, names):
    path = write_slide(tmp_path, "annotated", draw_slide())
    summary = setfold.weigh_sets(model, path, tmp_path / "heat.parquet", keep=keep)
    assert list(summary.kept) == (["patch_labels", "x", "y"] if names is None else names)


def test_without_coordinates_nothing_is_kept(tmp_path, model):
    path = write_slide(tmp_path, "clam pt", draw_slide())
    assert setfold.weigh_sets(model, path, tmp_path / "heat.parquet").kept == ()


# ---- damaged and hostile -----------------------------------------------------------------------


def refused(tmp_path, model, message, *, error=setfold.InputError, weights=False):
    run = setfold.weigh_sets if weights else setfold.encode_sets
    (path,) = tmp_path.glob("slide.*")
    with pytest.raises(error, match=message):
        run(model, path, tmp_path / "out.parquet")
    assert list(tmp_path.iterdir()) == [path]


def test_coordinates_of_other_patches(tmp_path, model):
    """Such a slide has features that can be encoded, but nobody knows where they are."""
    slide = draw_slide()
    write_growing(tmp_path / "slide.h5", {"features": slide.features, "coords": slide.coords[:29]})
    refused(tmp_path, model, "'features' has 30, 'coords' has 29", weights=True)


def test_a_batch_of_several_slides(tmp_path, model):
    arrays = {"features": np.ones((2, 30, DIM)), "coords": np.ones((2, 30, 2))}
    write_growing(tmp_path / "slide.h5", arrays)
    refused(tmp_path, model, "expected numbers or plain lists")


def test_a_batch_of_one_without_its_coordinates(tmp_path, model):
    arrays = {"features": np.ones((1, 30, DIM)), "coords": np.ones((29, 2))}
    write_growing(tmp_path / "slide.h5", arrays)
    refused(tmp_path, model, "the model expects 8")


def test_chunks_that_were_never_written(tmp_path, model):
    """A feature extraction that was interrupted after the file had grown."""
    slide = draw_slide()
    for name in ("features", "coords"):
        write_slide(tmp_path, "clam", slide)
        with h5py.File(tmp_path / "slide.h5", "a") as file:
            for each in ("features", "coords"):
                file[each].resize(40, axis=0)
                if each != name:
                    file[each][30:] = 1
        message = f"cannot read '{name}'.*10 of its 40 chunks was never written"
        refused(tmp_path, model, message, error=setfold.FileError, weights=True)


@pytest.mark.parametrize("layout", ["batch of one", "batch with coords"])
def test_a_batch_of_one_that_is_stored_elsewhere(tmp_path, model, layout):
    slide = draw_slide()
    raw = tmp_path.parent / f"{tmp_path.name}.raw"
    raw.write_bytes(slide.features.tobytes())
    write_slide(tmp_path, "batch of one", slide)
    with h5py.File(tmp_path / "slide.h5", "a") as file:
        del file["features"]
        if layout == "batch of one":
            external = [(str(raw), 0, raw.stat().st_size)]
            file.create_dataset("features", (1, 30, DIM), "f4", external=external)
        else:
            there = h5py.VirtualLayout((1, 30, DIM), "f4")
            there[0] = h5py.VirtualSource("/etc/elsewhere.h5", "features", (30, DIM))
            file.create_virtual_dataset("features", there)
    refused(tmp_path, model, "these are not opened", error=setfold.FileError)


@pytest.mark.parametrize("layout", ["clam", "batch of one", "clam pt", "torchmil"])
def test_truncated_slides(tmp_path, model, layout):
    path = write_slide(tmp_path, layout, draw_slide())
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    refused(tmp_path, model, "slide", error=setfold.FileError)


def test_features_that_are_not_finite(tmp_path, model):
    slide = draw_slide(dtype="f2")
    slide.features[17, 3] = np.inf
    write_slide(tmp_path, "trident", slide)
    refused(tmp_path, model, "row 17.*'features' is NaN or infinite", error=setfold.FileError)


def test_pickles_are_not_loaded(tmp_path, model):
    """TRIDENT writes NumPy arrays with torch.save, which are pickles."""
    torch.save(draw_slide().features, tmp_path / "slide.pt")
    refused(tmp_path, model, "objects other than tensors", error=setfold.FileError)


def test_a_slide_without_tissue(tmp_path, model):
    """TRIDENT writes a file without patches."""
    write_slide(tmp_path, "trident", draw_slide(0), "empty")
    write_slide(tmp_path, "trident", draw_slide(), "slide")
    summary = setfold.encode_sets(model, tmp_path, tmp_path / "out.npz")
    assert (summary.sets, summary.elements) == (1, 30)
