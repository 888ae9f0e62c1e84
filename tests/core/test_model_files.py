from __future__ import annotations

import contextlib
import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import setfold
from setfold.core import persist as files
from tests.small import make

LINEAR = {"class": "torch.nn.Linear", "arguments": {"in_features": 2, "out_features": 2}}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def crafted(path, structure, dtype="float32", tensors=()):
    files.write(path, "model", dict(tensors), {"structure": structure, "dtype": dtype})
    return path


NAMES = ["os.system", "builtins.eval", "eval", "", "torch.load", "subprocess.Popen", "pathlib.Path"]
NAMES += [
    "torch.nn.functional",
    "torch.nn.Parameter",
    "setfold.load",
    "setfold.io",
    "setfold.SetState",
]
NAMES += ["no.such.package.Model", "torch.nn.NoSuchLayer", "setfold.cli.main", ".eval", "os."]


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_names_no_module_is_refused_even_if_allowed(path, name, allowed):
    crafted(path, {"class": name, "arguments": {"command": "exit 3"}})
    with pytest.raises(setfold.DescriptionError):
        setfold.load(path, allow=[name] if allowed else [])


def test_what_is_refused_is_not_even_imported(tmp_path, path, monkeypatch):
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    crafted(path, {"class": "evil.Model", "arguments": {}})
    with pytest.raises(setfold.DescriptionError, match=r"evil\.Model"):
        setfold.load(path, allow=["evil.Other"])


@pytest.mark.parametrize(
    "structure",
    [
        None,
        [LINEAR],
        {},
        {"class": 3},
        {"class": "torch.nn.Linear"},
        {"class": "torch.nn.Linear", "arguments": {"width": 3}},
        {"class": "torch.nn.Linear", "arguments": {"in_features": -1, "out_features": 2}},
        {"class": "torch.nn.Linear", "arguments": {"in_features": "a", "out_features": 2}},
        {"class": "torch.nn.Linear", "children": []},
        {"class": "torch.nn.Sequential", "children": 3},
        {"class": "torch.nn.Sequential", "children": [{"class": "os.system", "arguments": {}}]},
        {"class": "setfold.Pool", "arguments": {"dim_in": 3, "aggregate": "median"}},
        {"class": "setfold.StreamingSetEncoder", "arguments": {}},
        {"class": "setfold.Composition", "arguments": {"encoder": {"modul": LINEAR}}},
        {"class": "setfold.Composition", "arguments": {"encoder": {"module": LINEAR}}},
    ],
    ids=lambda structure: json.dumps(structure)[:60],
)
def test_a_description_of_nothing_that_can_be_built_is_refused(path, structure):
    with pytest.raises(setfold.SetfoldError):
        setfold.load(crafted(path, structure))


@pytest.mark.parametrize("dtype", ["float33", "nn", "load", "int32", 3, None])
def test_a_dtype_that_is_none_is_refused(path, dtype):
    tensors = nn.Linear(2, 2).state_dict()
    with pytest.raises(setfold.SetfoldError):
        setfold.load(crafted(path, LINEAR, dtype, tensors))


def test_weights_that_do_not_fit_are_refused(path):
    for tensors in ({}, {"weight": torch.zeros(3, 3), "bias": torch.zeros(3)}):
        with pytest.raises(setfold.FileError, match="its weights do not fit its description"):
            setfold.load(crafted(path, LINEAR, tensors=tensors))


def test_a_file_cut_short_is_a_file_error(tmp_path, path):
    setfold.save(make(), path)
    content, cut = path.read_bytes(), tmp_path / "cut"
    for length in [*range(0, len(content), 97), len(content) - 1]:
        cut.write_bytes(content[:length])
        with pytest.raises(setfold.FileError, match="truncated"):
            setfold.load(cut)


def test_a_flipped_bit_is_an_error_wherever_it_is(tmp_path, path):
    setfold.save(make(), path)
    content, flipped = path.read_bytes(), tmp_path / "flipped"
    header = 8 + int.from_bytes(content[:8], "little")
    unnoticed = []
    for place in [*range(header), *range(header, len(content), 31)]:
        damaged = bytearray(content)
        damaged[place] ^= 1
        flipped.write_bytes(damaged)
        with contextlib.suppress(setfold.SetfoldError):  # any other error fails the test
            setfold.load(flipped)
            unnoticed.append(place)
    assert not unnoticed, bytes(content[place] for place in unnoticed)


def test_other_files_are_file_errors(tmp_path, path):
    save_file({"weight": torch.zeros(1)}, path)
    with pytest.raises(setfold.FileError, match=r"setfold did not write it.*setfold\.save"):
        setfold.load(path)
    make().initial_state().save(path)
    with pytest.raises(setfold.FileError, match="contains a setfold state; expected a model"):
        setfold.load(path)
    torch.save(make().state_dict(), path)
    with pytest.raises(setfold.FileError, match="not a safetensors file"):
        setfold.load(path)
    with pytest.raises(setfold.FileError, match="does not exist"):
        setfold.load(tmp_path / "none")
    with pytest.raises(setfold.FileError, match="does not exist"):
        setfold.save(make(), tmp_path / "none" / "model")
