"""Training on slides: files are sets, and tables of labels name them."""

from __future__ import annotations

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.feather
import pytest

import setfold
from setfold.learning.labels import read_labels
from tests.examples import run_program
from tests.files.slides import Slide, draw_slide, write_slide


def write_slides(folder, layout, count=24):
    """Every second slide has a patch whose features are large."""
    folder.mkdir()
    for number in range(count):
        slide = draw_slide(patches=20 + number, seed=number, dtype="f2")
        slide.features[number % 20, 0] += 30 * (number % 2)
        write_slide(folder, layout, Slide(slide.features, slide.coords), f"slide_{number}")
    labels = pa.table(
        {
            "case_id": [f"patient_{number // 2}" for number in range(count)],
            "slide_id": [f"slide_{number}" for number in range(count)],
            "label": ["normal", "tumor"] * (count // 2),
        }
    )
    pacsv.write_csv(labels, folder.parent / "labels.csv")


@pytest.mark.parametrize("layout", ["annotated", "clam pt"])
def test_training_on_slides(tmp_path, layout):
    write_slides(tmp_path / "slides", layout)
    options = setfold.TrainOptions(
        target="label",
        labels=tmp_path / "labels.csv",
        task="multiple-instance",
        group="case_id",
        epochs=2,
        folds=1,
    )
    notes: list[str] = []
    out = tmp_path / "model.safetensors"
    result = setfold.train_sets(tmp_path / "slides", out, options, note=notes.append)
    used = "features" if layout == "annotated" else "elements"
    assert notes[0] == f"reading {used} from 24 files"
    if layout == "annotated":  # labels of patches would be a leak
        (line,) = [note for note in notes if "beside" in note]
        assert all(name in line for name in ("coords", "annots", "patch_labels"))
    assert sum(result.sets) == 24
    target, _, data = setfold.evaluate_sets(
        out, tmp_path / "slides", labels=tmp_path / "labels.csv"
    )
    assert (target.labels, len(data)) == (["normal", "tumor"], 24)
    slide = next((tmp_path / "slides").glob("slide_3.*"))
    weighed = setfold.weigh_sets(setfold.load(out), slide, tmp_path / "heat.parquet")
    assert weighed.elements == 23
    assert weighed.kept == (("x", "y") if layout == "annotated" else ())


def test_the_generated_slides(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_program("slides.py", 20)
    for folder, count in (("slides", 20), ("new", 2)):
        files = sorted((tmp_path / folder).iterdir())
        assert len(files) == count
        columns = pacsv.read_csv(f"{folder}.csv").to_pydict()
        assert columns["slide_id"] == [file.stem for file in files]
        for file, label in zip(files, columns["tumour"], strict=True):
            with h5py.File(file) as slide:
                share = slide["lesion"][:].mean()
                assert slide["features"].shape == (len(slide["coords"]), 16)
            assert 0.005 < share < 0.06 if label == "yes" else share == 0
    summary = setfold.encode_sets(setfold.SummaryStatistics(16), "slides/*.h5", "slides.npz")
    assert (summary.sets, summary.features) == (20, ("features",))


SLIDES = ["/data/a.1.h5", "/data/b.h5", "/data/c.h5"]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"case_id": ["p", "p", "q"], "slide_id": ["a.1", "b", "c"]}, SLIDES),
        ({"slide_id": ["a.1", "b", "c"], "case_id": ["b", "b", "c"]}, SLIDES),
        ({"site": ["b", "b", "b"], "slide": ["a.1.h5", "b.h5", "c.h5"]}, SLIDES),
        ({"note": [None, "x\0y", ""], "path": SLIDES}, SLIDES),
        ({"slide": ["b", "c", "d"]}, [*SLIDES[1:], "d"]),
    ],
    ids=["patients first", "patients named like slides", "site", "odd texts", "one is missing"],
)
def test_the_column_that_names_most_files(tmp_path, columns, expected):
    table = pa.table(columns | {"label": np.arange(3)})
    pa.feather.write_feather(table, tmp_path / "labels.arrow")
    found = read_labels(tmp_path / "labels.arrow", "label", (), None, SLIDES)
    assert list(found.values) == expected


@pytest.mark.parametrize(
    ("files", "rows"),
    [
        (["p.1.h5", "p.2.h5"], "case_id,slide_id,label\np,p.1,0\np,p.2,1"),
        (["p.h5", "p.1.h5"], "slide_id,label\np,0\np.1,1"),
        (["p.1.csv.gz", "p.2.csv.gz"], "slide_id,label\np.1,0\np.2,1"),
        (["007.h5", "08.h5"], "slide_id,label\n007,0\n08,1"),
        (["a/p.h5", "b/p.h5"], "slide_id,label\n../a/p.h5,0\n../b/p.h5,1"),
    ],
    ids=["patients", "one name begins another", "two suffixes", "numbers", "relative paths"],
)
def test_the_files_that_a_table_names(tmp_path, files, rows):
    table = tmp_path / "labels" / "table.csv"
    table.parent.mkdir()
    table.write_text(rows)
    sets = [str(tmp_path / name) for name in files]
    found = read_labels(table, "label", (), None, sets)
    assert found.values == dict(zip(sets, (0, 1), strict=True))


def test_names_in_a_dictionary(tmp_path):
    table = pa.table({"slide": pa.array(["a", "b"]).dictionary_encode(), "label": [0, 1]})
    pa.feather.write_feather(table, tmp_path / "labels.arrow")
    found = read_labels(tmp_path / "labels.arrow", "label", (), None, ["/s/a.h5", "/s/b.h5"])
    assert found.values == {"/s/a.h5": 0, "/s/b.h5": 1}


def test_a_name_in_two_folders(tmp_path):
    (tmp_path / "labels.csv").write_text("slide,label\na,0\na,1")
    with pytest.raises(setfold.InputError, match=r"'a' in .* may be /s/a\.h5 or /t/a\.h5"):
        read_labels(tmp_path / "labels.csv", "label", (), None, ["/s/a.h5", "/t/a.h5"])


@pytest.mark.parametrize(
    "first", [["0", "1", "2"], ["0.h5", "2.h5", "1.h5"]], ids=["index", "same"]
)
def test_two_columns_that_name_all_files(tmp_path, first):
    """A number of each row may look like a name."""
    slides, sets = ["0", "2", "1"], [f"/s/{number}.h5" for number in range(3)]
    table = pa.table({"first": first, "slide": slides, "label": [0, 1, 2]})
    pacsv.write_csv(table, tmp_path / "labels.csv")
    if first[1] == "1":
        with pytest.raises(setfold.InputError, match="columns 'first' and 'slide' of"):
            read_labels(tmp_path / "labels.csv", "label", (), None, sets)
    else:
        found = read_labels(tmp_path / "labels.csv", "label", (), None, sets)
        assert [found.values[name] for name in sets] == [0, 2, 1]
