"""Saved states: updated, merged, read out, and never counted twice."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest

import setfold
from tests.files.files import assert_encodes, encode, encoder, rows, write


def test_states_are_updated_merged_and_read_out(tmp_path, tight):
    table, model = rows(), encoder()
    days = [write(tmp_path / f"day {i}", table[i * 200 :][:200]) for i in range(3)]
    states = [tmp_path / f"{i}.arrow" for i in range(3)]
    for day, path in zip(days, states, strict=True):
        encode(model, day, path.with_suffix(".npz"), states=path)
    setfold.update_states(states[0], days[1], set="event")
    setfold.merge_states([states[0], states[2]], tmp_path / "all.arrow")
    setfold.readout_states(tmp_path / "all.arrow", tmp_path / "out.parquet")
    assert_encodes(tmp_path / "out.parquet", model, table)
    setfold.update_states(states[1], [days[0], days[2]], out=tmp_path / "other.arrow", set="event")
    setfold.readout_states(tmp_path / "other.arrow", tmp_path / "other.parquet", model=model)
    assert_encodes(tmp_path / "other.parquet", model, table)


def test_nothing_is_counted_twice_by_mistake(tmp_path):
    folder, states = write(tmp_path / "in", rows()), tmp_path / "states.arrow"
    encode(encoder(), folder, tmp_path / "out.parquet", states=states)
    with pytest.raises(
        setfold.InputError, match=r"already contains .*part-0.*count twice \(4 such files\)"
    ):
        setfold.update_states(states, folder, set="event")
    with pytest.raises(setfold.InputError, match="count twice"):
        setfold.merge_states([states, states], tmp_path / "both.arrow")
    assert (
        setfold.merge_states([states, states], tmp_path / "both.arrow", again=True).elements == 1200
    )
    assert setfold.update_states(states, folder, set="event", again=True).elements == 1200


def test_inputs_that_have_grown_count_twice_too(tmp_path):
    folder, states = write(tmp_path / "in", rows(), files=1), tmp_path / "states.arrow"
    encode(encoder(), folder, tmp_path / "out.parquet", states=states)
    write(folder, rows(700), files=1)
    with pytest.raises(setfold.InputError, match="would count twice"):
        setfold.update_states(states, folder, set="event")


def test_states_know_what_their_elements_are_made_of(tmp_path):
    table, states = rows(), tmp_path / "states.arrow"
    days = [write(tmp_path / f"day {i}", table[i * 300 :][:300]) for i in range(2)]
    features = ["f1*0.5", "f0", "f2"]
    encode(encoder(), days[0], tmp_path / "day.npz", states=states, features=features)
    for wrong in ("f0,f1*0.5,f2", "f1,f0,f2"):
        with pytest.raises(setfold.InputError, match=r"from f1\*0\.5,f0,f2, in this order"):
            setfold.update_states(states, days[1], set="event", features=wrong)
    setfold.update_states(states, days[1])
    setfold.readout_states(states, tmp_path / "out.parquet")
    encode(encoder(), days, tmp_path / "once.parquet", features=features)
    found, once = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("out", "once"))
    assert found["count"].equals(once["count"])
    encodings = (np.array(each["encoding"].to_pylist()) for each in (found, once))
    np.testing.assert_allclose(*encodings, rtol=1e-4, atol=1e-6)


def test_states_of_whole_files_take_no_column_that_names_the_set(tmp_path):
    folder, states = write(tmp_path / "in", rows().drop_columns("event")), tmp_path / "s.arrow"
    encode(encoder(), folder, tmp_path / "out.parquet", states=states, set=None)
    with pytest.raises(setfold.InputError, match="each file is one set"):
        setfold.update_states(states, write(tmp_path / "more", rows()), set="event")


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
