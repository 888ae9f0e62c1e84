"""The commands of docs/service.md, exactly as they are printed."""

from __future__ import annotations

import http.client
import os
import re
import subprocess

import pyarrow as pa
import pytest

from tests.examples import ROOT, blocks_of, run_examples
from tests.live.service.conftest import commanded

pytestmark = pytest.mark.long

PAGE = ROOT / "docs" / "service.md"
SHOWN = "http://127.0.0.1:8080"


def commands_of(block):
    """The commands of a block, each with the output that the page shows."""
    found = []
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        lines = part.splitlines()
        # A command goes on after a backslash, and while a quotation is open.
        end = next(
            place
            for place in range(1, len(lines) + 1)
            if not lines[place - 1].endswith("\\") and "".join(lines[:place]).count("'") % 2 == 0
        )
        found.append(("\n".join(lines[:end]), "\n".join(lines[end:])))
    return found


def printed_by(command, address):
    done = subprocess.run(
        ["bash", "-c", command.replace(SHOWN, address)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """The commands with curl, in a folder with what the page writes."""
    monkeypatch.chdir(tmp_path)
    run_examples(PAGE)
    blocks = [block for block in blocks_of(PAGE) if block.language == "console"]
    return [one for block in blocks for one in commands_of(block)]


def test_requests_get_the_answers_that_the_page_shows(commands, tmp_path):
    if not any(os.access(f"{folder}/curl", os.X_OK) for folder in os.get_exec_path()):
        pytest.skip("curl is not installed")
    with commanded(tmp_path / "live.db") as (_, address):
        ran = 0
        for command, shown in commands:
            if (
                command.startswith("curl")
                and "/v1/changes" not in command
                and "token" not in command
            ):
                assert printed_by(command, address) == shown
                ran += 1
        assert ran == 6
        table = pa.ipc.open_stream(pa.memory_map("all.arrow")).read_all()
        assert table["set"].to_pylist() == ["ann", "bob", "eve"]
    make, start, ask = (one for one in commands if "token" in one[0])
    (tmp_path / "token.txt").write_text("0123456789abcdef" * 4 + "\n")
    assert make[0].endswith("> token.txt")
    assert "--token-file token.txt" in start[0]
    with commanded(tmp_path / "live.db", "--token-file", "token.txt") as (_, address):
        assert printed_by(ask[0], address) == ask[1]


def test_events_look_as_the_page_shows(commands, tmp_path):
    (shown,) = (shown for command, shown in commands if "/v1/changes" in command)
    update, *_ = (command for command, _ in commands if command.startswith("curl"))
    with commanded(tmp_path / "live.db") as (_, address):
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
        connection.request("GET", "/v1/changes")
        answer = connection.getresponse()
        lines = [answer.readline(), answer.readline()]
        assert printed_by(update, address)
        lines += [answer.readline(), answer.readline()]
        connection.close()
    assert b"".join(lines).decode() == shown.removesuffix("...")


def test_the_page_names_every_path_option_and_status(tmp_path):
    from setfold import Pool, live
    from setfold.live.service import make_app

    text = PAGE.read_text()
    with live.create(tmp_path / "live.db", Pool(1, "mean")) as sets:
        paths = make_app(sets).openapi()["paths"]
    for path, methods in paths.items():
        for method, operation in methods.items():
            assert f"`{method.upper()} {path}`" in text
            for status in operation["responses"]:
                assert re.search(rf"^\| .*\b{status}\b.* \|", text, re.MULTILINE) or status == "200"
    for option in ("--max-body", "--max-updates", "--timeout", "--token-file", "--host"):
        assert option in text
