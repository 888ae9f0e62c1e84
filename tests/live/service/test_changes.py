"""Listeners get the ids of the sets that change."""

from __future__ import annotations

import asyncio
import http.client
import json

import pytest

from setfold.errors import StoreError
from setfold.live.service.changes import EVENTS, Changes
from setfold.live.service.metrics import Metrics
from tests.live.service.conftest import body, on_both, served
from tests.live.service.test_limits import post, wait_for


@pytest.fixture
def listening(sets):
    """A function that returns the next event, the port, and the service."""
    with served(sets) as (port, running):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/v1/changes")
        answer = connection.getresponse()
        assert answer.getheader("content-type") == "text/event-stream; charset=utf-8"

        def take():
            lines = []
            while line := answer.readline().decode().rstrip("\n"):
                lines.append(line)
            if lines and lines[0].startswith(":"):
                return take()
            if not lines:
                return None
            kind, data = lines
            return kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))

        service = running.config.app.state.service
        wait_for(lambda: len(service.changes.listeners) == 1)
        yield take, port, running
        connection.close()


@on_both
def test_changes_and_deletions_are_sent(listening, sets):
    take, port, _ = listening
    post(port, body(1, [("bob", 1, 2), ("ann", 1, 2), ("bob", 3, 4)]))
    assert take() == ("changed", {"sets": ["bob", "ann"]})
    post(port, body(1, [("bob", 1, 2), ("ann", 1, 2), ("bob", 3, 4)]))  # a duplicate
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("DELETE", "/v1/sets/ann")
    assert connection.getresponse().status == 200
    connection.close()
    assert take() == ("deleted", {"sets": ["ann"]})


def test_a_deletion_that_cannot_be_erased_yet_is_sent(listening, sets, monkeypatch):
    def fail():
        raise StoreError("the rows are deleted, but others read them.")

    take, port, _ = listening
    post(port, body(1, [("ann", 1, 2)]))
    assert take() == ("changed", {"sets": ["ann"]})
    monkeypatch.setattr(sets.database, "erase", fail)
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("DELETE", "/v1/sets/ann")
    assert connection.getresponse().status == 503
    connection.close()
    assert sets.count(["ann"]) == [0]
    assert take() == ("deleted", {"sets": ["ann"]})


def test_a_deletion_that_is_refused_is_not_sent(listening):
    take, port, _ = listening
    connection = http.client.HTTPConnection("127.0.0.1", port)
    post(port, body(1, [("ann", 1, 2)]))
    assert take() == ("changed", {"sets": ["ann"]})
    for path, status in (("ann/7", 422), ("bob", 200)):
        connection.request("DELETE", f"/v1/sets/{path}")
        answer = connection.getresponse()
        assert answer.status == status
        answer.read()
    connection.close()
    assert take() == ("deleted", {"sets": ["bob"]})


def test_many_sets_come_in_several_events(listening):
    take, port, _ = listening
    names = [f"user {number}" for number in range(2500)]
    post(port, body(1, [(name, 1, 2) for name in names]))
    found = [take()[1]["sets"] for _ in range(3)]
    assert [len(some) for some in found] == [1000, 1000, 500]
    assert [name for some in found for name in some] == names


def test_a_stop_is_sent(listening):
    take, _, running = listening
    running.should_exit = True
    assert take() == ("stopped", {"reason": "the service stops."})
    assert take() is None


def test_those_who_have_left_are_forgotten(sets):
    with served(sets) as (port, running):
        changes = running.config.app.state.service.changes
        for _ in range(3):
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("GET", "/v1/changes")
            connection.getresponse()
            wait_for(lambda: len(changes.listeners) == 1)
            connection.close()
            wait_for(lambda: not changes.listeners)


def test_the_number_of_listeners_has_a_limit(sets):
    with served(sets, max_listeners=1) as (port, running):
        changes = running.config.app.state.service.changes
        first, second = (http.client.HTTPConnection("127.0.0.1", port) for _ in range(2))
        first.request("GET", "/v1/changes")
        wait_for(lambda: len(changes.listeners) == 1)
        second.request("GET", "/v1/changes")
        assert second.getresponse().status == 429
        first.close()
        second.close()


def test_a_client_that_is_too_slow_is_dropped_with_a_reason():
    metrics = Metrics()

    async def listen():
        changes = Changes(10, metrics)
        slow, quick = changes.listen(), changes.listen()
        await anext(slow)
        await anext(quick)
        for number in range(EVENTS + 50):
            changes.tell("changed", [number])
            await anext(quick)
        waiting = max(listener.events.qsize() for listener in changes.listeners)
        events = [event async for event in slow]
        changes.tell("changed", ["last"])
        last = await anext(quick)
        await quick.aclose()
        return waiting, events, last, changes.listeners

    waiting, events, last, listeners = asyncio.run(listen())
    assert waiting == EVENTS + 2  # not one for each change
    assert len(events) == EVENTS + 1
    assert events[-1].startswith(b"event: dropped\n")
    assert b"Listen again" in events[-1]
    assert b"last" in last  # others are not affected
    assert not listeners
    assert "setfold_dropped_listeners_total 1" in metrics.text()


def test_signs_of_life_come_without_changes(monkeypatch):
    monkeypatch.setattr("setfold.live.service.changes.PULSE", 0.01)

    async def listen():
        events = Changes(1, Metrics()).listen()
        found = [await anext(events) for _ in range(3)]
        await events.aclose()
        return found

    assert asyncio.run(listen()) == [b": alive\n\n"] * 3


def test_ids_of_several_columns_are_lists(listening, sets):
    take, port, _ = listening
    rows = [{"run": 1, "event": "a", "x": 1, "y": 2}]
    post(port, body(1, []) | {"set": ["run", "event"], "rows": rows})
    assert take() == ("changed", {"sets": [[1, "a"]]})
