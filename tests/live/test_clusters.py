"""Spark and Ray write to a store as docs/live.md shows, and are killed meanwhile.

Spark needs Java 17 or later, and the extra `spark`, which `make stress` installs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from setfold import live
from tests.examples import ROOT, examples_of
from tests.live.events import assert_holds, events, slots

pytestmark = pytest.mark.skipif(
    not os.environ.get("SETFOLD_STRESS"),
    reason="starting Spark and Ray takes half a minute; set SETFOLD_STRESS=1 to run",
)
FILES = 4
KILLED = """
import os, pathlib, signal
from setfold.live import LiveSets

original = LiveSets.update

def update(self, rows, **options):
    found = original(self, rows, **options)
    mark = pathlib.Path("killed")
    if options["batch"][1] == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)  # applied, and Spark does not know it
    return found

LiveSets.update = update
"""
WAIT = """
spark.streams.active[0].processAllAvailable()
spark.stop()
"""


def example_of(module, url):
    """The program of the page that uses a module, for a store elsewhere."""
    (found,) = (
        block.text for block in examples_of(ROOT / "docs" / "live.md") if module in block.elsewhere
    )
    assert found.count('"postgresql://ann@host/sets"') == 1
    return "import setfold\n" + found.replace("postgresql://ann@host/sets", url)


def run(program, folder):
    """Run a program as a user does; return its exit code, and what it prints."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PYSPARK_PYTHON": sys.executable,
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        check=False,
    )
    print(done.stderr)
    return done.returncode, done.stdout


def rows_of(number):
    return events(number).rename(columns={"x": "amount", "y": "items"})


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "orders"
    folder.mkdir()
    for number in range(FILES):
        table = pa.Table.from_pandas(rows_of(number), preserve_index=False)
        pq.write_table(table, folder / f"{number}.parquet")
    return folder


@pytest.fixture
def url(server):
    found = server.url()
    live.create(found, slots()).close()
    return found


def assert_all_once(url):
    with live.open(url) as sets:
        assert_holds(sets, slots(), pd.concat([events(number) for number in range(FILES)]))
        assert sets.info().batches == FILES


def test_spark_that_is_killed_between_two_commits(url, files):
    pytest.importorskip("pyspark", reason="pip install 'setfold[spark]'")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java 17 or later")
    program = KILLED + example_of("pyspark", url) + WAIT
    code, _ = run(program, files.parent)
    assert code == -9
    assert run(program, files.parent)[0] == 0
    assert_all_once(url)


def test_ray_that_runs_tasks_again(url, files):
    names = [str(path) for path in files.iterdir()]
    program = f"names = {names!r}\n" + example_of("ray", url)
    assert run(program, files.parent) == (0, f"{20 * FILES}\n")
    assert run(program, files.parent) == (0, "0\n")
    assert_all_once(url)
