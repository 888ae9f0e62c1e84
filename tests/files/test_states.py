"""Saved states: merged, read out, and never counted twice."""

from __future__ import annotations

import pytest

import setfold
from tests.files.files import assert_encodes, encode, encoder, rows, write


def test_states_are_merged_and_read_out(tmp_path, tight):
    table, model = rows(), encoder()
    days = [write(tmp_path / f"day {i}", table[i * 200 :][:200]) for i in range(3)]
    states = [tmp_path / f"{i}.arrow" for i in range(3)]
    for day, path in zip(days, states, strict=True):
        encode(model, day, path.with_suffix(".npz"), states=path)
    setfold.merge_states(states[:2], tmp_path / "two.arrow")
    setfold.merge_states([tmp_path / "two.arrow", states[2]], tmp_path / "all.arrow")
    setfold.readout_states(tmp_path / "all.arrow", tmp_path / "out.parquet")
    assert_encodes(tmp_path / "out.parquet", model, table)
    setfold.merge_states(states[::-1], tmp_path / "other.arrow")
    setfold.readout_states(tmp_path / "other.arrow", tmp_path / "other.parquet", model=model)
    assert_encodes(tmp_path / "other.parquet", model, table)


def test_nothing_is_counted_twice_by_mistake(tmp_path):
    folder, states = write(tmp_path / "in", rows()), tmp_path / "states.arrow"
    encode(encoder(), folder, tmp_path / "out.parquet", states=states)
    with pytest.raises(setfold.InputError, match=r"part-0.*count twice"):
        setfold.merge_states([states, states], tmp_path / "both.arrow")
    assert (
        setfold.merge_states([states, states], tmp_path / "both.arrow", again=True).elements == 1200
    )


def test_inputs_that_have_grown_count_twice_too(tmp_path):
    folder, states = write(tmp_path / "in", rows(), files=1), tmp_path / "states.arrow"
    encode(encoder(), folder, tmp_path / "out.parquet", states=states)
    write(folder, rows(700), files=1)
    encode(encoder(), folder, tmp_path / "more.parquet", states=tmp_path / "more.arrow")
    with pytest.raises(setfold.InputError, match="would count twice"):
        setfold.merge_states([states, tmp_path / "more.arrow"], tmp_path / "both.arrow")


def test_states_of_another_model_are_refused(tmp_path):
    folder = write(tmp_path / "in", rows())
    for number, model in enumerate([encoder(), encoder(aggregate="max")]):
        out, states = tmp_path / f"{number}.parquet", tmp_path / f"{number}.arrow"
        encode(model, folder, out, states=states)
    with pytest.raises(setfold.StateMismatchError, match="different fields"):
        setfold.merge_states(
            [tmp_path / "0.arrow", tmp_path / "1.arrow"], tmp_path / "2.arrow", again=True
        )
    assert not (tmp_path / "2.arrow").exists()


def test_a_file_that_holds_no_states_is_refused(tmp_path):
    encode(encoder(), write(tmp_path / "in", rows()), tmp_path / "out.arrow")
    with pytest.raises(setfold.FileError, match=r"expected states in .*; got encodings"):
        setfold.readout_states(tmp_path / "out.arrow", tmp_path / "again.parquet")
    (tmp_path / "text.arrow").write_text("nothing of the kind")
    with pytest.raises(setfold.FileError, match="setfold did not write it"):
        setfold.readout_states(tmp_path / "text.arrow", tmp_path / "again.parquet")
