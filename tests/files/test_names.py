"""Set ids that are paths: the same for a file wherever and however its path is written."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import setfold
from setfold.errors import InputError
from setfold.files.inputs import find_inputs, name_of
from setfold.files.states import read_provenance
from tests.files.files import encoder


def write(path, size=5, seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, np.random.default_rng(seed).standard_normal((size, 3), dtype=np.float32))
    return path


def encode(inputs, out, **options):
    return setfold.encode_sets(encoder(), inputs, out, **options)


def sets_in(path):
    with np.load(path) as arrays:
        return dict(zip(arrays["set"].tolist(), arrays["count"].tolist(), strict=True))


@pytest.fixture
def sites(tmp_path):
    """Two folders with files of the same names."""
    for number, site in enumerate(("a", "b")):
        write(tmp_path / site / "scan.npy", 5 + number)
    return tmp_path


def test_files_of_the_same_name_in_two_folders_are_two_sets(sites, monkeypatch):
    for site in ("a", "b"):
        monkeypatch.chdir(sites / site)
        encode("scan.npy", "o.npz", states="s.arrow")
    setfold.merge_states([sites / "a/s.arrow", sites / "b/s.arrow"], sites / "all.arrow")
    setfold.readout_states(sites / "all.arrow", sites / "all.npz")
    assert sets_in(sites / "all.npz") == {f"{sites}/a/scan.npy": 5, f"{sites}/b/scan.npy": 6}


def test_a_path_may_be_written_in_several_ways(sites, monkeypatch):
    monkeypatch.chdir(sites / "a")
    expected = {f"{sites}/a/scan.npy": 5}
    ways = ["scan.npy", "./scan.npy", "../a/scan.npy", "*.npy", ".", str(sites / "a" / "scan.npy")]
    for number, way in enumerate(ways):
        out = sites / f"{number}.npz"
        encode(way, out)
        assert sets_in(out) == expected
        assert setfold.encode_sets(encoder(), ways[0], out, resume=True).was_complete


def test_with_a_root_paths_are_relative_to_it(sites, monkeypatch):
    monkeypatch.chdir(sites / "a")
    for number, root in enumerate([sites, "..", "../b/..", f"{sites}/"]):
        encode(["scan.npy", sites / "b"], sites / f"{number}.npz", root=root)
        assert sets_in(sites / f"{number}.npz") == {"a/scan.npy": 5, "b/scan.npy": 6}
    encode("scan.npy", sites / "one.npz", root=".")
    assert sets_in(sites / "one.npz") == {"scan.npy": 5}


def test_files_outside_of_the_root_are_refused(sites):
    (sites / "ab").mkdir()
    for root in (sites / "b", sites / "ab", sites / "nowhere"):
        with pytest.raises(InputError, match=r"a/scan\.npy is outside of the root"):
            encode(sites / "a" / "scan.npy", sites / "o.npz", root=root)


def test_a_root_and_a_column_of_set_ids_exclude_each_other(sites):
    with pytest.raises(InputError, match="Omit --root or --set"):
        encode(sites / "a", sites / "o.npz", root=sites, set="event")


def test_links_are_kept(sites, monkeypatch):
    (sites / "c").symlink_to(sites / "b")
    (sites / "a" / "link.npy").symlink_to(sites / "b" / "scan.npy")
    assert name_of(sites / "c" / "scan.npy") == f"{sites}/c/scan.npy"
    assert name_of(sites / "a" / "link.npy", sites) == "a/link.npy"
    monkeypatch.chdir(sites / "c")  # where relative paths are those of the target
    assert name_of("scan.npy", sites / "c") == "scan.npy"
    assert name_of("scan.npy", sites / "b") == "scan.npy"


def test_a_link_and_two_dots_do_not_lead_to_another_file(sites, monkeypatch):
    (sites / "a" / "deep").symlink_to(write(sites / "b" / "inner" / "x.npy").parent)
    monkeypatch.chdir(sites / "a")
    assert name_of("deep/../scan.npy") == f"{sites}/b/scan.npy"  # not that of a, as it is written
    encode(["scan.npy", "deep/../scan.npy"], sites / "o.npz")
    assert sets_in(sites / "o.npz") == {f"{sites}/a/scan.npy": 5, f"{sites}/b/scan.npy": 6}


def test_names_that_are_no_text_are_refused(tmp_path):
    path = write(tmp_path / "x.npy").rename(f"{tmp_path}/\udcff.npy")
    with pytest.raises(InputError, match="not valid Unicode"):
        encode(path, tmp_path / "o.npz")


def write_lists(path):
    lists = pa.array([[0.1, 0.2], [0.3]], pa.list_(pa.float32()))
    pq.write_table(pa.table({f"f{i}": lists for i in range(3)}), path)


def test_rows_that_are_sets_follow_the_same_rule(tmp_path, monkeypatch):
    write_lists(tmp_path / "in.parquet")
    monkeypatch.chdir(tmp_path)
    for number, (options, prefix) in enumerate([({}, f"{tmp_path}/"), ({"root": "."}, "")]):
        encode("in.parquet", f"{number}.npz", explode=True, **options)
        found = np.load(f"{number}.npz")
        assert found["file"].tolist() == [f"{prefix}in.parquet"] * 2
        assert found["row"].tolist() == [0, 1]
        assert found["count"].tolist() == [2, 1]


# ---- states remember ---------------------------------------------------------------------------


def test_states_remember_how_sets_are_named(sites):
    states = sites / "s.arrow"
    encode(sites / "a", sites / "o.npz", states=states, root=sites)
    assert read_provenance(states)[2].columns.root == str(sites)
    moved = write(sites / "moved" / "c" / "scan.npy", 7)
    encode(moved, sites / "m.npz", states=sites / "m.arrow", root=sites / "moved")
    setfold.merge_states([states, sites / "m.arrow"], sites / "both.arrow")
    setfold.readout_states(sites / "both.arrow", sites / "all.npz")
    assert sets_in(sites / "all.npz") == {"a/scan.npy": 5, "c/scan.npy": 7}


def test_names_of_two_kinds_are_not_mixed(sites):
    write_lists(sites / "lists.parquet")
    options = {"absolute": {}, "relative": {"root": sites}}
    for name, chosen in options.items():
        encode(sites / "a", sites / f"{name}.npz", states=sites / f"{name}.arrow", **chosen)
        rows = {"explode": True, "states": sites / f"{name}-rows.arrow", **chosen}
        encode(sites / "lists.parquet", sites / f"{name}-rows.npz", **rows)
    for other in ("relative", "absolute-rows"):
        with pytest.raises(InputError, match=r"cannot merge .*: the set ids .* absolute paths, th"):
            setfold.merge_states(
                [sites / "absolute.arrow", sites / f"{other}.arrow"], sites / "m.arrow", again=True
            )


# ---- partitions and duplicates -----------------------------------------------------------------


def test_partitions_do_not_depend_on_the_current_folder(tmp_path, monkeypatch):
    write(tmp_path / "day=1" / "scan.npy")
    monkeypatch.chdir(tmp_path / "day=1")
    (found,) = find_inputs(["scan.npy"], keys=["day"])
    assert (found.partition, found.name) == ({"day": "1"}, "")
    encode("scan.npy", tmp_path / "o.npz", set="day")
    assert sets_in(tmp_path / "o.npz") == {"1": 5}


def test_a_file_in_two_partitions_belongs_to_no_single_set(tmp_path):
    write(tmp_path / "day=1" / "scan.npy")
    (tmp_path / "day=2").mkdir()
    (tmp_path / "day=2" / "scan.npy").symlink_to(tmp_path / "day=1" / "scan.npy")
    with pytest.raises(InputError, match=r"are the same file, but .*different sets \(day\)"):
        encode(tmp_path, tmp_path / "o.npz", set="day")
    encode(tmp_path, tmp_path / "o.npz")  # here the folders do not matter
    assert sets_in(tmp_path / "o.npz") == {f"{tmp_path}/day=1/scan.npy": 5}
