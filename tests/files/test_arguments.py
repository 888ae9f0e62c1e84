"""Arguments of the wrong type are InputErrors that name the argument, before anything is read."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import setfold
from setfold.files.request import ReadOptions, RunOptions
from tests.files.files import encoder

WRONG = [1j, b"name", object(), [object()], [b"name"]]  # never right
TABLE = pa.table({"event": [1], "x": [1.0], "y": [1.0], "z": [1.0]})
FUNCTIONS = {
    "encode_sets": (encoder(), "in.npy", "out.npz"),
    "merge_states": (["states.arrow"], "out.arrow"),
    "readout_states": ("states.arrow", "out.npz"),
    "partial_states": (encoder(), TABLE),
    "merge_partials": ([TABLE],),
    "read_partials": (encoder(), TABLE),
    "pack_partials": (TABLE,),
    "unpack_partials": (encoder(), TABLE),
}


def arguments():
    for name, given in FUNCTIONS.items():
        function = getattr(setfold, name)
        parameters = inspect.signature(function).parameters
        for place, argument in enumerate(parameters):
            if place < len(given):
                yield name, argument, place
            elif argument != "options":
                yield name, argument, None
        if "options" in parameters:
            options = ReadOptions if name == "encode_sets" else RunOptions
            yield from ((name, option, None) for option in options.__annotations__)


@pytest.mark.parametrize(("name", "argument", "place"), [*arguments()])
def test_an_argument_of_the_wrong_type_is_named(tmp_path, monkeypatch, name, argument, place):
    monkeypatch.chdir(tmp_path)
    for wrong in WRONG:
        given, named = list(FUNCTIONS[name]), {"set": "event"} if name == "partial_states" else {}
        if place is None:
            named[argument] = wrong
        else:
            given[place] = wrong
        with pytest.raises(setfold.InputError, match=f"{name}: {argument} must be"):
            getattr(setfold, name)(*given, **named)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("encode_sets", {"inputs": None}, "inputs must be str or Path or a list of str or Path"),
        ("encode_sets", {"out": None}, "out must be str or Path; got NoneType"),
        ("encode_sets", {"set": 5}, "set must be str or a list of str or None; got int"),
        ("encode_sets", {"features": [5]}, "features must be .*; got list of int"),
        ("encode_sets", {"memory": 2.5}, "memory must be str or int; got float"),
        ("encode_sets", {"memory": True}, "memory must be str or int; got bool"),
        ("encode_sets", {"resume": 1}, "resume must be bool; got int"),
        ("encode_sets", {"progress": 1}, "progress must be a function or None; got int"),
        ("merge_states", {"states": "states.arrow"}, "states must be a list of str or Path; got"),
    ],
    ids=str,
)
def test_common_mistakes(name, changes, message):
    function = getattr(setfold, name)
    given = inspect.signature(function).bind(*FUNCTIONS[name])
    with pytest.raises(setfold.InputError, match=message):
        function(**{**given.arguments, **changes})


def test_paths_and_lists_of_any_kind_are_accepted(tmp_path):
    path = tmp_path / "in.npy"
    np.save(path, np.ones((4, 3), np.float32))
    for inputs in (path, str(path), [path], (str(path), path)):
        for out in (tmp_path / "out.npz", str(tmp_path / "out.npz")):
            summary = setfold.encode_sets(encoder(), inputs, out, overwrite=True)
            assert summary.elements == 4


def test_unknown_arguments_are_type_errors_as_everywhere(tmp_path):
    with pytest.raises(TypeError, match="memmory"):
        setfold.encode_sets(encoder(), "in.npy", "out.npz", memmory="2GB")
    with pytest.raises(TypeError, match="missing"):
        setfold.encode_sets(encoder(), "in.npy")


def test_too_little_memory_is_said_before_anything_is_opened(tmp_path):
    (tmp_path / "in.npy").write_bytes(b"not an array")
    for memory in (-1, 0, 1000, "10MB"):
        with pytest.raises(setfold.InputError, match="of memory is too little"):
            setfold.encode_sets(
                encoder(), tmp_path / "in.npy", Path(tmp_path, "out.npz"), memory=memory
            )
