"""Run the examples of Markdown files, and check their links."""

from __future__ import annotations

import doctest
import re
import runpy
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest
import torch

ROOT = Path(__file__).parent.parent
OUTPUT = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
# A fence without an end runs to the end of the file, as in every renderer.
FENCED = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<language>[^\n]*)\n(?P<text>.*?)(?:^ *(?P=fence) *$|\Z)",
    re.DOTALL | re.MULTILINE,
)
# What torchrun sets for a single process.
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
# Run by tests/files/test_partials.py and tests/live/test_page.py, if installed; or they need a
# server.
ELSEWHERE = {"dask", "pyspark", "lancedb", "psycopg", "ray"}
IMPORTED = re.compile(r"^(?:import|from) (\w+)", re.MULTILINE)
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)|^ *\[[^\]]+\]:\s*(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the number of its first line."""

    language: str
    text: str
    line: int

    @property
    def shows_output(self):
        return self.text.startswith(">>>")

    @property
    def elsewhere(self):
        """The engines that must run it in place of this process."""
        return ELSEWHERE & set(IMPORTED.findall(self.text))


def blocks_of(file):
    """All fenced blocks, in order."""
    text = file.read_text()
    return [
        Block(
            found["language"].strip(),
            dedent(found["text"]),
            text.count("\n", 0, found.start("text")) + 1,
        )
        for found in FENCED.finditer(text)
    ]


def examples_of(file):
    """The blocks of Python, in order."""
    return [block for block in blocks_of(file) if block.language == "python"]


def run_examples(file, engine=None):
    """Run the examples of a file in order, and return the variables that they define.

    A block that begins with >>> must print the output it shows. Any other block must not raise. Blocks
    that import another engine than `engine` are skipped.
    """
    names = {"__name__": "__main__"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for block in examples_of(file):
            if block.elsewhere - {engine}:
                continue
            if block.shows_output:
                _compare(block, file, names)
            else:
                lines = "\n" * (block.line - 1) + block.text  # for tracebacks
                exec(compile(lines, str(file), "exec", dont_inherit=True), names)
    return names


def _compare(block, file, names):
    test = doctest.DocTestParser().get_doctest(block.text, {}, file.name, str(file), block.line - 1)
    test.globs = names  # not a copy: the next block uses these variables
    complaints = []
    doctest.DocTestRunner(optionflags=OUTPUT).run(test, out=complaints.append, clear_globs=False)
    if complaints:
        pytest.fail("".join(complaints), pytrace=False)


def run_program(name, *arguments):
    """Run a program of docs/examples in this process, as `python docs/examples/NAME ARGUMENTS`."""
    program = str(ROOT / "docs" / "examples" / name)
    with (
        pytest.MonkeyPatch.context() as patch,
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
    ):
        patch.setattr(sys, "argv", [program, *map(str, arguments)])
        warnings.simplefilter("ignore", DeprecationWarning)  # of other libraries, as python does
        runpy.run_path(program, run_name="__main__")


def broken_links(file):
    """Links to missing files or headings."""
    prose = FENCED.sub("", file.read_text())
    targets = [inline or listed for inline, listed in LINK.findall(prose)]
    return [t for t in targets if not re.match(r"[a-z]+:", t) and not _leads_somewhere(file, t)]


def _leads_somewhere(file, target):
    path, _, anchor = target.partition("#")
    found = file.parent / path if path else file
    if not found.exists():
        return False
    return not anchor or anchor in _anchors_of(found)


def _anchors_of(file):
    """The anchors of a file: its headings and its explicit ids."""
    text = FENCED.sub("", file.read_text())
    headings = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in headings}
    return slugs | set(re.findall(r'<a id="(.+?)">', text))
