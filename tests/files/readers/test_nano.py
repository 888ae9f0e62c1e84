"""NanoAOD: events as sets of the jets in jagged branches, from a file to weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import awkward as ak
import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
import uproot

import setfold
from setfold.files.inputs import open_reader
from setfold.learning.train import evaluate_sets, train_sets
from tests.examples import run_program

EVENT = ["run", "luminosityBlock", "event"]
FIRST = 2**63  # more than a signed number holds
NUM = 60


def jagged(counts: np.ndarray, values: np.ndarray) -> ak.Array:
    return ak.unflatten(values, counts)


def columns(seed: int = 0) -> dict[str, Any]:
    """Events with jets and muons; every fifth has no jet."""
    random = np.random.default_rng(seed)
    jets, muons = random.integers(1, 6, NUM), random.integers(0, 3, NUM)
    jets[::5] = 0
    size = int(jets.sum())
    jet = {
        "pt": jagged(jets, random.standard_normal(size).astype("f4")),
        "id": jagged(jets, random.integers(0, 9, size).astype("u1")),
        "tight": jagged(jets, random.random(size) < 0.5),
    }
    return {
        "run": np.repeat([1, 2], NUM // 2).astype("u4"),
        "luminosityBlock": np.arange(NUM, dtype="u4") // 7,
        "event": np.arange(NUM, dtype="u8") + FIRST,
        "Jet": ak.zip(jet),
        "Muon": ak.zip({"pt": jagged(muons, random.standard_normal(muons.sum()).astype("f4"))}),
        "MET_pt": random.random(NUM).astype("f4"),
        "HLT_jet": random.random(NUM) < 0.5,
        "PV": random.random((NUM, 2)).astype("f4"),
        "isTop": np.arange(NUM, dtype="i4") % 2,
    }


def kind_of(values: Any) -> Any:
    if isinstance(values, ak.Array):
        return values.type.content
    return values.dtype if values.ndim == 1 else (values.dtype, values.shape[1:])


@pytest.fixture
def nano(tmp_path: Path) -> Path:
    path, data = tmp_path / "nano.root", columns()
    with uproot.recreate(path) as file:
        tree = file.mktree("Events", {name: kind_of(own) for name, own in data.items()})
        for start in range(0, NUM, 25):
            tree.extend({name: own[start : start + 25] for name, own in data.items()})
        file.mktree("Runs", {"run": "u4"}).extend({"run": np.array([1, 2], "u4")})
    return path


def encode(path: Path, features: str, width: int, **options: Any) -> dict[str, list[Any]]:
    out = path.with_name("out.parquet")
    chosen = {"set": EVENT, "features": features, "overwrite": True} | options
    setfold.encode_sets(setfold.Pool(width, "sum"), path, out, **chosen)
    return pq.read_table(out).to_pydict()


def sums(values: ak.Array) -> np.ndarray:
    return np.array([sum(own, 0.0) for own in ak.values_astype(values, "f8").to_list()])


def test_events_are_sets_of_jets(nano: Path) -> None:
    found, data = encode(nano, "Jet_pt,Jet_id,Jet_tight", 3), columns()
    assert found["run"] == data["run"].tolist()
    assert found["event"] == list(range(FIRST, FIRST + NUM))
    assert found["count"] == ak.num(data["Jet"]).to_list()
    assert found["count"].count(0) == NUM // 5
    expected = np.stack([sums(data["Jet"][name]) for name in ("pt", "id", "tight")], 1)
    np.testing.assert_allclose(found["encoding"], expected, atol=1e-5)


def test_what_an_event_has_once_is_the_same_for_its_jets(nano: Path) -> None:
    found, data = encode(nano, "MET_pt,Jet_pt,PV,HLT_jet", 5), columns()
    once = np.column_stack([data["MET_pt"], data["PV"], data["HLT_jet"]])
    once = once * ak.num(data["Jet"]).to_numpy()[:, None]
    expected = np.insert(once, 1, sums(data["Jet"].pt), 1)
    np.testing.assert_allclose(found["encoding"], expected, atol=1e-5)


def test_without_a_set_column_each_event_is_a_set(nano: Path) -> None:
    found = encode(nano, "Jet_pt", 1, set=None)
    assert found["row"] == list(range(NUM))
    assert found["count"] == ak.num(columns()["Jet"]).to_list()


def test_only_branches_that_an_event_has_once_are_rows(nano: Path) -> None:
    found = encode(nano, "MET_pt,PV", 3, set="run")
    assert found["count"] == [NUM // 2, NUM // 2]


@pytest.mark.parametrize("skip", [False, True])
def test_branches_of_two_collections_are_refused(nano: Path, skip: bool) -> None:
    message = (
        r"2 collections: entry \d+ has \d of 'Jet_pt' and \d of 'Muon_pt'.*--features Jet_pt\."
    )
    with pytest.raises(setfold.InputError, match=message):
        encode(nano, "Jet_pt,Muon_pt", 2, skip_errors=skip)
    options = setfold.TrainOptions(target="isTop", set=EVENT, skip_errors=skip)
    with pytest.raises(setfold.InputError, match="2 collections"):
        train_sets(nano, nano.with_name("m.safetensors"), options)


def test_arrays_of_jets(tmp_path: Path) -> None:
    """An element may be a vector: Jet_cov[nJet][2]."""
    cov = ak.to_regular(ak.Array([[[1.0, 2], [3, 4]], [], [[5, 6]]]), axis=2)
    with uproot.recreate(tmp_path / "a.root") as file:
        file.mkrntuple("Events", {"Jet_cov": cov})
    found = encode(tmp_path / "a.root", "Jet_cov", 2, set=None)
    assert found["encoding"] == [[4, 6], [0, 0], [5, 6]]


def test_tuples(nano: Path, tmp_path: Path) -> None:
    """The same from an RNTuple, which keeps no counts."""
    data = columns()
    flat = {f"Jet_{name}": data["Jet"][name] for name in ("pt", "tight")}
    with uproot.recreate(tmp_path / "tuple.root") as file:
        file.mkrntuple("Events", {name: data[name] for name in EVENT} | flat)
    for features in ("Jet_pt", "Jet_pt,Jet_tight"):
        width = features.count(",") + 1
        assert encode(tmp_path / "tuple.root", features, width) == encode(nano, features, width)


def test_types_are_those_that_are_read(nano: Path) -> None:
    with open_reader(nano) as reader:
        for column in reader.columns.values():  # type: ignore[attr-defined]
            assert column.type == column.take(0, 3).type


def test_blocks_are_as_large_as_their_jets(nano: Path) -> None:
    jets = int(ak.num(columns()["Jet"]).to_numpy().sum())
    with open_reader(nano) as reader:
        assert reader.block_bytes(["Jet_pt"]) >= 4 * jets * 25 // NUM
        assert reader.block_bytes(["Jet_pt", "Jet_id"]) >= 5 * jets * 25 // NUM


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_program("jets.py")
    found = encode(tmp_path / "events.root", "Jet_pt,Jet_eta,Jet_phi,Jet_mass", 4)
    with uproot.open("events.root") as file:
        assert found["count"] == file["Events/nJet"].array().to_list()
    assert 0 in found["count"]


def test_train_evaluate_and_weigh(nano: Path) -> None:
    data, said = columns(), list[str]()
    model = nano.with_name("m.safetensors")
    chosen = {"epochs": 1, "encoder": "attention", "folds": 1, "features": ["Jet_pt", "MET_pt"]}
    options = setfold.TrainOptions(target="isTop", set=EVENT, **chosen)
    result = train_sets(nano, model, options, note=said.append)
    assert f"left out {NUM // 5} sets without elements" in said
    assert sum(result.sets) == NUM - NUM // 5

    labels = pa.table({name: data[name] for name in (*EVENT, "isTop")})
    pacsv.write_csv(labels, nano.with_name("labels.csv"))
    results = [
        evaluate_sets(model, nano, labels=table, set=EVENT)
        for table in (None, nano.with_name("labels.csv"))
    ]
    assert np.array_equal(results[0][1].scores, results[1][1].scores)
    assert len(results[0][2]) == NUM - NUM // 5

    out = nano.with_name("weights.parquet")
    loaded = setfold.load(model)
    setfold.weigh_sets(loaded, nano, out, set=EVENT, keep=["Jet_pt", "PV"])
    found = pq.read_table(out)
    np.testing.assert_array_equal(found["Jet_pt"], ak.flatten(data["Jet"].pt).to_numpy())
    owners = np.repeat(np.arange(NUM), ak.num(data["Jet"]).to_numpy())
    assert found["row"].to_pylist() == owners.tolist()
    np.testing.assert_array_equal(np.stack(found["PV"].to_pylist()), data["PV"][owners])
    with pytest.raises(setfold.InputError, match="are of 2 collections"):
        setfold.weigh_sets(loaded, nano, out, set=EVENT, keep=["Muon_pt"], overwrite=True)
