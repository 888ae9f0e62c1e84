"""A service stops: what was accepted is finished, and what was acknowledged is kept."""

from __future__ import annotations

import http.client
import json
import signal
import sqlite3
import sys
import threading
import time

import pytest

import setfold
from setfold import live
from setfold.cli import main
from tests.live.service.conftest import body, commanded, new_store
from tests.live.service.test_limits import AS_JSON, wait_for

CLIENTS = 8


def send_until_refused(address, client, acknowledged):
    """Send updates of one element until the service is gone; note those that were acknowledged."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
    number = 0
    try:
        while True:
            update = body(0, [(f"user {client}", number, 1)]) | {"batch": ["a", client, number]}
            connection.request("POST", "/v1/updates", json.dumps(update), AS_JSON)
            answer = connection.getresponse()
            content = answer.read()
            if answer.status == 200:
                acknowledged.append((client, number, json.loads(content)["status"]))
            number += 1
    except (OSError, http.client.HTTPException):
        pass
    finally:
        connection.close()


@pytest.mark.long
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_what_was_acknowledged_is_in_the_store(url, sign):
    live.create(url, setfold.Pool(2, "mean")).close()
    acknowledged = []
    with commanded(url) as (process, address):
        senders = [
            threading.Thread(target=send_until_refused, args=(address, number, acknowledged))
            for number in range(CLIENTS)
        ]
        for sender in senders:
            sender.start()
        wait_for(lambda: len(acknowledged) > 100, 60)
        process.send_signal(sign)
        assert process.wait(60) == (-signal.SIGKILL if sign == signal.SIGKILL else 0)
        for sender in senders:
            sender.join()
        assert process.stderr.read() == ""
    assert {status for *_, status in acknowledged} == {"applied"}
    with live.open(url) as sets:
        counts = sets.count([f"user {number}" for number in range(CLIENTS)])
        with sets.database.reading() as view:
            keys = {key for (key,) in view.run("SELECT key FROM batches")}
    assert keys >= {f"{client}:{number}" for client, number, _ in acknowledged}
    assert sum(counts) == len(keys)  # and those that were applied without an answer, once


@pytest.mark.long
def test_what_was_accepted_is_finished_and_answered(tmp_path):
    """Updates wait because another process writes; then SIGTERM comes; then the other one ends."""
    new_store(tmp_path).close()
    found = []
    with commanded(tmp_path / "live.db") as (process, address):
        other = sqlite3.connect(tmp_path / "live.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")

        def send(number):
            connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
            update = json.dumps(body(number, [("ann", number, 1)]))
            connection.request("POST", "/v1/updates", update, AS_JSON)
            found.append(connection.getresponse().status)
            connection.close()

        senders = [threading.Thread(target=send, args=(number,)) for number in range(CLIENTS)]
        for sender in senders:
            sender.start()
        wait_for(lambda: waiting_updates(address) == CLIENTS)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert process.poll() is None
        other.execute("ROLLBACK")
        other.close()
        assert process.wait(60) == 0
        for sender in senders:
            sender.join()
    assert found == [200] * CLIENTS
    with live.open(tmp_path / "live.db") as sets:
        assert sets.count(["ann"]) == [CLIENTS]


def waiting_updates(address):
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return next(int(line.split()[1]) for line in lines if line.startswith("setfold_waiting"))


def test_the_command_says_what_is_wrong(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("SETFOLD_TOKEN", raising=False)
    new_store(tmp_path).close()
    for arguments, reason in (
        ((tmp_path / "other.db",), "there is no store"),
        ((tmp_path / "live.db", "--host", "0.0.0.0"), "only for this machine"),
        ((tmp_path / "live.db", "--token-file", tmp_path / "none"), "cannot be read"),
        ((tmp_path / "live.db", "--max-body", "much"), "much"),
        ((tmp_path / "live.db", "--port", "-1"), "greater than or equal to 0"),
        ((tmp_path / "live.db", "--timeout", "inf"), "less than or equal to 86400"),
    ):
        monkeypatch.setattr(sys, "argv", ["setfold", "live", "serve", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert reason in capsys.readouterr().err
