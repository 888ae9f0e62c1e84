"""The README's Python runs as it stands there."""

from __future__ import annotations

from tests.examples import ROOT, examples_of, run_examples

README = ROOT / "README.md"


def test_the_examples_run_one_after_the_other():
    names = run_examples(README)
    assert names["encoding"].shape == (1, 16, 64)
    assert names["here"].merge(names["there"]).count.tolist() == [150_000]


def test_there_are_examples():
    assert len(examples_of(README)) >= 2
