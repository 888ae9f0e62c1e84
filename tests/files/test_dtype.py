"""Encoding in another dtype than that of the model, and states that keep it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import setfold
from setfold import cli

FAR = np.array([6e6, 5e5, 300.0])  # projected coordinates of a scan, in metres


@pytest.fixture(scope="module")
def model():
    """Its first layer subtracts the origin, as trained networks learn to do."""
    torch.manual_seed(0)
    features = nn.Linear(3, 8)
    with torch.no_grad():
        features.bias.copy_(-(features.weight.double() @ torch.from_numpy(FAR)))
    return setfold.DeepSets(features, 8).eval()


@pytest.fixture
def days(tmp_path):
    generator = np.random.default_rng(0)
    for day in ("monday", "tuesday"):
        np.save(tmp_path / f"{day}.npy", FAR + generator.uniform(0, 100, (200, 3)))
    return [tmp_path / "monday.npy", tmp_path / "tuesday.npy"]


def encodings(path):
    return np.load(path)["encoding"].astype(np.float64)


def exact(model, path):
    weight, bias = (part.detach().double().numpy() for part in model.features.parameters())
    return (np.load(path) @ weight.T + bias).mean(0)


def relative_error(found, wanted):
    return np.abs(found - wanted).max() / np.abs(wanted).max()


def test_float64_keeps_what_float32_loses(tmp_path, model, days):
    wanted = np.stack([exact(model, day) for day in days])
    errors = {}
    for dtype in ("float32", "float64"):
        setfold.encode_sets(model, days, tmp_path / f"{dtype}.npz", dtype=dtype)
        errors[dtype] = relative_error(encodings(tmp_path / f"{dtype}.npz"), wanted)
    assert errors["float64"] < 1e-12 < 1e-8 < errors["float32"]
    assert model.features.weight.dtype == torch.float32


def test_states_are_continued_in_their_own_dtype(tmp_path, model, days):
    states, both = tmp_path / "states.arrow", tmp_path / "both.npz"
    setfold.encode_sets(model, days[0], tmp_path / "out.npz", states=states, dtype="float64")
    other = tmp_path / "other.arrow"
    setfold.encode_sets(model, days[1], tmp_path / "o.npz", states=other, dtype="float64")
    setfold.merge_states([states, other], tmp_path / "both.arrow")
    wanted = np.stack([exact(model, day) for day in days])
    for given in (None, model):  # a model in float32 has the weights of the states, too
        setfold.readout_states(tmp_path / "both.arrow", both, model=given, overwrite=True)
        assert np.load(both)["encoding"].dtype == np.float64
        assert relative_error(encodings(both), wanted) < 1e-12
    setfold.merge_states([states, other], tmp_path / "again.arrow", model=model)
    setfold.readout_states(tmp_path / "again.arrow", both, overwrite=True)
    assert relative_error(encodings(both), wanted) < 1e-12


def test_states_of_different_dtypes_are_not_merged(tmp_path, model, days):
    paths = [tmp_path / "single.arrow", tmp_path / "double.arrow"]
    for path, day, dtype in zip(paths, days, (None, "float64"), strict=True):
        out = path.with_suffix(".npz")
        setfold.encode_sets(model, day, out, states=path, dtype=dtype)
    message = r"single\.arrow was computed in float32, .*double\.arrow in float64.*--dtype"
    with pytest.raises(setfold.StateMismatchError, match=message):
        setfold.merge_states(paths, tmp_path / "all.arrow")


@pytest.mark.parametrize("dtype", ["float128", "int32", "", 64, torch.float64])
def test_a_dtype_is_one_that_models_can_have(tmp_path, model, days, dtype):
    with pytest.raises(setfold.InputError, match=r"dtype must be (one of 'float64'|str)"):
        setfold.encode_sets(model, days, tmp_path / "out.npz", dtype=dtype)


def test_a_dtype_that_cannot_be_stored_is_refused_before_anything_is_read(tmp_path, model, days):
    other, out = setfold.Pool(3).bfloat16(), tmp_path / "out.npz"
    with pytest.raises(setfold.InputError, match=r"bfloat16.*--dtype float32"):
        setfold.encode_sets(other, days, out)
    setfold.encode_sets(other, days, out, dtype="float32")
    assert np.load(out)["encoding"].dtype == np.float32


def test_a_run_is_resumed_in_the_dtype_in_which_it_began(tmp_path, model, days):
    def stop(progress):
        raise KeyboardInterrupt

    out = tmp_path / "out.npz"
    with pytest.raises(KeyboardInterrupt):
        setfold.encode_sets(model, days, out, dtype="float64", save_every=0, progress=stop)
    with pytest.raises(setfold.InputError, match="dtype"):
        setfold.encode_sets(model, days, out, resume=True)
    setfold.encode_sets(model, days, out, resume=True, dtype="float64")
    assert np.load(out)["encoding"].dtype == np.float64


def test_the_command_line_takes_a_dtype(tmp_path, model, days):
    setfold.save(model, tmp_path / "model.safetensors")
    command = ["encode", tmp_path / "model.safetensors", *days, "--out", tmp_path / "out.npz"]
    command += ["--dtype", "float64", "--json"]
    for arguments in ([*command, "--dry-run"], command):
        result = CliRunner().invoke(cli.app, list(map(str, arguments)), catch_exceptions=False)
        assert result.exit_code == 0
        assert json.loads(result.stdout)
    wanted = np.stack([exact(model, day) for day in days])
    assert relative_error(encodings(tmp_path / "out.npz"), wanted) < 1e-12
