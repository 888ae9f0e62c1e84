"""The page of `make live`: its steps, and the page itself in a browser."""

from __future__ import annotations

import json
import re
import shutil
import socket
import threading
import time
from base64 import b64encode
from types import SimpleNamespace

import pytest
import torch
import uvicorn
from starlette.testclient import TestClient

from demo import completion
from demo.live import classifier, models, shapes
from demo.live.app import make_app
from demo.live.parts import digit_part, shape_part
from demo.live.step import from_text, some_slots, step, to_text
from setfold.errors import InputError
from setfold.laws.wrong_way import ChunkAverage

pytestmark = pytest.mark.long

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.fixture(scope="module")
def parts():
    """Both models, trained for a moment, by the code that trains them for minutes."""
    clouds, done = shapes.made_up(10), SimpleNamespace(value=0)
    return {
        "digits": digit_part(completion.train(completion.grid_model, 2, done)),
        "shapes": shape_part(classifier.train(clouds, 20, done), clouds),
    }


def encoding_of(part, example, elements):
    """What the library makes of some elements of a set, at once."""
    with torch.no_grad():
        return part.encoder(part.examples[example, list(elements)].unsqueeze(0))


def same(found, expected):
    return torch.allclose(found, expected, rtol=1e-12, atol=1e-12)


# ---- steps -------------------------------------------------------------------------------------


def send(part, machines=(None,), actions=(), seen=(), example=3):
    request = {"example": example, "machines": [*machines], "actions": [*actions], "seen": [*seen]}
    return step(part, json.loads(json.dumps(request)))


@pytest.mark.parametrize("name", ["digits", "shapes"])
def test_elements_that_arrive_split_leave_and_merge_give_what_all_at_once_gives(parts, name):
    part = parts[name]
    order = torch.randperm(part.examples.shape[1])[:100].tolist()
    found = send(part, actions=[{"machine": 0, "add": order[:30]}], seen=order[:30])
    found = send(
        part,
        found["machines"],
        [
            {"split": True},
            {"machine": 1, "add": order[30:100]},
            {"machine": 0, "remove": order[:10]},
        ],
        order[10:],
    )
    assert [machine["count"] for machine in found["machines"]] == [20, 70]
    assert len(found["alone"]) == 2
    assert found["difference"][0] < 1e-12
    assert found["difference"][1] > 1e-3  # chunk and average
    found = send(part, found["machines"], [{"merge": True}], order[10:])
    (machine,) = found["machines"]
    state = from_text(part, machine)
    expected = encoding_of(part, 3, order[10:])
    assert same(part.encoder.readout(state), expected)
    whole = encoding_of(part, 3, range(part.examples.shape[1]))
    assert found["encoding"] == some_slots(part.encoder.readout(state), whole)
    wrong = ChunkAverage(part.encoder, part.chunk)(part.examples[3, order[10:]].unsqueeze(0))
    apart = float((wrong - expected).norm() / expected.norm())
    assert found["difference"][1] == pytest.approx(apart, rel=1e-9)
    left = send(part, [machine], [{"machine": 0, "remove": order[10:]}])
    assert left["machines"][0] == to_text(part.encoder.initial_state(1))  # exactly empty


@pytest.mark.parametrize("name", ["digits", "shapes"])
def test_all_elements_reach_the_encoding_of_the_whole_set(parts, name):
    part = parts[name]
    everything = list(range(part.examples.shape[1]))
    found = send(part, actions=[{"machine": 0, "add": everything}], seen=everything)
    assert found["distance"][0] < 1e-12
    assert found["distance"][1] > 0.1
    half = everything[::2]
    assert 0.1 < send(part, actions=[{"machine": 0, "add": half}], seen=half)["distance"][0] < 0.9


@pytest.mark.parametrize(
    "wrong",
    [
        {"example": 99}, {"example": -1}, {"example": True}, {"example": None}, {"other": 1},
        {"machines": []}, {"machines": [None] * 3}, {"machines": None}, {"machines": ["x"]},
        {"machines": [{"count": 1, "numbers": "AAAA"}]}, {"machines": [{"count": -1, "numbers": ""}]},
        {"machines": [{"count": 1, "numbers": b64encode(b"\xff" * 3152).decode()}]},
        {"machines": [{"count": 1, "numbers": b64encode(b"\xff" * 3144).decode()}]},
        {"actions": [{"machine": 1, "add": [1]}]}, {"actions": [{"machine": 0, "add": [784]}]},
        {"actions": [{"machine": 0, "add": [1, 1]}]}, {"actions": [{"machine": 0, "remove": [1]}]},
        {"actions": [1]}, {"actions": {}}, {"actions": [{"machine": 0, "add": 3}]},
        {"seen": [1, 1]}, {"seen": ["a"]}, {"seen": [[]]},
    ],
)  # fmt: skip
def test_anything_else_is_refused(parts, wrong):
    request = {"example": 0, "machines": [None], "actions": [], "seen": []}
    with pytest.raises(InputError):
        step(parts["digits"], request | wrong)


def test_the_server_refuses_what_it_does_not_know(parts):
    with TestClient(make_app(parts), base_url="http://127.0.0.1") as client:
        assert client.get("/").headers["content-security-policy"].startswith("default-src 'self'")
        assert [one["name"] for one in client.get("/api/about").json()] == ["digits", "shapes"]
        assert len(client.get("/api/digits/3").json()["elements"]) == 784
        assert client.get("/api/digits/30").status_code == 404
        assert client.get("/api/letters/0").status_code == 404
        assert client.get("/api/step").status_code == 404
        assert client.get("/../app.py").status_code == 404
        assert client.post("/api/step", content=b"{").status_code == 422
        assert client.post("/api/step", content=b"[]").status_code == 422
        assert client.post("/api/step", json={"part": "letters"}).status_code == 404
        assert client.post("/api/step", content=b" " * 70_000).status_code == 413
        assert client.get("/", headers={"Host": "evil.example"}).status_code == 421


def test_models_are_trained_once(tmp_path, monkeypatch, parts):
    trained = []

    def run(jobs, show):
        for job in jobs:
            trained.append(job.__self__.title)
            job(SimpleNamespace(value=0))

    monkeypatch.setattr(models.processes, "run", run)
    monkeypatch.delenv(shapes.FOLDER, raising=False)
    console = models.Console(quiet=True)
    first = models.load(tmp_path, 2, 3, console)
    assert trained == ["complete digits", "classify shapes"]
    again = models.load(tmp_path, 2, 3, console)
    assert len(trained) == 2
    for name in first:
        elements = range(0, 500, 7)
        view = [one[name].show(encoding_of(one[name], 1, elements), 1) for one in (first, again)]
        assert view[0]["error"] == view[1]["error"]
    models.load(tmp_path, 2, 4, console)
    assert trained[2:] == ["classify shapes"]


def test_the_classifier_learns_shapes_from_few_points():
    clouds, done = shapes.made_up(60), SimpleNamespace(value=0)
    model = classifier.train(clouds, 150, done)
    assert done.value == 150
    few = clouds.unseen[:, torch.randperm(shapes.POINTS)[:64]]
    assert classifier.accuracy(model, few, clouds.unseen_labels) > 0.8
    assert clouds.train.norm(dim=-1).amax() <= 1 + 1e-6


# ---- in a browser ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address(parts):
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(parts), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def browser():
    if BROWSER is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(params=[(1440, "light")])
def page(request, browser, address):
    """The page, of some width and colours; fails if anything is loaded from elsewhere."""
    width, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    opened, problems = context.new_page(), []
    opened.set_default_timeout(60_000)
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda line: problems.append(line.text))
    opened.on(
        "request", lambda one: one.url.startswith(address) or problems.append(f"loads {one.url}")
    )
    opened.goto(address)
    opened.wait_for_selector("html[data-ready]")
    wait_for_count(opened, 0)
    yield opened
    context.close()
    assert problems == []


def wait_for_count(page, count):
    """Wait until the page shows the answer for so many elements."""
    page.wait_for_selector(f'#encoding[data-count="{count}"]')


def wait_until(page, expression):
    """Wait until an expression is true. The page forbids `eval`, so the browser cannot wait."""
    end = time.monotonic() + 60
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(20)


def wait_for_more(page, count):
    wait_until(page, f"Number(document.querySelector('#encoding').dataset.count) > {count}")


def shown_encoding(page):
    """The slots and numbers on the page."""
    lines = page.inner_text("#encoding").splitlines()
    found = [re.fullmatch(r"slot (\d+): (.+)", line) for line in lines]
    return {int(one[1]): [float(text) for text in one[2].split()] for one in found}


def check_encoding(page, part, example, elements):
    """The encoding on the page is that of the library."""
    expected = encoding_of(part, example, elements)[0] if elements else None
    found = shown_encoding(page)
    assert len(found) == 4
    for slot, numbers in found.items():
        wanted = expected[slot].tolist() if elements else [0.0] * len(numbers)
        assert numbers == pytest.approx(wanted, rel=6e-3, abs=1e-6)
    if elements:
        assert float(page.inner_text("#difference-0")) < 1e-12


def picture(page, label):
    return page.get_by_role("img", name=re.compile(f"^{label}")).evaluate("it => it.toDataURL()")


def place_of(page, row, column):
    """Where a pixel is on the screen."""
    box = page.locator("#arrived").bounding_box()
    size = box["width"] / 28
    return box["x"] + size * (column + 0.5), box["y"] + size * (row + 0.5)


def test_a_stroke_reveals_pixels_and_changes_the_picture(page, parts):
    before = picture(page, "Completion")
    page.mouse.move(*place_of(page, 14, 10))
    page.mouse.down()
    page.mouse.move(*place_of(page, 14, 18))
    page.mouse.up()
    stroke = [row * 28 + column for row in (13, 14, 15) for column in range(9, 20)]
    wait_for_count(page, len(stroke))
    assert page.inner_text("#counted") == "33 of 784 pixels"
    check_encoding(page, parts["digits"], 0, stroke)
    assert picture(page, "Completion") != before
    assert picture(page, "Chunk and average") != picture(page, "Completion")
    assert float(page.inner_text("#difference-1")) > 1e-3
    page.check("#erase")
    page.locator("#arrived").scroll_into_view_if_needed()
    page.mouse.click(*place_of(page, 14, 10))
    gone = {row * 28 + column for row in (13, 14, 15) for column in (9, 10, 11)}
    left = [one for one in stroke if one not in gone]
    wait_for_count(page, len(left))
    check_encoding(page, parts["digits"], 0, left)


def test_pixels_arrive_by_themselves_in_any_order_and_go_again(page, parts):
    page.select_option("#order", "row by row")
    page.locator("#speed").fill("4")
    page.click("#play")
    wait_for_more(page, 60)
    page.click("#play")
    count = int(page.inner_text("#counted").split()[0])
    wait_for_count(page, count)
    check_encoding(page, parts["digits"], 0, list(range(count)))
    page.click("#undo")
    wait_for_count(page, count - 1)
    check_encoding(page, parts["digits"], 0, list(range(count - 1)))
    page.click("#all")
    wait_for_count(page, 784)
    assert float(page.inner_text("#distance-0")) < 1e-12
    assert page.is_disabled("#play")
    page.click("#clear")
    wait_for_count(page, 0)
    check_encoding(page, parts["digits"], 0, [])


def shares(page):
    """How many elements the state of each machine has seen."""
    return [int(text.split()[0]) for text in page.locator("#machines dd").all_inner_texts()]


def test_two_machines_see_parts_and_merge(page, parts):
    page.select_option("#order", "column by column")
    page.select_option("#example", "2")
    page.wait_for_timeout(100)
    wait_for_count(page, 0)
    page.click("#split")
    page.locator("#speed").fill("3")
    page.click("#play")
    wait_for_more(page, 30)
    page.click("#play")
    count = int(page.inner_text("#counted").split()[0])
    wait_for_count(page, count)
    columns = [row * 28 + column for column in range(28) for row in range(28)]
    check_encoding(page, parts["digits"], 2, columns[:count])
    assert shares(page) == [(count + 1) // 2, count // 2]
    for _ in range(2):  # one of each machine
        page.click("#undo")
        count -= 1
        wait_for_count(page, count)
        assert shares(page) == [(count + 1) // 2, count // 2]
    assert picture(page, "Machine A alone") != picture(page, "Machine B alone")
    page.click("#merge")
    wait_until(page, "document.querySelectorAll('#machines dd').length === 1")
    assert page.is_disabled("#merge")
    check_encoding(page, parts["digits"], 2, columns[:count])
    page.click("#undo")  # an element that the other machine has seen
    wait_for_count(page, count - 1)
    check_encoding(page, parts["digits"], 2, columns[: count - 1])


def test_the_keyboard_is_enough(page, parts):
    page.select_option("#brush", "0")
    page.focus("#tab-digits")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "arrived"
    page.keyboard.press("Space")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.inner_text("#summary") == "row 16, column 16"
    page.keyboard.press("Space")
    wait_for_count(page, 2)
    check_encoding(page, parts["digits"], 0, [14 * 28 + 14, 15 * 28 + 15])
    page.keyboard.press("Delete")
    wait_for_count(page, 1)
    check_encoding(page, parts["digits"], 0, [14 * 28 + 14])
    page.keyboard.press("u")
    wait_for_count(page, 0)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "play"
    page.keyboard.press("Enter")
    wait_for_more(page, 3)
    page.keyboard.press("Enter")
    wait_until(page, "document.querySelector('#summary').textContent.includes('have arrived')")
    assert "chunk and average" in page.inner_text("#summary")


def test_shapes_are_classified_as_their_points_arrive(page, parts):
    page.focus("#tab-digits")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#tab-shapes[aria-selected=true]")
    page.wait_for_selector("#result .bars")
    wait_for_count(page, 0)
    page.select_option("#example", "5")
    page.wait_for_timeout(100)
    page.select_option("#order", "from below")
    page.locator("#speed").fill("3")
    page.click("#play")
    wait_for_more(page, 40)
    page.click("#play")
    count = int(page.inner_text("#counted").split()[0])
    wait_for_count(page, count)
    part = parts["shapes"]
    heights = part.examples[5, :, 2].mul(1e4).round()
    arrived = heights.sort(stable=True).indices[:count].tolist()
    check_encoding(page, part, 5, arrived)
    shown = [
        float(text)
        for text in page.locator("#result .bars.fold > span:not(.bar)").all_inner_texts()
    ]
    expected = part.show(encoding_of(part, 5, arrived), 5)["probabilities"]
    assert shown == pytest.approx(expected.tolist(), abs=6e-4)
    assert page.inner_text("#result .bars.fold .truth") == "table"
    page.select_option("#brush", "2")
    page.locator("#arrived").scroll_into_view_if_needed()
    box = page.locator("#arrived").bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] * 0.4)
    wait_for_more(page, count)


@pytest.mark.parametrize(
    "page", [(w, s) for w in (390, 1440) for s in ("light", "dark")], indirect=True
)
def test_the_page_fits_and_everything_has_a_name(page):
    for tab in ("digits", "shapes"):
        page.click(f"#tab-{tab}")
        page.wait_for_timeout(200)
        page.click("#split")
        page.wait_for_selector("#merge:enabled")
        width = page.viewport_size["width"]
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        outside = page.evaluate(
            "[...document.querySelectorAll('main *')].filter(it => it.offsetParent && "
            "(it.getBoundingClientRect().right > innerWidth + 1)).map(it => it.outerHTML.slice(0, 80))"
        )
        assert outside == []
        nameless = page.evaluate(
            "[...document.querySelectorAll('button, select, input, canvas, progress')].filter(it => "
            "!(it.textContent.trim() && it.tagName === 'BUTTON') && !it.labels?.length && "
            "!it.getAttribute('aria-label') && !it.getAttribute('aria-labelledby'))"
            ".map(it => it.outerHTML.slice(0, 80))"
        )
        assert nameless == []
    assert low_contrast(page) == []


def low_contrast(page):
    """Texts whose contrast to their background is below 4.5, as WCAG counts."""
    return page.evaluate(
        """() => {
        const light = (text) => { const [r, g, b] = text.match(/[\\d.]+/g).map(Number)
            .map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
        const ground = (it) => { for (; it; it = it.parentElement) {
            const found = getComputedStyle(it).backgroundColor;
            if (!/, 0\\)$/.test(found) && found !== "transparent") return found; } };
        const found = new Set();
        for (const it of document.querySelectorAll("h1, h2, h3, p, th, td, b, small, dt, dd, "
            + "figcaption span, output, label, button:enabled")) {
            if (!it.offsetParent || !it.textContent.trim()) continue;
            const [a, b] = [light(getComputedStyle(it).color), light(ground(it))];
            const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
            if (contrast < 4.5) found.add(`${it.tagName} ${it.textContent.slice(0, 30)} ${contrast}`);
        }
        return [...found]; }"""
    )
