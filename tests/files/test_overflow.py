"""Sets that overflow are named by an error, or left out and listed; all others are encoded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import setfold
from setfold.files.partials import merge_partials, partial_states, read_partials
from setfold.files.tables.absorb import absorb_or_mark, find_marks
from setfold.files.tables.table import StateTable
from tests.files.files import encode, encoder, rows, write

LARGE = 3e38  # almost the largest float32


def pool(dtype=torch.float32):
    return setfold.Pool(3, "sum").to(dtype).eval()


def write_rows(path, sets, values, dtype=np.float32):
    column = np.asarray(values, dtype)
    pq.write_table(pa.table({"event": sets, **{f"f{i}": column for i in range(3)}}), path)
    return path


def listed(summary):
    return [json.loads(line) for line in Path(summary.report).read_text().splitlines()]


@pytest.fixture
def overflowing(tmp_path):
    return write_rows(tmp_path / "in.parquet", ["a", "b", "b", "c"], [1, LARGE, LARGE, 2])


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "npz"])
def test_an_encoding_that_is_not_finite_is_an_error(tmp_path, overflowing, suffix):
    out, states = tmp_path / f"o.{suffix}", tmp_path / "s.arrow"
    with pytest.raises(setfold.NonFiniteError, match=r"set b .*encoding is not finite.*--on-error"):
        encode(pool(), overflowing, out, states=states)
    assert not out.exists()
    assert not states.exists()
    summary = encode(pool(), overflowing, out, states=states, skip_errors=True, restart=True)
    assert (summary.sets, summary.elements, summary.skipped) == (2, 2, 1)
    reason = "its encoding is not finite: its elements are too large together"
    assert listed(summary) == [{"file": None, "row": None, "reason": reason, "set": "b"}]


def test_a_readout_leaves_out_what_is_not_finite(tmp_path, overflowing):
    states, out = tmp_path / "s.arrow", tmp_path / "o.parquet"
    encode(pool(), overflowing, tmp_path / "first.npz", states=states, skip_errors=True)
    with pytest.raises(setfold.NonFiniteError, match="the set b"):
        setfold.readout_states(states, out)
    summary = setfold.readout_states(states, out, skip_errors=True)
    assert pq.read_table(out)["set"].to_pylist() == ["a", "c"]
    assert (summary.sets, summary.skipped, listed(summary)[0]["set"]) == (2, 1, "b")
    assert setfold.readout_states(states, out, skip_errors=True, resume=True).skipped == 1
    less = write_rows(tmp_path / "less.parquet", ["b"], [-LARGE])  # the state itself is fine
    encode(pool(), less, tmp_path / "less.npz", states=tmp_path / "less.arrow")
    setfold.merge_states([states, tmp_path / "less.arrow"], tmp_path / "all.arrow")
    assert setfold.readout_states(tmp_path / "all.arrow", tmp_path / "all.parquet").sets == 3


def test_states_that_overflow_when_they_are_merged(tmp_path):
    model, huge = pool(torch.float64), 1.7e308
    for number in range(2):
        path = write_rows(tmp_path / f"{number}.parquet", [7, 8], [huge, 1.0], np.float64)
        encode(model, path, tmp_path / f"{number}.npz", states=tmp_path / f"{number}.arrow")
    states, out = [tmp_path / f"{number}.arrow" for number in range(2)], tmp_path / "m.arrow"
    with pytest.raises(setfold.NonFiniteError, match="the set 7 cannot be written: its state"):
        setfold.merge_states(states, out)
    summary = setfold.merge_states(states, out, skip_errors=True)
    assert (summary.sets, summary.elements, listed(summary)[0]["set"]) == (1, 2, "7")
    setfold.readout_states(out, tmp_path / "m.parquet")
    assert pq.read_table(tmp_path / "m.parquet")["set"].to_pylist() == [8]


@pytest.mark.parametrize("is_tight", [False, True])
@pytest.mark.parametrize("sets", [3, 60], ids=["states", "rows"])
def test_sums_that_overflow_within_a_batch(tmp_path, request, sets, is_tight):
    if is_tight:
        request.getfixturevalue("tight")
    table = rows(300, sets)
    column, events = table["f0"].to_numpy().copy(), table["event"].to_numpy()
    for event in (0, 2):
        column[events == event] = 1e38
    folder = write(tmp_path / "in", table.set_column(1, "f0", pa.array(column)), files=2)
    model, out = encoder(aggregate="sum"), tmp_path / "o.parquet"
    with pytest.raises(setfold.NonFiniteError, match=r"the set 0|the set 2|set 0 |set 2 "):
        encode(model, folder, tmp_path / "not.parquet")
    summary = encode(model, folder, out, skip_errors=True)
    assert sorted(line["set"] for line in listed(summary)) == ["0", "2"]
    good = table.filter(pa.array(~np.isin(events, [0, 2])))
    encode(model, write(tmp_path / "good", good, files=2), tmp_path / "good.parquet")
    found, wanted = pq.read_table(out), pq.read_table(tmp_path / "good.parquet")
    assert found["set"].equals(wanted["set"])
    assert found["count"].equals(wanted["count"])
    encodings = (np.array(each["encoding"].to_pylist()) for each in (found, wanted))
    np.testing.assert_allclose(*encodings, rtol=1e-4, atol=1e-6)


def test_the_mark_of_a_set_stays_when_it_is_merged_spilled_and_resumed(tmp_path, tight):
    table = rows(300, 100)
    events = table["event"].to_numpy()
    column = np.where(events == 5, np.float32(1e38), table["f0"].to_numpy())
    column[np.flatnonzero(events == 5)[0]] = 0  # the first part of the set is fine
    folder = write(tmp_path / "in", table.set_column(1, "f0", pa.array(column)))
    model, stops = encoder(aggregate="sum"), iter([4, 2, 2])

    def stop(progress):
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt

    for number in stops:
        left = number
        with pytest.raises(KeyboardInterrupt):
            encode(model, folder, tmp_path / "o.npz", skip_errors=True, resume=True, progress=stop)
    summary = encode(model, folder, tmp_path / "o.npz", skip_errors=True, resume=True)
    whole = encode(model, folder, tmp_path / "whole.npz", skip_errors=True)
    assert summary.spills > 0
    assert [line["set"] for line in listed(summary)] == ["5"]
    assert listed(whole) == listed(summary)
    assert (tmp_path / "o.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()


def test_marked_sets_are_found_among_others():
    model, names = encoder(aggregate="sum"), pa.array(["x", "z", "w", *100 * ["y"]])
    elements = torch.tensor([1.0, 2.0, 4.0, *100 * [LARGE]])[:, None].expand(-1, 3).contiguous()
    table = absorb_or_mark(model, names, elements)
    assert dict(zip(table.sets.to_pylist(), find_marks(table).tolist(), strict=True)) == {
        "x": False,
        "y": True,
        "z": False,
        "w": False,
    }
    alone = StateTable.of(model, pa.array(["z"]), elements[1:2])
    place = table.sets.to_pylist().index("z")
    torch.testing.assert_close(table.state[place : place + 1].tensors(), alone.state.tensors())


def test_an_encoding_may_be_a_single_number(tmp_path, overflowing):
    model = setfold.Composition(pool(), head=Total())
    encode(model, overflowing, tmp_path / "o.npz", skip_errors=True, head=True)
    with np.load(tmp_path / "o.npz") as arrays:
        assert arrays["encoding"].tolist() == [3, 6]


class Total(torch.nn.Module):
    def forward(self, encodings):
        return encodings.sum(-1)


@pytest.mark.parametrize(
    ("dtype", "value", "what"),
    [(torch.float32, LARGE, "encoding"), (torch.float64, 1.7e308, "state")],
)
def test_other_engines_get_an_error_too(dtype, value, what):
    rows = pa.table({"event": [1, 2], **{name: [value, 0.0] for name in "xyz"}})
    table = partial_states(pool(dtype), rows, set="event")
    with pytest.raises(setfold.NonFiniteError, match=f"the {what} of the set 1 is not finite"):
        read_partials(pool(dtype), merge_partials([table, table]))
