"""CITATION.cff has the version of the package."""

from __future__ import annotations

import re

import setfold
from tests.examples import ROOT


def test_the_version_is_the_package_s():
    text = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.+)$", text, re.MULTILINE) == [setfold.__version__]
