"""The example of folds in Lightning, in one process and in two, compared with whole sets in memory."""

from __future__ import annotations

import re
import runpy

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

import setfold
from tests.examples import ROOT, run_program
from tests.torchrun import as_torchrun

PROGRAM = "train_lightning.py"
ROWS = 40_000  # more than a chunk that fold makes of an array
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sets")


@pytest.fixture(scope="module")
def whole(folder):
    """The weights to which autograd on whole sets in memory leads."""
    names = runpy.run_path(str(ROOT / "docs" / "examples" / PROGRAM))
    sets = names["write_sets"](folder, ROWS)
    with torch.random.fork_rng(devices=[]):
        model = names["new_model"]()
    optimizer = names["new_optimizer"](model)
    batch = torch.cat([torch.from_numpy(np.load(file)) for file, _ in sets])
    labels = torch.cat([label for _, label in sets])
    for _ in range(names["EPOCHS"]):
        for some in torch.arange(len(sets)).split(names["BATCH"]):
            optimizer.zero_grad()
            cross_entropy(model(batch[some]), labels[some]).backward()
            optimizer.step()
    return list(model.parameters())


def assert_trained(folder, whole):
    found = list(setfold.load(folder / "model.safetensors").parameters())
    assert_close(found, whole, rtol=1e-5, atol=1e-6)
    (folder / "model.safetensors").unlink()


def test_one_process_trains_as_if_the_sets_were_in_memory(folder, whole, capsys):
    run_program(PROGRAM, folder, "--rows", ROWS)
    (apart,) = re.findall(
        r"largest difference from the plain loop: (\S+)\n", capsys.readouterr().out
    )
    assert float(apart) < 1e-6
    assert_trained(folder, whole)


@pytest.mark.parametrize("spread", [[], ["--spread"]], ids=["own sets", "parts of every set"])
def test_two_processes_train_the_same_model(folder, whole, spread):
    run = run_program, PROGRAM, folder, "--rows", ROWS, *spread
    assert as_torchrun(*run) == [0, 0]
    assert_trained(folder, whole)
