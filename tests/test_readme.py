"""The README's Python runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_blocks_run_one_after_the_other(number):
    names: dict[str, object] = {}
    for block in BLOCKS[: number + 1]:
        exec(block, names)
    if number == 0:
        assert names["encoding"].shape == (1, 16, 64)
        assert names["here"].merge(names["there"]).count.tolist() == [150_000]


def test_there_are_blocks():
    assert len(BLOCKS) >= 2
