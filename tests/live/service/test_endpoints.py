"""Every endpoint does what the library does."""

from __future__ import annotations

import json
import re
from datetime import datetime
from html.parser import HTMLParser
from urllib.parse import quote

import pyarrow as pa
import pytest
import torch
from starlette.testclient import TestClient

import setfold
from setfold import live
from setfold.live.service import make_app
from tests.live.service.conftest import HERE, body, client_of, new_store, on_both

ARROW = "application/vnd.apache.arrow.stream"
ROWS = [("ann", 1, 2), ("bob", 3, 4.5), ("ann", 2, 0)]


def arrow(table, **options):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def table_of(rows):
    return pa.table(dict(zip(("user", "x", "y"), map(list, zip(*rows, strict=True)), strict=True)))


def send_arrow(client, number, table, **more):
    query = {"batch": ["a", str(number)], "set": "user", "features": ["x", "y"], **more}
    headers = {"Content-Type": ARROW}
    return client.post("/v1/updates", params=query, content=arrow(table), headers=headers)


# ---- updates -----------------------------------------------------------------------------------


@on_both
def test_an_update_counts_once(client, sets):
    first = client.post("/v1/updates", json=body(1, ROWS))
    assert first.status_code == 200
    assert first.json() == {"status": "applied", "rows": 3, "sets": 2, "late": 0, "deleted": 0}
    again = client.post("/v1/updates", json=body(1, ROWS))
    assert again.json()["status"] == "duplicate"
    assert sets.count(["ann", "bob"]) == [2, 1]
    assert sets.encode(["ann", "bob"]).tolist() == [[1.5, 1.0], [3.0, 4.5]]


def test_in_json_the_order_of_keys_and_the_form_of_numbers_do_not_matter(client):
    client.post("/v1/updates", json=body(1, ROWS))
    other = [{"y": float(y), "user": user, "x": float(x), "more": "?"} for user, x, y in ROWS]
    again = client.post("/v1/updates", json=body(1, ROWS) | {"rows": other})
    assert again.json()["status"] == "duplicate"


@on_both
def test_rows_as_arrow_are_those_of_json_and_of_the_library(client, sets):
    floats = [(user, float(x), float(y)) for user, x, y in ROWS]
    assert send_arrow(client, 1, table_of(floats)).json()["rows"] == 3
    assert client.post("/v1/updates", json=body(1, ROWS)).json()["status"] == "duplicate"
    same = sets.update(table_of(floats), set="user", features=["x", "y"], batch=("a", 1))
    assert same.status == "duplicate"


def test_many_record_batches_are_one_batch(client, sets):
    table = pa.concat_tables([table_of([(f"u{n}", 1.0, 2.0)]) for n in range(10)])
    assert table.column(0).num_chunks == 10
    assert send_arrow(client, 1, table).json()["sets"] == 10
    assert sets.count([f"u{n}" for n in range(10)]) == [1] * 10


def test_a_vector_is_a_list(tmp_path):
    with new_store(tmp_path, setfold.Pool(3, "mean")) as sets, client_of(sets) as client:
        rows = [{"user": "ann", "v": [1, 2, 3.5]}, {"user": "ann", "v": [3, 2, 1]}]
        update = {"batch": ["a", 1], "set": "user", "rows": rows}
        assert client.post("/v1/updates", json=update).json()["rows"] == 2
        assert client.get("/v1/sets/ann").json()["encoding"] == [2.0, 2.0, 2.25]


def test_times_are_numbers_or_text(tmp_path, monkeypatch):
    monkeypatch.setattr("setfold.live.times.now", lambda: 1_000_000 * 1_700_000_000)
    with new_store(tmp_path, bucket="1d") as sets, client_of(sets) as client:
        for number, at in enumerate(
            [1_700_000_000, "2023-11-14T22:13:20Z", "2023-11-14T23:13:20+01:00"]
        ):
            rows = [{"user": "ann", "x": 1, "y": 1, "at": at}]
            update = body(number, []) | {"rows": rows, "time": "at"}
            assert client.post("/v1/updates", json=update).json()["rows"] == 1
        old = body(9, []) | {"rows": [{"user": "ann", "x": 4, "y": 1, "at": 0}], "time": "at"}
        client.post("/v1/updates", json=old)
        assert client.get("/v1/sets/ann", params={"last": "1d"}).json()["count"] == 3
        assert client.get("/v1/sets/ann").json()["count"] == 4
        answer = client.get("/v1/sets/ann", params={"last": "5h"})
        assert answer.status_code == 422
        assert "multiple" in answer.json()["message"]


def test_a_model_that_reads_its_own_columns_needs_no_features(tmp_path):
    model = reading_model()
    with new_store(tmp_path, model) as sets, client_of(sets) as client:
        rows = [
            {"user": "ann", "kind": "red", "size": 3, "at": "2024-01-01T00:00:00"},
            {"user": "ann", "size": None, "kind": "green", "at": "2024-01-02T01:00:00+01:00"},
        ]
        update = {"batch": ["a", 1], "set": "user", "rows": rows}
        assert client.post("/v1/updates", json=update).json()["rows"] == 2
        found = client.get("/v1/sets/ann", params={"head": True}).json()
    times = pa.array([datetime(2024, 1, 1), datetime(2024, 1, 2)], pa.timestamp("us", "UTC"))
    frame = pa.table(
        {"user": ["ann"] * 2, "kind": ["red", "green"], "size": [3, None], "at": times}
    )
    expected = setfold.encode_frame(model, frame, set="user", head=True)["encoding"].to_pylist()[0]
    assert found["encoding"] == pytest.approx(expected, rel=1e-5)


def reading_model():
    """A model that reads the columns kind and size."""
    columns = setfold.Columns(
        [
            setfold.CategoryColumn("kind", ["red", "blue"], dim=2),
            setfold.NumberColumn("size", missing=True),
            setfold.TimeColumn("at", origin=0),
        ]
    )
    pool = setfold.Pool(columns.dim_out, "mean")
    return setfold.Composition(pool, features=columns, head=torch.nn.Linear(columns.dim_out, 2))


# ---- reads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ann", "a/b", "ä b?&#%", "..", "a+b", "\U0001f600"])
@on_both
def test_any_text_is_a_set_id(client, name):
    client.post("/v1/updates", json=body(1, [(name, 1, 2)]))
    path = f"/v1/sets/{quote(name, safe='')}"
    if name == "..":
        path = "/v1/sets/%2E%2E"
    assert client.get(path).json() == {"set": name, "count": 1, "encoding": [1.0, 2.0]}
    assert client.delete(path).json() == {"elements": 1}
    assert client.get(path).json()["count"] == 0


def test_set_ids_are_integers_or_have_several_columns(tmp_path):
    with new_store(tmp_path) as sets, client_of(sets) as client:
        rows = [{"run": 1, "event": "b", "x": 1, "y": 2}, {"run": 2, "event": "a", "x": 3, "y": 4}]
        update = body(1, []) | {"set": ["run", "event"], "rows": rows}
        assert client.post("/v1/updates", json=update).json()["sets"] == 2
        assert client.get("/v1/sets/2/a").json()["encoding"] == [3.0, 4.0]
        assert client.get("/v1/sets/2/a").json()["set"] == ["2", "a"]
        many = client.post("/v1/read", json={"sets": [[1, "b"], [9, "z"]]}).json()
        assert many["counts"] == [1, 0]
        assert client.get("/v1/sets/two/a").status_code == 422
        assert client.get("/v1/sets/2").status_code == 422
        stream = pa.ipc.open_stream(client.get("/v1/sets").content).read_all()
        assert stream["set_0"].to_pylist() == [1, 2]


@on_both
def test_a_set_that_is_not_there_is_empty(client, sets):
    assert client.get("/v1/sets/nobody").json() == {
        "set": "nobody",
        "count": 0,
        "encoding": sets.encode(["nobody"])[0].tolist(),
    }


@on_both
def test_many_sets_as_json_and_as_arrow(client, sets):
    client.post("/v1/updates", json=body(1, ROWS))
    asked = {"sets": ["bob", "nobody", "ann", "bob"]}
    found = client.post("/v1/read", json=asked).json()
    assert found["sets"] == asked["sets"]
    assert found["counts"] == [1, 0, 2, 1]
    assert found["encodings"] == sets.encode(asked["sets"]).tolist()
    answer = client.post("/v1/read", json=asked, headers={"Accept": ARROW})
    assert answer.headers["content-type"] == ARROW
    table = pa.ipc.open_stream(answer.content).read_all()
    assert table["count"].to_pylist() == found["counts"]
    assert table["encoding"].to_pylist() == found["encodings"]
    assert json.loads(table.schema.metadata[b"shape"]) == [2]
    assert client.post("/v1/read", json=asked, headers={"Accept": "text/csv"}).status_code == 406
    assert client.post("/v1/read", json={"sets": []}).json()["encodings"] == []


@on_both
def test_all_sets_come_sorted(client, sets):
    rows = [(f"user {number:04}", number, 1) for number in range(3000)]
    client.post("/v1/updates", json=body(1, rows[::-1]))
    answer = client.get("/v1/sets")
    table = pa.ipc.open_stream(answer.content).read_all()
    assert table["set"].to_pylist() == [name for name, _, _ in rows]
    assert table["encoding"].to_pylist() == sets.encode([name for name, _, _ in rows]).tolist()


@pytest.mark.parametrize("path", ["/v1/sets", "/v1/sets/ann"])
def test_a_read_with_an_unknown_name_is_refused(client, path):
    answer = client.get(path, params={"lats": "7d"})
    assert answer.status_code == 422
    assert answer.json()["message"] == "expected last and head in the query; got lats."


def test_all_sets_of_an_empty_store(client):
    table = pa.ipc.open_stream(client.get("/v1/sets").content).read_all()
    assert table.column_names == ["set", "count", "encoding"]
    assert len(table) == 0


def test_the_head_predicts(tmp_path):
    torch.manual_seed(0)
    head = torch.nn.Linear(2, 1)
    model = setfold.Composition(setfold.Pool(2, "mean"), head=head)
    with live.create(tmp_path / "live.db", model) as sets, client_of(sets) as client:
        client.post("/v1/updates", json=body(1, [("ann", 1, 2)]))
        plain = client.get("/v1/sets/ann").json()["encoding"]
        predicted = client.get("/v1/sets/ann", params={"head": "true"}).json()["encoding"]
        stream = client.get("/v1/sets", params={"head": "true"}).content
    assert plain == [1.0, 2.0]
    assert predicted == pytest.approx(head(torch.tensor([1.0, 2.0])).tolist(), rel=1e-5)
    assert pa.ipc.open_stream(stream).read_all()["encoding"].to_pylist()[0] == pytest.approx(
        predicted
    )


@on_both
def test_a_deleted_set_is_gone(client, sets):
    client.post("/v1/updates", json=body(1, ROWS))
    assert client.delete("/v1/sets/ann").json() == {"elements": 2}
    assert sets.count(["ann", "bob"]) == [0, 1]
    assert client.delete("/v1/sets/ann").json() == {"elements": 0}


# ---- the service -------------------------------------------------------------------------------


def test_health_and_readiness(sets, monkeypatch):
    app = make_app(sets)
    with TestClient(app, base_url=HERE) as client:
        assert client.get("/healthz").text == "ok\n"
        assert client.get("/readyz").text == "ready\n"
        app.state.service.begin_stop()
        assert client.get("/readyz").status_code == 503
        assert client.get("/healthz").status_code == 200


def test_metrics_count_what_was_done(client):
    client.post("/v1/updates", json=body(1, ROWS))
    client.post("/v1/updates", json=body(1, ROWS))
    client.post("/v1/updates", json=body(1, ROWS[:1]))
    client.get("/v1/sets/ann")
    client.get("/a/b/c")
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.splitlines()
    for expected in (
        'setfold_updates_total{status="applied"} 1',
        'setfold_updates_total{status="duplicate"} 1',
        'setfold_updates_total{status="BatchConflictError"} 1',
        'setfold_rows_total{kind="rows"} 3',
        'setfold_requests_total{path="/v1/updates",method="POST",status="200"} 2',
        'setfold_requests_total{path="/v1/updates",method="POST",status="409"} 1',
        'setfold_requests_total{path="/v1/sets/{id:path}",method="GET",status="200"} 1',
        'setfold_requests_total{path="other",method="other",status="404"} 1',
        "setfold_group_updates_count 3",
        "setfold_waiting_updates 0",
        "setfold_body_bytes 0",
    ):
        assert expected in lines
    form = re.compile(
        r'# (HELP|TYPE) setfold_\w+ .+|setfold_\w+(\{\w+="[^"]*"(,\w+="[^"]*")*\})? [\d.e+-]+'
    )
    assert [line for line in lines if not form.fullmatch(line)] == []


class Loaded(HTMLParser):
    """What a page would load."""

    def __init__(self, text):
        super().__init__()
        self.links, self.scripts = [], 0
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.scripts += tag == "script"
        self.links += [value for name, value in attributes if name in ("src", "href")]


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_the_page_describes_every_endpoint_and_loads_nothing(client, path):
    answer = client.get(path)
    page = Loaded(answer.text)
    assert page.scripts == 0
    assert page.links == ["openapi.json"]
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    paths = client.get("/openapi.json").json()["paths"]
    assert {*paths} == {
        "/v1/updates", "/v1/sets/{id}", "/v1/read", "/v1/sets", "/v1/changes",
        "/healthz", "/readyz", "/metrics",
    }  # fmt: skip
    for described, methods in paths.items():
        for method, operation in methods.items():
            assert f"{method.upper()} {described}" in answer.text
            assert operation["description"]
            assert all("description" in one for one in operation.get("parameters", ()))
