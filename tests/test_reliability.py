"""The pages that promise something name tests that exist."""

from __future__ import annotations

import re

import pytest

from tests.examples import ROOT

NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


@pytest.mark.parametrize("page", ["SECURITY.md", "docs/reliability.md"])
def test_every_test_that_a_page_names_exists(page):
    named = NAMED.findall((ROOT / page).read_text())
    assert len(named) > 3
    for file, name in named:
        text = (ROOT / file).read_text()
        assert not name or f"def {name}(" in text, f"{file}::{name}"


def test_every_promise_has_a_test():
    rows = [line for line in (ROOT / "docs/reliability.md").read_text().splitlines() if "|" in line]
    promises = [row for row in rows if not row.startswith(("|---", "| promise"))]
    assert promises
    assert not [row for row in promises if not NAMED.search(row)]
