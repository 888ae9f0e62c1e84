"""ROOT files of several trees, as in particle physics: file.root:tree."""

from __future__ import annotations

from pathlib import Path

import awkward as ak
import numpy as np
import pyarrow.parquet as pq
import pytest
import uproot

import setfold
from setfold.files.inputs import find_inputs, open_reader

JETS = [[1.0, 2.0], [], [3.0, 4.0, 5.0]]


@pytest.fixture
def nano(tmp_path: Path) -> Path:
    """A file like NanoAOD: events with lists of jets, and other trees."""
    path = tmp_path / "nano.root"
    with uproot.recreate(path) as file:
        jets = ak.values_astype(ak.Array(JETS), "f4")
        events = {"run": np.array([1, 1, 2]), "Jet_pt": jets, "Jet_eta": -jets}
        file.mktree("Events", {"run": "i8", "Jet_pt": "var * float32", "Jet_eta": "var * float32"})
        file["Events"].extend(events)
        file.mktree("Runs", {"run": "i8"}).extend({"run": np.array([1, 2])})
        file.mktree("folder/More", {"x": "f8"}).extend({"x": np.array([7.0])})
    return path


def test_one_tree(nano: Path) -> None:
    with open_reader(Path(f"{nano}:Events")) as reader:
        assert set(reader.schema.names) >= {"run", "Jet_pt", "Jet_eta"}
        assert not [name for name in reader.schema.names if "/" in name]
        assert reader.num_rows == 3
    with open_reader(Path(f"{nano}:folder/More")) as reader:
        assert reader.schema.names == ["x"]
    with open_reader(nano) as reader:
        assert set(reader.schema.names) >= {"run", "Jet_pt", "Jet_eta"}
        assert not [name for name in reader.schema.names if "/" in name]


def test_all_trees_if_none_holds_events(tmp_path: Path) -> None:
    with uproot.recreate(tmp_path / "a.root") as file:
        file.mktree("A", {"x": "f8"}).extend({"x": np.array([7.0])})
        file.mktree("folder/B", {"x": "f8"}).extend({"x": np.array([7.0])})
    with open_reader(tmp_path / "a.root") as reader:
        assert reader.schema.names == ["A/x", "folder/B/x"]


def test_trees_and_branches_that_are_missing(nano: Path) -> None:
    with pytest.raises(setfold.InputError, match=r"no tree 'Event'\. Did you mean 'Events'"):
        open_reader(Path(f"{nano}:Event"))
    options = {"explode": True, "set": "run"}
    with pytest.raises(setfold.InputError, match=r"'jet'.*mean 'Jet_pt' or 'Jet_eta'"):
        setfold.encode_sets(
            setfold.Pool(1), f"{nano}:Events", nano.with_name("o.npz"), features="jet", **options
        )


def test_sets_of_a_tree(nano: Path) -> None:
    model, out = setfold.Pool(2, "sum"), nano.with_name("out.parquet")
    options = {"features": "Jet_pt,Jet_eta", "explode": True}
    setfold.encode_sets(model, f"{nano.parent}/*.root:Events", out, set="run", **options)
    found = pq.read_table(out)
    assert found["set"].to_pylist() == [1, 2]
    assert found["encoding"].to_pylist() == [[3.0, -3.0], [12.0, -12.0]]


def test_inputs_are_recognized_when_they_are_repeated(nano: Path) -> None:
    states, name = nano.with_name("s.arrow"), f"{nano}:folder/More"
    setfold.encode_sets(
        setfold.Pool(1, "sum"), name, nano.with_name("out.npz"), states=states, root=nano.parent
    )
    assert np.load(nano.with_name("out.npz"))["set"].tolist() == ["nano.root:folder/More"]
    with pytest.raises(setfold.InputError, match="count twice"):
        setfold.merge_states([states, states], nano.with_name("both.arrow"))


def test_names(nano: Path) -> None:
    found = find_inputs([f"{nano}:Events", f"{nano}:Events", f"{nano}:Runs"])
    assert [each.path.name for each in found] == ["nano.root:Events", "nano.root:Runs"]
    with pytest.raises(setfold.InputError, match=r"absent\.root does not exist\."):
        find_inputs([f"{nano.parent}/absent.root:Events"])
    np.save(nano.with_name("a.npy"), np.zeros(3))
    with pytest.raises(setfold.InputError, match="does not exist"):
        find_inputs([f"{nano.parent}/a.npy:Events"])
    literal = nano.with_name("b.root:x.npy")
    np.save(literal, np.zeros(3))
    assert [each.path for each in find_inputs([literal])] == [literal]
