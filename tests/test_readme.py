"""The README: its Python runs and prints what it shows; test_tutorial.py runs its commands."""

from __future__ import annotations

import runpy

import pytest
import torch

from tests.examples import ROOT, run_examples

README = ROOT / "README.md"
MEASURED = ROOT / "docs" / "examples" / "chunk_average.py"


@pytest.fixture(autouse=True)
def one_thread():
    """Tests run side by side; many threads on tiny batches only get in each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_examples_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_examples(README)
    assert names["here"].merge(names["there"]).count.tolist() == [100_000]


def test_chunk_and_average_is_as_wrong_as_it_says():
    ((_, right, fold_error, averaged, error),) = runpy.run_path(str(MEASURED))["measure"]((16,))
    assert right == pytest.approx(0.94, abs=0.05)
    assert averaged < 0.5  # 24%, here and then
    assert fold_error < 1e-14 < 1 < error


def test_it_fits_on_a_few_screens():
    lines = README.read_text().splitlines()
    assert len(lines) <= 150
    assert not [line for line in lines if len(line) > 100]
