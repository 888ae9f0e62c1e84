"""The grammar of --features: offsets, factors, exclusions, and names of any kind."""

from __future__ import annotations

import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import setfold
from setfold.files.features import Feature, Selection, format_features, parse_features
from setfold.files.states import read_provenance

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("x", Feature("x")),
        ("a/b * -1e-3", Feature("a/b", -0.001)),
        ("(x-500000)", Feature("x", 1.0, 500000.0)),
        ("(x-500000)*0.01", Feature("x", 0.01, 500000.0)),
        ("( x + 1e-3 ) * 2", Feature("x", 2.0, -0.001)),
        ("x-500000", Feature("x-500000")),  # a name
        ("(jet-1-5)", Feature("jet-1", 1.0, 5.0)),
        ("(pt(GeV)-5)", Feature("pt(GeV)", 1.0, 5.0)),
        ("`x*2`", Feature("x*2")),
        ("(`a,``b`-1)*2", Feature("a,`b", 2.0, 1.0)),
        ("`!x`*2", Feature("!x", 2.0)),
    ],
)
def test_one_feature(text, wanted):
    assert parse_features(text) == Selection((wanted,))
    assert parse_features(["first", text]).features == (Feature("first"), wanted)
    assert parse_features(str(wanted)).features == (wanted,)


def test_exclusions():
    assert parse_features("!a, !`b,c`") == Selection(None, ("a", "b,c"))


@pytest.mark.parametrize(
    "text",
    [
        *("", "x,", ",x", "x*", "x*a", "*2", "x*nan", "x*1e999", "x,x*2", "x,(x-1)", "(x)", "(x-)"),
        *("(x-1", "(x-1)2", "(x-nan)", "(-1)", "!", "!x,y", "!x,!x", "!x*2", "`x", "x`", "``"),
        "a`b`",
    ],
)
def test_what_does_not_follow_the_grammar_is_refused(text):
    with pytest.raises(setfold.InputError, match="expected"):
        parse_features(text)


@given(
    st.lists(
        st.builds(Feature, st.text(min_size=1), NUMBERS, NUMBERS),
        min_size=1,
        max_size=4,
        unique_by=lambda feature: feature.name,
    )
)
def test_formatting_is_the_inverse_of_parsing(features):
    found = parse_features(format_features(features)).features
    assert found == tuple(features)
    assert [math.copysign(1, f.factor) for f in found] == [
        math.copysign(1, f.factor) for f in features
    ]


def encoded(tmp_path, features, model=None, **options):
    rows = pa.table({"user": [1, 1], "x": [500001.0, 500003.0], "y": [2, 4], "w": [9.0, 9.0]})
    pq.write_table(rows, tmp_path / "rows.parquet")
    model, out = model or setfold.Pool(1, "mean"), tmp_path / "out.parquet"
    setfold.encode_sets(
        model, tmp_path / "rows.parquet", out, set="user", features=features, **options
    )
    return pq.read_table(out)["encoding"].to_pylist()


def test_offsets_and_factors_are_applied_in_float64(tmp_path):
    assert encoded(tmp_path, "(x-500000)*0.5") == [[1.0]]
    rows = {"user": [1], "x": [2.0**53], "y": [1], "w": [0.0]}
    frame = pa.table(rows)
    found = setfold.encode_frame(
        setfold.Pool(1, "mean"), frame, set="user", features=f"(x-{2**53 - 1})"
    )
    assert found["encoding"].to_pylist() == [[1.0]]


def test_excluded_columns_are_left_out(tmp_path):
    assert encoded(tmp_path, "!w,!x") == [[3.0]]
    with pytest.raises(setfold.InputError, match="no column 'weight'"):
        encoded(tmp_path, "!weight", overwrite=True)
    with pytest.raises(setfold.InputError, match="except those that are left out"):
        encoded(tmp_path, "!w,!x,!y", overwrite=True)


def test_a_name_that_looks_like_an_offset(tmp_path):
    with pytest.raises(setfold.InputError, match=r"To subtract a number, write \(x-500000\)"):
        encoded(tmp_path, "x-500000")
    frame = pa.table({"user": [1], "x": [5.0], "x-1": [7.0]})
    model = setfold.Pool(1, "mean")
    found = setfold.encode_frame(model, frame, set="user", features="x-1")
    assert found["encoding"].to_pylist() == [[7.0]]


def test_states_keep_the_features_exactly(tmp_path):
    offset, factor = math.nextafter(500000.1, 1), 1 / 3
    feature = Feature("x", factor, offset)
    encoded(tmp_path, str(feature), states=tmp_path / "states.arrow")
    assert read_provenance(tmp_path / "states.arrow")[2].columns.features == (feature,)


def test_states_keep_the_features_that_exclusions_leave(tmp_path):
    encoded(tmp_path, "!w,!x", states=tmp_path / "states.arrow")
    columns = read_provenance(tmp_path / "states.arrow")[2].columns
    assert (columns.named, columns.excluded) == (["y"], ())
