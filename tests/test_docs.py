"""The pages of docs/: examples run, every page is in the navigation, every name is documented.

`mkdocs build --strict` checks the links between pages.
"""

from __future__ import annotations

import inspect
import re

import pytest

import setfold
from tests.examples import ROOT, TORCHRUN, blocks_of, broken_links, examples_of, run_examples

DOCS = ROOT / "docs"
PAGES = {str(page.relative_to(DOCS)): page for page in sorted(DOCS.rglob("*.md"))}
LANGUAGES = {"python", "console", "text"}
SECTIONS = ["When to use it", "Formula", "Cost", "Does it fold?", "Example", "Reference"]
DOCUMENTED = re.compile(r"^::: setfold\.(\w+)$", re.MULTILINE)
COLUMNS = 100
GENERATED = {"benchmark.md"}  # by `make bench`


def nav():
    """The pages in the navigation of mkdocs.yml."""
    (listed,) = re.findall(r"^nav:\n((?: .*\n)+)", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    return re.findall(r"[\w./-]+\.md", listed)


def encoders():
    values = {name: getattr(setfold, name) for name in setfold.__all__}
    kinds = {n: v for n, v in values.items() if inspect.isclass(v)}
    return [
        name
        for name, kind in kinds.items()
        if issubclass(kind, setfold.SetEncoder) and not inspect.isabstract(kind)
    ]


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some examples write files
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    run_examples(PAGES[page])


@pytest.mark.parametrize("page", PAGES)
def test_no_example_is_skipped_because_of_its_language(page):
    for block in blocks_of(PAGES[page]):
        assert block.language in LANGUAGES, f"line {block.line}: one of {', '.join(LANGUAGES)}"
        assert block.language == "python" or not block.shows_output, f"line {block.line}"


@pytest.mark.parametrize("page", sorted(set(PAGES) - GENERATED))
def test_lines_are_wrapped(page):
    lines = PAGES[page].read_text().splitlines()
    wide = [n for n, line in enumerate(lines, 1) if len(line) > COLUMNS and "|" not in line[:1]]
    assert not wide, f"lines with more than {COLUMNS} columns"


def test_the_contents_list_every_page_once():
    assert sorted(nav()) == sorted(PAGES)


def test_every_public_name_is_documented_once():
    found = [name for page in PAGES.values() for name in DOCUMENTED.findall(page.read_text())]
    public = {name for name in setfold.__all__ if not name.startswith("__")}
    missing, twice = sorted(public - set(found)), [n for n in public if found.count(n) > 1]
    assert not missing, "each needs a line `::: setfold.Name` on its page, or in reference.md"
    assert not twice, "these have more than one"
    assert set(found) == public


def test_the_page_on_laws_has_a_row_for_every_law():
    report = setfold.check(setfold.SlotSetEncoder(3, 4, 8, 8), processes=False)
    text = PAGES["laws.md"].read_text()
    assert not [finding.law for finding in report.findings if f"| {finding.law} |" not in text]


@pytest.mark.parametrize("encoder", encoders())
def test_the_page_on_choosing_has_a_row_for_every_encoder(encoder):
    rows = [line for line in PAGES["choosing.md"].read_text().splitlines() if line.startswith("|")]
    assert any(f"`{encoder}`" in row.split("|")[1] for row in rows), "add it to a table there"


@pytest.mark.parametrize("page", [name for name in PAGES if name.startswith("encoders/")])
def test_the_page_of_an_encoder_has_the_sections_of_all(page):
    headings = re.findall(r"^## (.+)$", PAGES[page].read_text(), re.MULTILINE)
    assert headings == SECTIONS
    assert examples_of(PAGES[page])


@pytest.mark.parametrize("file", sorted(p.name for p in ROOT.glob("*.md")))
def test_links_lead_somewhere(file):
    assert not broken_links(ROOT / file)
