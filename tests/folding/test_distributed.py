"""Sets in shards, in real processes; distributed_jobs.py says what they do there."""

from __future__ import annotations

import json
import os
import re
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
from tests.examples import examples_of
from tests.folding import distributed_jobs as jobs
from tests.small import draw, make

ROOT = Path(__file__).parents[2]
ALIVE = jobs.all_cases()
CPU = torch.device("cpu")
HANG = 3600  # seconds; ends a launch that hangs, however busy the machine is


def environment(**more):
    return {**os.environ, "OMP_NUM_THREADS": "1", **{k: str(v) for k, v in more.items()}}


def verdicts_in(folder, world):
    files = [folder / f"{rank}.json" for rank in range(world)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]


@pytest.fixture(scope="module", params=[2, 4])
def verdicts(request, tmp_path_factory):
    """What every process says of every case, by torchrun."""
    world, folder = request.param, tmp_path_factory.mktemp("jobs")
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    command = [sys.executable, "-m", *launcher, "-m", jobs.__name__, str(folder), *ALIVE]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=HANG
    )
    assert done.returncode == 0, done.stderr
    return verdicts_in(folder, world)


@pytest.mark.parametrize("name", ALIVE)
def test_in_every_process(verdicts, name):
    for found in verdicts:
        assert found[name]["failure"] is None, found[name]["failure"]
        assert found[name]["seconds"] < jobs.PATIENCE, "it waited for the timeout of the group"


@pytest.fixture(scope="module")
def survivors(tmp_path_factory):
    """Processes without a launcher, which would end them all when one dies."""
    folder, world = tmp_path_factory.mktemp("deaths"), 3
    command = [sys.executable, "-m", jobs.__name__, str(folder), *jobs.DEADLY]
    running = [
        subprocess.Popen(command, cwd=ROOT, env=environment(RANK=rank, WORLD_SIZE=world))
        for rank in range(world)
    ]
    try:
        codes = [process.wait(HANG) for process in running]
    finally:
        for process in running:
            process.kill()
    return codes, verdicts_in(folder, world)


def test_processes_die_as_they_were_told(survivors):
    assert survivors[0] == [0, 7, -signal.SIGKILL]


@pytest.mark.parametrize(("number", "name"), list(enumerate(jobs.DEADLY)))
def test_when_one_dies_the_others_end_with_an_error(survivors, number, name):
    for found in survivors[1][: 2 - number]:
        assert found[name]["failure"] is None, found[name]["failure"]
        assert found[name]["seconds"] < jobs.PATIENCE, "it waited for the timeout of the group"


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


def printed(program, world, folder):
    """What each process of a program prints under torchrun, which gives each its own file."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    files = ["--redirects", "3", "--log-dir", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, *files, str(program)],
        env=environment(PYTHONPATH=ROOT),
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    errors = [file.read_text() for file in sorted(folder.rglob("stderr.log"))]
    assert done.returncode == 0, "\n".join([done.stderr, *errors])
    outputs = [list(folder.rglob(f"{rank}/stdout.log")) for rank in range(world)]
    return [file.read_text() for (file,) in outputs]


def test_the_program_of_the_documentation_learns_the_same_over_any_number_of_processes(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(examples_of(ROOT / "docs" / "processes.md")[0].text)
    losses = set()
    for world in (1, 2):
        for rank, text in enumerate(printed(program, world, tmp_path / str(world))):
            (loss,) = re.findall(rf"^process {rank} of {world}: loss (\d+\.\d+)\n$", text)
            losses.add(float(loss))
    assert max(losses) - min(losses) < 1e-5
