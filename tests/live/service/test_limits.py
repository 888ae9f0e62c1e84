"""Memory and time are bounded: large, slow and too many requests are refused, none is lost."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from setfold import live
from setfold.live.service import server, threads
from tests.live.service.conftest import body, client_of, on_both, served

ROWS = [("ann", 1, 2)]
AS_JSON = {"Content-Type": "application/json"}
POST = (
    b"POST /v1/updates HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 900\r\n\r\n"
)


def post(port, update, path="/v1/updates"):
    """Status and answer of an update, over a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, json.dumps(update), AS_JSON)
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read()), answer.headers
    connection.close()
    return found


def connect(port):
    return socket.create_connection(("127.0.0.1", port), 30)


@contextmanager
def locked(sets):
    """The store, while another process writes to it."""
    with live.open(sets.database.url) as other, other.database.writing(alone=True):
        yield


def wait_for(true, seconds=30.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


# ---- size --------------------------------------------------------------------------------------


def test_a_body_that_is_too_large_is_refused(sets):
    with client_of(sets, max_body=1000) as client:
        many = body(1, ROWS * 100)
        answer = client.post("/v1/updates", json=many)
        assert answer.status_code == 413
        assert "larger than 1,000 bytes" in answer.json()["message"]
        parts = (part for part in [b" " * 400] * 3)  # without Content-Length
        assert client.post("/v1/updates", content=parts, headers=AS_JSON).status_code == 413
        assert client.post("/v1/read", content=b" " * 1001, headers=AS_JSON).status_code == 413
        assert client.post("/v1/updates", json=body(2, ROWS)).status_code == 200
        assert "setfold_body_bytes 0" in client.get("/metrics").text


def test_all_bodies_together_have_a_limit(sets):
    with served(sets, max_body=1000, max_bodies=1500) as (port, running):
        bodies = running.config.app.state.service.bodies
        with connect(port) as slow:
            slow.sendall(POST + b" " * 899)
            wait_for(lambda: bodies.held == 899)
            status, answer, headers = post(port, body(1, ROWS * 20))
            assert (status, headers["Retry-After"]) == (429, "1")
            assert "as much to do" in answer["message"]
            assert post(port, body(1, ROWS))[0] == 200  # there is room for a small one
            slow.sendall(b" ")
            assert slow.recv(100).startswith(b"HTTP/1.1 422")
        wait_for(lambda: bodies.held == 0)


def test_a_read_of_too_many_sets_is_refused(client):
    answer = client.post("/v1/read", json={"sets": ["ann"] * 10_001})
    assert answer.status_code == 413
    assert "at most 10,000" in answer.json()["message"]


@pytest.mark.parametrize("what", ["address", "headers"])
def test_the_head_of_a_request_has_a_limit(sets, what):
    part = b"a" * 4096 if what == "address" else b"x: " + b"a" * 4096 + b"\r\n"
    with served(sets) as (port, _), connect(port) as connection:
        connection.sendall(b"GET /" if what == "address" else b"GET / HTTP/1.1\r\n")
        with pytest.raises(OSError, match=r"reset|Broken pipe"):  # long before it is sent
            connection.sendall(part * 100_000)


# ---- time --------------------------------------------------------------------------------------


def test_a_body_that_does_not_arrive_is_refused(sets):
    with served(sets, timeout=0.3) as (port, _), connect(port) as connection:
        connection.sendall(POST + b"{")
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("begin", [b"", b"GET /healthz HTTP/1.1\r\nHost: loc"])
def test_a_head_that_does_not_arrive_ends_the_connection(sets, begin):
    with served(sets, timeout=0.3) as (port, _), connect(port) as connection:
        connection.sendall(begin)
        assert connection.recv(1000) == b""


def test_a_client_that_leaves_does_no_harm(sets):
    with served(sets) as (port, running):
        for _ in range(3):
            with connect(port) as connection:
                connection.sendall(POST + b"{")
        assert post(port, body(1, ROWS))[0] == 200
        wait_for(lambda: running.config.app.state.service.bodies.held == 0)


def test_an_update_that_waits_too_long_can_be_sent_again(sets):
    with client_of(sets, timeout=0.3) as client:
        with locked(sets):
            answer = client.post("/v1/updates", json=body(1, ROWS))
        assert answer.status_code == 503
        assert "Send it again, with the same batch" in answer.json()["message"]
        wait_for(lambda: sets.count(["ann"]) == [1])  # it was accepted, so it is applied
        assert client.post("/v1/updates", json=body(1, ROWS)).json()["status"] == "duplicate"


def test_a_read_that_takes_too_long_is_answered(sets, monkeypatch):
    done = threading.Event()
    with client_of(sets, timeout=0.3) as client:
        monkeypatch.setattr(sets, "look_up", lambda *names, **options: done.wait(60))
        answer = client.get("/v1/sets/ann")
        assert answer.status_code == 503
        assert "within 0.3 seconds" in answer.json()["message"]
        done.set()


# ---- too many ----------------------------------------------------------------------------------


def test_updates_that_do_not_fit_in_the_queue_are_refused_and_the_others_applied(sets):
    with served(sets, max_updates=3) as (port, running):
        queue = running.config.app.state.service.queue
        with ThreadPoolExecutor(3) as pool:
            with locked(sets):
                accepted = [pool.submit(post, port, body(n, ROWS)) for n in range(3)]
                wait_for(lambda: queue.pending == 3)
                status, answer, headers = post(port, body(9, ROWS))
                assert (status, headers["Retry-After"]) == (429, "1")
                assert answer["message"] == "3 updates wait. Try again later."
            assert [one.result()[0] for one in accepted] == [200] * 3
        assert post(port, body(9, ROWS))[0] == 200
        assert sets.count(["ann"]) == [4]


def test_reads_that_do_not_find_a_thread_are_refused(sets, monkeypatch):
    monkeypatch.setattr(threads, "WAITING", 2)
    done = threading.Event()
    with served(sets) as (port, running):
        waiting = running.config.app.state.service.threads
        monkeypatch.setattr(sets, "look_up", lambda *names, **options: done.wait(60) and 1 / 0)
        with ThreadPoolExecutor(2) as pool:
            asked = {"sets": ["ann"]}
            found = [pool.submit(post, port, asked, "/v1/read") for _ in range(2)]
            wait_for(lambda: waiting.waiting == 2)
            assert post(port, asked, "/v1/read")[0] == 429
            done.set()
            assert {one.result()[0] for one in found} == {500}
        wait_for(lambda: waiting.waiting == 0)


@pytest.fixture
def endless(monkeypatch):
    """All sets are more than any client reads."""

    def parts(*arguments):
        while True:
            yield b"x" * (1 << 20)

    monkeypatch.setattr("setfold.live.service.reads.stream_all", parts)


def test_streams_of_all_sets_have_a_limit(sets, endless):
    with served(sets) as (port, running):
        streaming = running.config.app.state.service.threads
        others = [connect(port) for _ in range(threads.STREAMS)]
        for connection in others:
            connection.sendall(b"GET /v1/sets HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_for(lambda: streaming.streaming == threads.STREAMS)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/v1/sets")
        assert connection.getresponse().status == 429
        connection.close()
        for connection in others:
            connection.close()
        wait_for(lambda: streaming.streaming == 0)


def test_a_client_that_does_not_read_is_cut_off(sets, endless):
    """It would otherwise hold a view of the store forever."""
    with served(sets, timeout=0.3) as (port, running), connect(port) as connection:
        service = running.config.app.state.service
        connection.sendall(b"GET /v1/sets HTTP/1.1\r\nHost: localhost\r\n\r\n")
        done = 'requests_total{path="/v1/sets",method="GET",status="200"} 1'
        wait_for(lambda: done in service.metrics.text())
        wait_for(lambda: service.threads.streaming == 0)


def test_connections_have_a_limit(sets, monkeypatch):
    monkeypatch.setattr(server, "CONNECTIONS", 2)
    with served(sets) as (port, _):
        held = [connect(port) for _ in range(2)]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/healthz")
        assert connection.getresponse().status == 503
        connection.close()
        for one in held:
            one.close()


@on_both
def test_concurrent_updates_share_transactions_and_count_once(sets):
    """Twice each, at the same time."""
    with served(sets) as (port, running):
        queue = running.config.app.state.service.queue
        with ThreadPoolExecutor(16) as pool:
            with locked(sets):  # so that they collect
                found = [pool.submit(post, port, body(n % 40, ROWS)) for n in range(80)]
                wait_for(lambda: queue.pending == 16)
            statuses = [one.result()[1]["status"] for one in found]
        groups = queue.metrics.histograms["group_updates"][()]
    assert sorted(statuses) == ["applied"] * 40 + ["duplicate"] * 40
    assert sets.count(["ann"]) == [40]
    assert sum(groups.counts) < 80
