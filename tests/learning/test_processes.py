"""Training over two processes: the result of one, up to rounding; files and messages of the first."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import setfold
from setfold import cli
from setfold.learning import loop, train
from setfold.learning.dataset import collect
from setfold.learning.processes import join_processes
from setfold.learning.sources import Source
from tests.learning.data import make_table
from tests.torchrun import HANG, as_torchrun

pytestmark = pytest.mark.long

ROWS = 12  # elements that are encoded at a time; larger sets are spread over the processes


class Watched(nn.Linear):
    """A linear layer that counts the elements that it sees."""

    _seen = 0

    def forward(self, elements):
        self._seen += len(elements)
        return super().forward(elements)


class Remembers(nn.Module):
    """Subtracts a moving average, which follows the batches."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, values):
        if self.training:
            self.mean.lerp_(values.detach().mean(0), 0.3)
        return values - self.mean


def make_model():
    """A head that draws and remembers, and a parameter without gradient."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Remembers(), nn.Dropout(0.3), nn.Linear(8, 2))
    head.idle = nn.Parameter(torch.ones(2))
    return setfold.DeepSets(Watched(3, 8), 8, "mean", head).double()


def make_sets(seed=0):
    """Sets of a few elements, and some of many; batches that two processes cannot halve."""
    random = np.random.default_rng(seed)
    sizes = [3, 4, 1, 5, 7, 2, 4, 3, 6, 40, 2]
    return [(random.standard_normal((n, 3)) + i % 2, i % 2) for i, n in enumerate(sizes)]


def run(folder, checkpoint=False, epochs=3):
    model, sets, calls = make_model(), make_sets(), []
    with join_processes():
        history = setfold.fit(
            model,
            sets,
            loss=cross_entropy,
            validation=make_sets(1),
            settings=setfold.FitSettings(epochs=epochs, batch_sets=5, batch_rows=ROWS),
            checkpoint=folder / "checkpoint.safetensors" if checkpoint else None,
            callback=lambda now: calls.append(now.step),
        )
    rank = int(os.environ.get("RANK", 0))
    torch.save(model.state_dict(), folder / f"{rank}.pt")
    facts = {"history": history, "called": bool(calls), "seen": model.features._seen}
    (folder / f"{rank}.json").write_text(json.dumps(facts))


def found(folder, rank=0):
    weights = torch.load(folder / f"{rank}.pt", weights_only=True)
    return weights, json.loads((folder / f"{rank}.json").read_text())


def make_folders(tmp_path, *names):
    for name in names:
        (tmp_path / name).mkdir()
    return [tmp_path / name for name in names]


def test_two_processes_train_as_one(tmp_path):
    alone, together = make_folders(tmp_path, "alone", "together")
    run(alone)
    assert as_torchrun(run, together) == [0, 0]
    expected, facts = found(alone)
    shares = []
    for rank in range(2):
        weights, own = found(together, rank)
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-9, atol=1e-12)
        for name in facts["history"]:
            got, wanted = own["history"][name][1:], facts["history"][name][1:]
            assert got == pytest.approx(wanted, rel=1e-9)
        assert own["called"] == (rank == 0)
        shares.append(own["seen"] / facts["seen"])
    assert sum(shares) == pytest.approx(1, abs=0.01)  # each element is seen by one of them
    assert all(0.3 < share < 0.7 for share in shares)
    first, second = found(together, 0)[0], found(together, 1)[0]
    assert all(torch.equal(first[name], second[name]) for name in first)


def kill_at(step, folder):
    loop.SAVE_EVERY = loop.LOOK_EVERY = 0.0
    original = loop.Loop._step

    def fatal(self, batch):
        if self.standing.step == step:
            self.processes.from_first()  # the checkpoint is written
            signal.raise_signal(signal.SIGKILL)
        original(self, batch)

    loop.Loop._step = fatal
    run(folder, checkpoint=True)


def test_killed_and_resumed_two_processes_end_with_the_same_bits(tmp_path):
    whole, parts = make_folders(tmp_path, "whole", "parts")
    assert as_torchrun(run, whole) == [0, 0]
    assert as_torchrun(kill_at, 4, parts) == [-signal.SIGKILL] * 2
    assert as_torchrun(run, parts, True) == [0, 0]
    for rank in range(2):
        (expected, _), (weights, _) = found(whole), found(parts, rank)
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


class Broken(list):
    """Sets, one of which the second process cannot read."""

    lengths = np.array([3] * 8)

    def __getitem__(self, number):
        if os.environ["RANK"] == "1" and number == 5:
            raise OSError("the disk of process 1 is gone")
        return super().__getitem__(number)


def broken_loss(found, wanted):
    if os.environ["RANK"] == "1":
        raise OSError("the disk of process 1 is gone")
    return cross_entropy(found, wanted)


def broken_backward(found, wanted):
    def refuse(gradient):
        if os.environ["RANK"] == "1":
            raise OSError("the disk of process 1 is gone")

    found = found * 1
    found.register_hook(refuse)
    return cross_entropy(found, wanted)


LOSSES = {"sets": cross_entropy, "loss": broken_loss, "backward": broken_backward}


def fail(folder, where):
    sets = [(torch.ones(3, 3), 0) for _ in range(8)]
    sets, loss = Broken(sets) if where == "sets" else sets, LOSSES[where]
    model = setfold.DeepSets(nn.Linear(3, 2), 2, "mean")
    rank = os.environ["RANK"]
    with join_processes():
        try:
            setfold.fit(model, sets, loss=loss)
        except Exception as error:
            (folder / rank).write_text(f"{type(error).__name__}: {error}")


@pytest.mark.parametrize("where", LOSSES)
def test_an_error_in_one_process_ends_all(tmp_path, where):
    assert as_torchrun(fail, tmp_path, where) == [0, 0]
    assert (tmp_path / "1").read_text() == "OSError: the disk of process 1 is gone"
    expected = "DistributedError: process 1 of 2 failed: OSError: the disk of process 1 is gone"
    assert (tmp_path / "0").read_text() == expected


# ---- setfold train -----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    rows, labels = make_table()
    pq.write_table(rows, tmp_path / "rows.parquet")
    pacsv.write_csv(labels, tmp_path / "labels.csv")
    monkeypatch.setattr(train, "MAX_ROWS", 16)  # so that some sets are spread
    monkeypatch.setattr(train, "MIN_ROWS", 1)
    return tmp_path


def train_here(folder, name, **options):
    with join_processes():
        how = {n: options.pop(n) for n in ("resume", "restart", "overwrite") if n in options}
        chosen = setfold.TrainOptions(
            target="wild",
            labels=folder / "labels.csv",
            set="user",
            center=["y"],
            encoder="deep-sets",
            epochs=3,
            folds=1,
            **options,
        )
        result = train.train_sets(folder / "rows.parquet", folder / name, chosen, **how)
    np.save(folder / f"{name}.{os.environ.get('RANK', 0)}.npy", result.search.best.found.scores)


def test_setfold_train_over_two_processes(folder):
    train_here(folder, "alone.safetensors")
    assert as_torchrun(train_here, folder, "together.safetensors") == [0, 0]
    alone, *scores = (
        np.load(folder / name)
        for name in (
            "alone.safetensors.0.npy",
            "together.safetensors.0.npy",
            "together.safetensors.1.npy",
        )
    )
    np.testing.assert_allclose(scores[0], alone, atol=1e-3)
    np.testing.assert_array_equal(scores[0], scores[1])
    assert not list(folder.glob("*.work"))
    one, two = (
        setfold.load(folder / f"{name}.safetensors").state_dict() for name in ("alone", "together")
    )
    assert one.keys() == two.keys()


def train_and_die(folder, name):
    loop.SAVE_EVERY = loop.LOOK_EVERY = 0.0
    original = loop.Loop._step

    def fatal(self, batch):
        if self.standing.step == 3:
            self.processes.from_first()
            signal.raise_signal(signal.SIGKILL)
        original(self, batch)

    loop.Loop._step = fatal
    train_here(folder, name)


def train_on(folder, name):
    train_here(folder, name, resume=True)


def test_setfold_train_resumes_over_two_processes(folder):
    assert as_torchrun(train_here, folder, "whole.safetensors") == [0, 0]
    assert as_torchrun(train_and_die, folder, "parts.safetensors") == [-signal.SIGKILL] * 2
    assert list((folder / "parts.safetensors.work").glob("deep-sets*.safetensors"))
    assert as_torchrun(train_on, folder, "parts.safetensors") == [0, 0]
    whole, parts = (
        setfold.load(folder / f"{name}.safetensors").state_dict() for name in ("whole", "parts")
    )
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def collect_here(folder, skip):
    """Only the first process reads elements."""
    rank = os.environ["RANK"]
    counts = {"a": 2, "b": 3}
    with join_processes() as processes:
        source = Source([folder / "gap.parquet"], "user", skip=skip)
        if rank == "1":
            source.elements = None
        try:
            with processes.together():
                data = collect(
                    source,
                    setfold.Columns([setfold.NumberColumn("x")]),
                    list(counts),
                    counts,
                    np.arange(2),
                    folder=folder,
                    memory=1 << 20,
                    processes=processes,
                )
        except setfold.SetfoldError as error:
            (folder / f"{rank}.txt").write_text(str(error))
            return
        found = [data[number][0].ravel().tolist() for number in range(2)]
        (folder / f"{rank}.txt").write_text(json.dumps([found, source.skipped]))


def test_processes_of_one_machine_share_the_elements(tmp_path):
    x = [1.0, None, 3.0, 4.0, 5.0]
    pq.write_table(pa.table({"user": list("bbaba"), "x": x}), tmp_path / "gap.parquet")
    assert as_torchrun(collect_here, tmp_path, True) == [0, 0]
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.txt").read_text()) == [[[3.0, 5.0], [1.0, 4.0]], 1]
    assert as_torchrun(collect_here, tmp_path, False) == [0, 0]
    assert all("column 'x' is null" in (tmp_path / f"{rank}.txt").read_text() for rank in range(2))


def by_torchrun(folder, *words):
    """What each of two processes prints and reports; torchrun gives each files of its own."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launcher += ["--redirects", "3", "--log-dir", str(folder / "logs")]
    root = Path(setfold.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-m", *launcher, "-m", "setfold.cli", *map(str, words)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    found = {
        name: [file.read_text() for file in sorted((folder / "logs").rglob(f"{name}.log"))]
        for name in ("stdout", "stderr")
    }
    assert done.returncode == 0, "\n".join([done.stderr, *found["stderr"]])
    return found["stdout"], found["stderr"]


def speak(folder, words):
    os.chdir(folder)
    sys.argv = ["setfold", *map(str, words)]
    with Path(f"{os.environ['RANK']}.txt").open("w") as sys.stderr:
        cli.main()


def test_the_command_speaks_once(folder):
    words = ["train", "rows.parquet", "--set", "user", "--labels", "labels.csv", "--epochs", 1]
    words += ["--encoder", "slots", "--target"]
    printed, reported = by_torchrun(folder, *words, "wild", "--out", "m.safetensors")
    assert [text.count("model: m.safetensors") for text in printed] == [1, 0]
    assert [text.count("sets for training") for text in reported] == [1, 0]
    assert json.loads((folder / "m.json").read_text())["best"] == "slots"
    assert as_torchrun(speak, folder, [*words, "nothing", "--out", "n.safetensors"]) == [2, 2]
    first, second = ((folder / f"{rank}.txt").read_text() for rank in range(2))
    assert re.fullmatch(r"reading .*\nsetfold: .*no column 'nothing'.*\n", first)
    assert second == ""
    assert not list(folder.glob("n.*"))
