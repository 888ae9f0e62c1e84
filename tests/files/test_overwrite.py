"""Existing files are kept: outputs without overwrite, inputs always, complete results on resume."""

from __future__ import annotations

import os
import shutil

import pytest

import setfold
from setfold.files import run
from setfold.files.results import read_result
from tests.files.files import assert_encodes, encode, encoder, interrupt, rows, stopping, write


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "in", rows(120, 9), files=2)


@pytest.fixture
def states(tmp_path, folder):
    encode(encoder(), folder, tmp_path / "of states.npz", states=tmp_path / "s.arrow")
    return tmp_path / "s.arrow"


def requests(tmp_path, folder, states):
    """One request of each kind, as functions that take options."""
    new = tmp_path / "new"
    new.mkdir()
    return {
        "encode": lambda **o: encode(encoder(), folder, new / "o.parquet", **o),
        "npz": lambda **o: encode(encoder(), folder, new / "o.npz", **o),
        "states": lambda **o: encode(
            encoder(), folder, new / "o.arrow", states=new / "s.arrow", **o
        ),
        "merge": lambda **o: setfold.merge_states([states], new / "s.arrow", **o),
        "readout": lambda **o: setfold.readout_states(states, new / "o.npz", **o),
    }


KINDS = ["encode", "npz", "states", "merge", "readout"]


def contents(folder):
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


@pytest.mark.parametrize("kind", KINDS)
def test_what_exists_is_replaced_only_on_request(tmp_path, folder, states, kind):
    request = requests(tmp_path, folder, states)[kind]
    wanted = request()
    before = contents(tmp_path / "new")
    for name in before:
        foreign = tmp_path / "new" / name
        foreign.write_text("of great value")
        for others in before.keys() - {name}:
            (tmp_path / "new" / others).unlink(missing_ok=True)
        with pytest.raises(setfold.InputError, match=rf"{name} exists\. .*--overwrite.*--resume"):
            request()
        with pytest.raises(setfold.InputError, match=rf"{name} exists, but .*--overwrite"):
            request(resume=True)
        with pytest.raises(setfold.InputError, match=rf"{name} exists"):
            request(restart=True)
        assert foreign.read_text() == "of great value"
    assert request(overwrite=True).elements == wanted.elements
    found = contents(tmp_path / "new")
    assert {name: content for name, (content, _) in found.items()} == {
        name: content for name, (content, _) in before.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_complete_result_is_kept_on_resume(tmp_path, folder, states, kind):
    request = requests(tmp_path, folder, states)[kind]
    first = request()
    before = contents(tmp_path / "new")
    again = request(resume=True)
    assert contents(tmp_path / "new") == before
    assert (again.was_complete, first.was_complete) == (True, False)
    assert (again.sets, again.elements, again.skipped, again.out, again.bytes_read) == (
        first.sets,
        first.elements,
        first.skipped,
        first.out,
        first.bytes_read,
    )
    with pytest.raises(setfold.InputError, match=r"exists, but it is not the result .*--overwrite"):
        request(resume=True, memory="1.5GB")
    assert contents(tmp_path / "new") == before
    assert not request(resume=True, memory="1.5GB", overwrite=True).was_complete


def test_results_differ_by_everything_that_counts(tmp_path, folder, states):
    runs = requests(tmp_path, folder, states)
    found = set()

    def note(name, summary):
        found.add(read_result(tmp_path / "new" / name))
        assert summary.sets

    note("o.parquet", runs["encode"]())
    note("o.parquet", runs["encode"](overwrite=True))
    assert len(found) == 1
    note("o.parquet", runs["encode"](overwrite=True, features="f2,f1,f0"))
    note("o.parquet", runs["encode"](overwrite=True, skip_errors=True))
    note(
        "o.parquet",
        encode(encoder(slots="learned"), folder, tmp_path / "new/o.parquet", overwrite=True),
    )
    note("o.npz", runs["readout"]())
    note("s.arrow", runs["merge"]())
    note("s.arrow", runs["states"](overwrite=True))
    os.utime(folder / "part-0.parquet", ns=(0, 0))
    note("o.parquet", runs["encode"](overwrite=True))
    assert len(found) == 8
    assert None not in found


def test_a_lost_output_is_computed_again(tmp_path, folder, states):
    request = requests(tmp_path, folder, states)["states"]
    request()
    before = contents(tmp_path / "new")
    (tmp_path / "new" / "s.arrow").unlink()
    assert not request(resume=True).was_complete
    assert {name: each[0] for name, each in contents(tmp_path / "new").items()} == {
        name: each[0] for name, each in before.items()
    }


def test_the_list_of_what_was_skipped_belongs_to_the_result(tmp_path, folder):
    (folder / "part-9.parquet").write_bytes(b"PAR1")
    first = encode(encoder(), folder, tmp_path / "o.npz", skip_errors=True)
    again = encode(encoder(), folder, tmp_path / "o.npz", skip_errors=True, resume=True)
    assert (
        (again.skipped, again.report)
        == (first.skipped, first.report)
        == (
            1,
            f"{tmp_path / 'o.npz'}.skipped.jsonl",
        )
    )


def test_a_complete_result_among_the_inputs(tmp_path, folder):
    out = folder / "o.parquet"
    encode(encoder(), folder, out)
    before = out.read_bytes()
    assert encode(encoder(), folder, out, resume=True).was_complete
    shutil.copy(folder / "part-0.parquet", folder / "part-2.parquet")
    for options in ({"resume": True}, {"resume": True, "overwrite": True}):
        with pytest.raises(setfold.InputError, match=r"o\.parquet is an input"):
            encode(encoder(), folder, out, **options)
    assert out.read_bytes() == before


def test_states_are_not_replaced_by_their_own_encodings(tmp_path, folder, states):
    before = states.read_bytes()
    link = tmp_path / "link.arrow"
    link.symlink_to(states)
    attempts = [
        lambda **o: setfold.readout_states(states, states, **o),
        lambda **o: setfold.readout_states(states, link, **o),
        lambda **o: setfold.readout_states(link, states, **o),
        lambda **o: setfold.merge_states([states], states, **o),
    ]
    for attempt in attempts:
        for options in ({}, {"overwrite": True}, {"resume": True}):
            with pytest.raises(setfold.InputError, match=r"is an input|has no column"):
                attempt(**options)
    assert states.read_bytes() == before


def test_collected_states_are_not_replaced_by_those_of_another_run(tmp_path, folder, states):
    before = states.read_bytes()
    with pytest.raises(setfold.InputError, match=r"s\.arrow exists"):
        encode(encoder(), folder, tmp_path / "other.npz", states=states)
    assert states.read_bytes() == before
    assert not (tmp_path / "other.npz").exists()


def test_unusable_inputs_are_not_replaced_either(tmp_path, folder):
    (folder / "notes.parquet").write_text("of great value")
    with pytest.raises(setfold.InputError, match="is an input"):
        encode(encoder(), folder, folder / "notes.parquet", skip_errors=True, overwrite=True)
    assert (folder / "notes.parquet").read_text() == "of great value"


# ---- interrupted runs --------------------------------------------------------------------------


def test_permission_to_overwrite_is_given_once(tmp_path, tight, monkeypatch):
    folder, out = write(tmp_path / "in", rows()), tmp_path / "o.parquet"
    encode(encoder(), folder, out, features="f2,f1,f0")
    interrupt(monkeypatch, encoder(), folder, out, overwrite=True)
    encode(encoder(), folder, out, resume=True)
    assert_encodes(out, encoder(), rows())


def test_a_file_that_appears_during_a_run_is_kept(tmp_path, tight, monkeypatch):
    folder, out = write(tmp_path / "in", rows()), tmp_path / "o.parquet"
    interrupt(monkeypatch, encoder(), folder, out)
    out.write_text("of great value")
    with pytest.raises(setfold.InputError, match="exists, but"):
        encode(encoder(), folder, out, resume=True)
    with pytest.raises(setfold.InputError, match="exists, but"):
        encode(
            encoder(),
            folder,
            tmp_path / "p.parquet",
            progress=lambda _: (tmp_path / "p.parquet").write_text("of great value"),
        )
    for path in (out, tmp_path / "p.parquet"):
        assert path.read_text() == "of great value"
        encode(encoder(), folder, path, resume=True, overwrite=True)
        assert_encodes(path, encoder(), rows())
    assert not list(tmp_path.glob("*.work"))


def test_an_output_that_is_lost_before_the_end_is_noticed(tmp_path, folder, monkeypatch):
    out = tmp_path / "o.parquet"
    with stopping(monkeypatch, run, "publish_outputs", 1, after=True):
        encode(encoder(), folder, out)
    out.unlink()
    with pytest.raises(setfold.FileError, match=r"o\.parquet was complete, but .*--restart"):
        encode(encoder(), folder, out, resume=True)
    encode(encoder(), folder, out, restart=True)
    assert out.exists()
