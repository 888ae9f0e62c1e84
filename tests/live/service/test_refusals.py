"""Bad requests are refused with the reason, and change nothing."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

import pyarrow as pa
import pytest

from setfold.errors import InputError, StoreError
from setfold.live.service import ServiceOptions
from setfold.live.service.options import check_host, read_token
from setfold.live.service.streams import read_stream
from tests.live.service.conftest import body, client_of, commanded, new_store, on_both, served
from tests.live.service.test_endpoints import ARROW, ROWS, arrow, send_arrow, table_of
from tests.live.service.test_limits import post

TOKEN = "0123456789abcdef-secret"
BAD = {
    "not JSON": (b"{", "not JSON"),
    "NaN": (b'{"batch":["a",1],"set":"u","rows":[{"u":"a","x":NaN}]}', "not JSON"),
    "no object": (b"[]", "expected an object"),
    "another key": (b'{"batch":["a",1],"set":"u","rows":[{}],"sets":1}', "'sets'"),
    "no rows": (b'{"batch":["a",1],"set":"u"}', "expected an object"),
    "empty rows": (b'{"batch":["a",1],"set":"u","rows":[]}', "at least one"),
    "rows that are none": (b'{"batch":["a",1],"set":"u","rows":[1]}', "list of objects"),
    "no batch": (b'{"set":"u","rows":[{"u":"a","x":1}]}', "batch must be a source"),
    "a batch that is none": (b'{"batch":"a","set":"u","rows":[{"u":"a","x":1}]}', "batch must be"),
    "a batch of numbers": (b'{"batch":[1,2],"set":"u","rows":[{"u":"a","x":1}]}', "batch must be"),
    "no set": (b'{"batch":["a",1],"rows":[{"u":"a","x":1}]}', "set must be the name"),
    "a set that is none": (b'{"batch":["a",1],"set":3,"rows":[{"u":"a","x":1}]}', "set must be"),
    "features that are none": (
        b'{"batch":["a",1],"set":"u","features":{"x":1},"rows":[{"u":"a","x":1}]}',
        "features must be",
    ),
    "no features": (
        b'{"batch":["a",1],"set":"u","features":[],"rows":[{"u":"a","x":1,"y":1}]}',
        "features must be",
    ),
    "features that are false": (
        b'{"batch":["a",1],"set":"u","features":false,"rows":[{"u":"a","x":1,"y":1}]}',
        "features must be",
    ),
    "a time that is none": (
        b'{"batch":["a",1],"set":"u","time":["t"],"rows":[{"u":"a","x":1}]}',
        "time must be",
    ),
    "a missing column": (
        b'{"batch":["a",1],"set":"u","features":["x","y"],"rows":[{"u":"a","x":1}]}',
        "no row has the column 'y'",
    ),
    "a missing set id": (
        b'{"batch":["a",1],"set":"u","features":["x","y"],"rows":[{"u":null,"x":1,"y":1}]}',
        "",
    ),
    "a missing number": (
        b'{"batch":["a",1],"set":"u","features":["x","y"],'
        b'"rows":[{"u":"a","x":1,"y":1},{"u":"a","x":1}]}',
        "row 1",
    ),
    "text for a number": (
        b'{"batch":["a",1],"set":"u","features":["x","y"],"rows":[{"u":"a","x":"1","y":1}]}',
        "must be a number",
    ),
    "numbers and text": (
        b'{"batch":["a",1],"set":"u","features":["x","y"],'
        b'"rows":[{"u":"a","x":1,"y":1},{"u":"b","x":"1","y":1}]}',
        "integer and text",
    ),
    "an object for a number": (
        b'{"batch":["a",1],"set":"u","features":["x","y"],"rows":[{"u":"a","x":{},"y":1}]}',
        "holds an object",
    ),
    "a list of texts": (
        b'{"batch":["a",1],"set":"u","features":["x"],"rows":[{"u":"a","x":["1","2"]}]}',
        "cannot be read",
    ),
    "too many features": (
        b'{"batch":["a",1],"set":"u","features":["x","y","z"],"rows":[{"u":"a","x":1,"y":1,"z":1}]}',
        "expects 2",
    ),
    "features without order": (
        b'{"batch":["a",1],"set":"u","rows":[{"u":"a","x":1,"y":1}]}',
        "no order",
    ),
    "a number that is too large": (
        b'{"batch":["a",1],"set":"u","features":["x","y"],"rows":[{"u":"a","x":1e400,"y":1}]}',
        "",
    ),
    "a set id that is too large": (
        b'{"batch":["a",1],"set":"u","features":["x","y"],'
        b'"rows":[{"u":18446744073709551615,"x":1,"y":1}]}',
        "cannot be read",
    ),
    "a time in a store without buckets": (
        b'{"batch":["a",1],"set":"u","features":["x","y"],"time":"t",'
        b'"rows":[{"u":"a","x":1,"y":1,"t":0}]}',
        "no buckets",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_json_is_refused_with_the_reason(client, sets, name):
    content, reason = BAD[name]
    answer = client.post(
        "/v1/updates", content=content, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"] in ("InputError", "NonFiniteError")
    assert reason in answer.json()["message"]
    assert sets.count(["a"]) == [0]


@on_both
def test_a_batch_with_other_rows_is_a_conflict(client, sets):
    client.post("/v1/updates", json=body(1, ROWS))
    answer = client.post("/v1/updates", json=body(1, ROWS[:1]))
    assert answer.status_code == 409
    assert "applied before, with other rows" in answer.json()["message"]
    assert sets.count(["ann"]) == [2]


@on_both
def test_bad_requests_do_not_affect_those_of_the_same_group(sets):
    """Ten at once, a bad one among them."""
    from concurrent.futures import ThreadPoolExecutor

    updates = [body(number, [("ann", number, 1)]) for number in range(10)]
    updates[4]["rows"][0]["x"] = "text"
    updates[7]["rows"][0]["user"] = 7  # set ids were text before
    with client_of(sets) as client:
        client.post("/v1/updates", json=body(99, [("ann", 0, 0)]))
        with ThreadPoolExecutor(10) as pool:
            found = list(pool.map(lambda one: client.post("/v1/updates", json=one), updates))
    assert [n for n, one in enumerate(found) if one.status_code == 422] == [4, 7]
    assert sets.count(["ann"]) == [9]


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("text/csv", b"a,b"),
        ("", b"{}"),
        ("application/vnd.apache.arrow.file", b""),
        ("application/python-pickle", b"\x80\x04."),
    ],
)
def test_other_media_types_are_refused(client, kind, content):
    headers = {"Content-Type": kind} if kind else {}
    for path in ("/v1/updates", "/v1/read"):
        answer = client.post(path, content=content, headers=headers)
        assert answer.status_code == 415
        assert "expected a body of type application/json" in answer.json()["message"]
    packed = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert client.post("/v1/updates", content=b"", headers=packed).status_code == 415


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"no stream", "not an Arrow stream"),
        (arrow(table_of(ROWS))[:300], "not an Arrow stream"),
        (arrow(table_of(ROWS))[:-8], "end is missing"),
        (arrow(table_of(ROWS)) + arrow(table_of(ROWS)), "bytes follow its end"),
        (arrow(table_of(ROWS[:2]), compression="zstd"), "compressed"),
        (arrow(table_of(ROWS[:2]), compression="lz4"), "compressed"),
        (arrow(pa.table({"user": ["a"], "x": pa.array(["a"]).dictionary_encode()})), "dictionary"),
        (arrow(pa.table({"user": ["a"], "x": [{"a": 1}]})), "struct"),
        (arrow(pa.table({"user": ["a"], "x": pa.nulls(1)})), "null"),
        (arrow(pa.table([["a"], [1.0], [1.0]], ["user", "x", "x"])), "same name"),
        (arrow(table_of(ROWS).slice(0, 0)), "no rows"),
        (arrow(pa.table({"name": ["a"], "x": [1.0], "y": [1.0]})), "no column 'user'"),
    ],
)
def test_bad_streams_are_refused_with_the_reason(client, content, reason):
    query = {"batch": ["a", "1"], "set": "user", "features": ["x", "y"]}
    answer = client.post(
        "/v1/updates", params=query, content=content, headers={"Content-Type": ARROW}
    )
    assert answer.status_code == 422, answer.text
    assert reason in answer.json()["message"]


def test_offsets_that_point_outside_are_refused(client):
    """A stream may claim anything; reading it unchecked would read other memory."""
    table = pa.table({"user": ["ann", "bob"], "x": [1.0, 2.0], "y": [1.0, 2.0]})
    good = arrow(table)
    place = good.index(b"\0\0\0\0\3\0\0\0\6\0\0\0")  # the offsets of the texts
    bad = good[:place] + b"\0\0\0\0\3\0\0\0\xff\xff\xff\x3f" + good[place + 12 :]
    query = {"batch": ["a", "1"], "set": "user", "features": ["x", "y"]}
    answer = client.post("/v1/updates", params=query, content=bad, headers={"Content-Type": ARROW})
    assert answer.status_code == 422


def test_streams_with_changed_bytes_are_refused_or_read():
    """Arrow itself crashes at some of them, such as a first message that is no schema."""
    generator = random.Random(0)
    for _ in range(3000):
        content = bytearray(arrow(table_of(ROWS)))
        for _ in range(generator.randint(1, 4)):
            content[generator.randrange(len(content))] = generator.choice([0, 1, 2, 4, 127, 255])
        with suppress(InputError):
            read_stream(bytes(content))


def test_a_query_that_is_wrong_is_refused(client):
    for more in ({"sets": "user"}, {"batch": "a"}, {"time": ["a", "b"]}, {"set": ""}):
        answer = send_arrow(client, 1, table_of(ROWS[:2]), **more)
        assert answer.status_code == 422, more


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'{"sets": "ann"}', b'{"sets": [], "tail": 1}', b'{"sets": [{}]}',
     b'{"sets": ["a"], "last": 7}', b'{"sets": ["a"], "head": "yes"}', b'{"sets": ["a"], "last": "x"}'],
)  # fmt: skip
def test_bad_reads_are_refused(client, content):
    client.post("/v1/updates", json=body(1, ROWS))
    answer = client.post("/v1/read", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422, answer.text


@pytest.mark.parametrize("path", [b"/v1/sets/%ff", b"/v1/sets/%ed%a0%80", b"/v1/sets/\xff"])
def test_set_ids_that_are_not_utf8_are_refused(sets, path):
    """Otherwise one would read, and delete, the set of another id."""
    with served(sets) as (port, _):
        post(port, body(1, [("\ufffd", 1, 2)]))
        for method in (b"GET", b"DELETE"):
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(
                    method + b" " + path + b" HTTP/1.1\r\nHost: localhost\r\n"
                    b"Connection: close\r\n\r\n"
                )
                answer = b"".join(iter(lambda raw=raw: raw.recv(4096), b""))
            assert answer.split()[1] in (b"400", b"422"), answer
    assert sets.count(["\ufffd"]) == [1]


def test_other_paths_and_methods(client):
    assert client.get("/v2/updates").status_code == 404
    assert client.get("/v1/updates").status_code == 405
    assert client.put("/v1/sets/ann").status_code == 405
    answer = client.get("/v1/sets/ann", params={"head": "perhaps"})
    assert answer.status_code == 422
    assert answer.json()["message"].startswith("head: ")
    assert client.get("/v1/sets/ann", params={"last": "7d"}).status_code == 422


def test_a_store_that_cannot_be_used_is_503(sets, monkeypatch):
    with client_of(sets) as client:
        client.post("/v1/updates", json=body(1, ROWS))

        def fail(**options):
            raise StoreError("the disk is full.")

        monkeypatch.setattr(sets.database, "writing", fail)
        monkeypatch.setattr(sets.database, "reading", fail)
        for answer in (
            client.post("/v1/updates", json=body(2, ROWS)),
            client.get("/v1/sets/ann"),
            client.get("/v1/sets"),
            client.post("/v1/read", json={"sets": ["ann"]}),
            client.delete("/v1/sets/ann"),
            client.get("/readyz"),
        ):
            assert answer.status_code == 503
            assert answer.json() == {"error": "StoreError", "message": "the disk is full."}
            assert answer.headers["retry-after"] == "1"
        monkeypatch.undo()
        assert client.post("/v1/updates", json=body(2, ROWS)).json()["status"] == "applied"


def test_a_defect_is_500_without_details(sets, monkeypatch):
    with client_of(sets, raise_errors=False) as client:
        monkeypatch.setattr(sets, "update_many", lambda bundles: 1 / 0)
        monkeypatch.setattr(sets, "look_up", lambda *names, **options: 1 / 0)
        for answer in (client.post("/v1/updates", json=body(1, ROWS)), client.get("/v1/sets/ann")):
            assert answer.status_code == 500
            assert "division" not in answer.text


# ---- tokens ------------------------------------------------------------------------------------


def test_only_those_who_have_the_token_pass(sets):
    with client_of(sets, token=TOKEN) as client:
        for headers in (
            {},
            {"Authorization": ""},
            {"Authorization": TOKEN},
            {"Authorization": f"Basic {TOKEN}"},
            {"Authorization": f"Bearer {TOKEN}x"},
            {"Authorization": f"Bearer {TOKEN[:-1]}"},
            {"Authorization": "Bearer \u00e9".encode("latin-1")},
        ):
            for method, path in (
                ("POST", "/v1/updates"), ("GET", "/v1/sets/ann"), ("DELETE", "/v1/sets/ann"),
                ("GET", "/v1/sets"), ("POST", "/v1/read"), ("GET", "/v1/changes"),
                ("GET", "/metrics"), ("GET", "/nothing"), ("GET", "/docs/"),
            ):  # fmt: skip
                answer = client.request(method, path, headers=headers)
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/", "/docs", "/openapi.json", "/healthz", "/readyz"):
            assert client.get(path).status_code == 200
        allowed = {"Authorization": f"Bearer {TOKEN}"}
        assert client.post("/v1/updates", json=body(1, ROWS), headers=allowed).status_code == 200
        assert client.get("/v1/sets/ann", headers=allowed).json()["count"] == 2


def test_without_a_token_only_this_machine_by_its_own_name(sets):
    """Else a page from elsewhere could point a name of its own here, and read with the browser."""
    with client_of(sets) as client:
        for host in ("127.0.0.1", "127.0.0.1:8080", "localhost:1", "LOCALHOST", "[::1]:9", "[::1]"):
            assert client.get("/v1/sets/ann", headers={"Host": host}).status_code == 200
        for host in ("evil.example", "127.0.0.1.evil.example", "evil.example:127", ""):
            assert client.get("/v1/sets/ann", headers={"Host": host}).status_code == 421
    with client_of(sets, token=TOKEN) as client:
        headers = {"Host": "sets.example", "Authorization": f"Bearer {TOKEN}"}
        assert client.get("/v1/sets/ann", headers=headers).status_code == 200


def test_the_token_is_not_shown_and_not_weak():
    assert TOKEN not in repr(ServiceOptions(token=TOKEN))
    for weak in ("", "short", "with a space in it", "\u00e4" * 20, "line\nline-0123456789"):
        with pytest.raises(InputError, match="16 or more"):
            ServiceOptions(token=weak)


def test_a_token_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("SETFOLD_TOKEN", raising=False)
    assert read_token(None) is None
    monkeypatch.setenv("SETFOLD_TOKEN", TOKEN)
    assert read_token(None) == TOKEN
    (tmp_path / "token").write_text(f"{TOKEN}-2\n")
    assert read_token(tmp_path / "token") == f"{TOKEN}-2"
    with pytest.raises(InputError, match="cannot be read"):
        read_token(tmp_path / "other")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_without_a_token_other_machines_are_refused(host):
    with pytest.raises(InputError, match="only for this machine"):
        check_host(host, None)
    check_host(host, TOKEN)


def test_options_that_make_no_sense_are_refused():
    finite = ({"timeout": -1}, {"timeout": float("inf")}, {"timeout": float("nan")})
    for wrong in ({"max_body": 0}, *finite, {"max_updates": 0}, {"max_bodies": 1}):
        with pytest.raises(InputError):
            ServiceOptions(**wrong)


def test_the_command_uses_the_token_of_the_environment(tmp_path):
    import urllib.error
    import urllib.request

    new_store(tmp_path).close()
    with commanded(tmp_path / "live.db", token=TOKEN) as (_, address):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{address}/v1/sets/ann")
        request = urllib.request.Request(
            f"{address}/v1/sets/ann", headers={"Authorization": f"Bearer {TOKEN}"}
        )
        with urllib.request.urlopen(request) as answer:
            assert answer.status == 200
