"""Sets in shards, in real processes; distributed_jobs.py says what they do there."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import setfold
from setfold.errors import DistributedError, InputError
from setfold.folding.merge import agree, all_merge
from setfold.folding.messages import exchange, report_failure
from tests.examples import TORCHRUN, examples_of
from tests.folding import distributed_jobs as jobs
from tests.small import draw, make

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
ALIVE = jobs.all_cases()
CPU = torch.device("cpu")
WORLD = 3  # processes: a first one, a last one, and one that is neither


def environment(**more):
    return {**os.environ, "OMP_NUM_THREADS": "1", **{k: str(v) for k, v in more.items()}}


def failures_in(folder, world):
    files = [folder / f"{rank}.json" for rank in range(world)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """The failures of all cases in every process, by torchrun."""
    folder = tmp_path_factory.mktemp("jobs")
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD)]
    command = [sys.executable, "-m", *launcher, "-m", jobs.__name__, str(folder), *ALIVE]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return failures_in(folder, WORLD)


@pytest.mark.parametrize("name", ALIVE)
def test_in_every_process(failures, name):
    for found in failures:
        assert found[name] is None, found[name]


@pytest.fixture(scope="module")
def survivors(tmp_path_factory):
    """Processes without a launcher, which would end them all when one dies."""
    folder = tmp_path_factory.mktemp("deaths")
    command = [sys.executable, "-m", jobs.__name__, str(folder), *jobs.DEADLY]
    running = [
        subprocess.Popen(command, cwd=ROOT, env=environment(RANK=rank, WORLD_SIZE=WORLD))
        for rank in range(WORLD)
    ]
    return [process.wait() for process in running], failures_in(folder, WORLD)


def test_processes_die_when_they_should(survivors):
    assert survivors[0] == [0, 7, -signal.SIGKILL]


@pytest.mark.parametrize(("number", "name"), list(enumerate(jobs.DEADLY)))
def test_when_one_dies_the_others_end_with_an_error(survivors, number, name):
    for found in survivors[1][: 2 - number]:
        assert found[name] is None, found[name]


# ---- in one process --------------------------------------------------------------------------


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_one_process_has_the_whole_set():
    model, elements = make(), draw(2, 7, 3)
    state = model.update(model.initial_state(2), elements)
    merged = all_merge(state)
    torch.testing.assert_close(model.readout(merged), model(elements))
    model.readout(merged).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.usefixtures("alone")
def test_one_process_agrees_with_itself():
    assert exchange({"a": [1, None]}, None, CPU) == [{"a": [1, None]}]
    assert agree(3, 2**61, {}, None, CPU) == (3, 2**61)
    with pytest.raises(InputError, match="at least one chunk"):
        agree(None, 0, {}, None, CPU)


@pytest.mark.usefixtures("alone")
def test_the_failure_of_one_process_is_its_own():
    with pytest.raises(OSError, match="disk"), report_failure(None, CPU):
        raise OSError("disk")


@pytest.mark.usefixtures("alone")
def test_a_destroyed_group_is_no_group():
    group = dist.new_group([0])
    dist.destroy_process_group(group)
    with pytest.raises(InputError, match="destroyed"):
        all_merge(make().initial_state(), group)


def test_without_a_group_the_error_says_how_to_get_one():
    state = make().initial_state()
    with pytest.raises(InputError, match=r"torchrun.*init_process_group"):
        all_merge(state)
    with pytest.raises(InputError, match="torchrun"), report_failure(None, CPU):
        raise AssertionError("the body must not run")


def test_a_distributed_error_is_a_runtime_error():
    assert issubclass(DistributedError, (setfold.SetfoldError, RuntimeError))
    assert issubclass(DistributedError, RuntimeError)


# ---- as the documentation says it ------------------------------------------------------------


def printed_by_two(program, folder):
    """What each process of a program prints under torchrun, which gives each its own file."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    files = ["--redirects", "3", "--log-dir", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, *files, str(program)],
        env=environment(PYTHONPATH=ROOT),
        capture_output=True,
        text=True,
    )
    errors = [file.read_text() for file in sorted(folder.rglob("stderr.log"))]
    assert done.returncode == 0, "\n".join([done.stderr, *errors])
    outputs = [list(folder.rglob(f"{rank}/stdout.log")) for rank in range(2)]
    return [file.read_text() for (file,) in outputs]


def printed_by_one(program, monkeypatch, capsys):
    """What a program prints in this process, with the environment that torchrun gives to one."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with torch.random.fork_rng(devices=[]):
        runpy.run_path(str(program))
    return capsys.readouterr().out


def test_the_program_of_the_documentation_learns_the_same_over_any_number_of_processes(
    tmp_path, monkeypatch, capsys
):
    program = tmp_path / "train.py"
    program.write_text(examples_of(ROOT / "docs" / "processes.md")[0].text)
    alone, both = printed_by_one(program, monkeypatch, capsys), printed_by_two(program, tmp_path)
    losses = []
    for text, whose in [(alone, "0 of 1"), *zip(both, ("0 of 2", "1 of 2"), strict=True)]:
        (loss,) = re.findall(rf"^process {whose}: loss (\d+\.\d+)\n$", text)
        losses.append(float(loss))
    assert max(losses) - min(losses) < 1e-5
