"""Topics: offsets and states change together, so every record counts once, whatever crashes."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import random
import threading

import pandas as pd
import pytest

from setfold import live
from setfold.errors import InputError, StoreError
from setfold.live.sources import kafka
from setfold.live.sources.intake import Intake
from setfold.live.sources.kafka import Topic, TopicSource
from tests.killed import die_at
from tests.live.events import NAMES, assert_holds, events, slots
from tests.live.sources.broker import running

pytest.importorskip("confluent_kafka")
PARTS = 4
CRASHES = 20


@pytest.fixture(scope="module")
def broker():
    with running() as found:
        yield found


@pytest.fixture
def topic(broker):
    """A topic of its own for each test."""
    return f"topic-{next(numbers)}"


numbers = itertools.count()


@pytest.fixture
def sets(store_url):
    with live.create(store_url, slots()) as found:
        yield found


def messages_of(rows):
    return [(number % PARTS, json.dumps(row)) for number, row in enumerate(rows.to_dict("records"))]


class Until(threading.Event):
    """An event that is set when some condition holds."""

    def __init__(self, condition):
        super().__init__()
        self.condition = condition

    def is_set(self):
        return super().is_set() or self.condition()


def consume(sets, url, records, *, source=None, size=7, **options):
    """Read a topic until some number of records were read, good or bad."""
    intake = Intake(sets, **{"set": "user", **options})
    stop = Until(lambda: intake.rows + intake.skipped >= records)
    TopicSource(intake, Topic.of(url), source, rows=size, seconds=0.05).run(stop)
    return intake


def test_a_consumer_continues_where_the_store_is(sets, broker, topic):
    url = broker.url(topic, partitions="0,1,2,3")
    broker.send(topic, messages_of(events(1)))
    assert consume(sets, url, 20).rows == 20
    broker.send(topic, messages_of(events(2)))
    found = consume(sets, url, 20)
    assert (found.rows, found.duplicates) == (20, 0)
    assert_holds(sets, slots(), events(1), events(2))
    assert sets.positions(topic) == {str(part): 10 for part in range(PARTS)}
    assert sets.info().batches == 0
    assert consume(sets, url, 40, source="mirror").rows == 40  # another name, from the beginning


def test_crashes_at_any_moment(store_url, broker, topic):
    """A consumer is killed twenty times, at any call of a function; each record counts once."""
    live.create(store_url, slots()).close()
    url, chance, rows = broker.url(topic, partitions="0,1,2,3"), random.Random(0), []

    def work(call):
        with live.open(store_url) as sets:
            left = sum(map(len, rows)) - sum(sets.count(NAMES))
            if call is not None:
                die_at(call)
            consume(sets, url, left, size=16)

    def run(call):
        process = multiprocessing.get_context("fork").Process(target=work, args=(call,))
        process.start()
        process.join()
        return process.exitcode

    while len(rows) < CRASHES:
        rows.append(events(len(rows), 40))
        broker.send(topic, messages_of(rows[-1]))
        assert run(chance.randrange(1, 4500)) == -9
        with live.open(store_url) as sets:
            assert sum(sets.positions(topic).values()) == sum(sets.count(NAMES))
    assert run(None) == 0
    with live.open(store_url) as sets:
        assert_holds(sets, slots(), *rows)


def test_bad_records_are_named_or_skipped(sets, broker, topic):
    good = messages_of(events(1, 6))
    bad = ["{]", None, "", "[1]", '{"user": "ann", "x": 1}', '{"user": null, "x": 1, "y": 2}']
    url = broker.url(topic, partitions="1")
    for number, value in enumerate(bad):
        broker.send(topic, [(1, good[number][1]), (1, value)])
    options = {"features": "x,y", "size": 1}
    for number in range(len(bad)):
        with pytest.raises(InputError, match=f"{topic}, partition 1, offset {2 * number + 1}: "):
            consume(sets, url, 12, **options)
        assert sets.positions(topic) == {"1": 2 * number + 1}
        assert consume(sets, url, 1, skip=True, **options).skipped == 1
    assert_holds(sets, slots(), events(1, 6))


def test_records_of_the_same_part_that_two_consumers_read(sets, broker, topic):
    """The other one comes first: this one notices, and goes on where the store is."""
    rows = events(1)
    broker.send(topic, messages_of(rows))
    url = broker.url(topic, partitions="0,1,2,3")
    intake = Intake(sets, "user")
    notes = []
    stop = Until(lambda: intake.rows >= 12)
    source = TopicSource(intake, Topic.of(url), rows=20, seconds=0.5, note=notes.append)
    original = source._apply

    def late(consumer):
        if not notes:
            ahead = pd.DataFrame(
                [json.loads(value) for part, value in messages_of(rows) if part < 2]
            )
            part = ahead[:8]
            offsets = live.Offsets(topic, {0: (0, 4), 1: (0, 4)})
            sets.update(part, set="user", batch=offsets)
        original(consumer)

    source._apply = late
    source.run(stop)
    assert len(notes) == 1
    assert "continues part" in notes[0]
    assert sum(sets.count(NAMES)) == 20


def test_offsets_that_are_gone_are_not_skipped(sets, broker, topic):
    broker.send(topic, messages_of(events(1, 4)))
    sets.update(events(2), set="user", batch=live.Offsets(topic, {0: (0, 50)}))
    with pytest.raises(StoreError, match=f"no longer has offset 50 of {topic}, partition 0"):
        consume(sets, broker.url(topic, partitions="0"), 1)


def test_brokers_and_partitions_that_are_not_there(sets, broker, topic, monkeypatch):
    broker.send(topic, messages_of(events(1, 4)))
    with pytest.raises(InputError, match="has no partition 9; it has 4"):
        consume(sets, broker.url(topic, partitions="9"), 1)
    monkeypatch.setattr(kafka, "CONNECT_SECONDS", 0.2)
    with pytest.raises(StoreError, match="cannot reach Kafka at 127"):
        consume(sets, "kafka://127.0.0.1:9/clicks", 1)


@pytest.mark.long
def test_a_group_shares_the_partitions(store_url, sets, broker, topic):
    broker.send(topic, messages_of(events(1, 40)))
    # the broker may wait for a member that joins late, for as long as its session lasts
    times = {"session.timeout.ms": 2000, "heartbeat.interval.ms": 200}
    url = broker.url(topic, **times)

    def work():
        with live.open(store_url) as own:
            consume(own, url, 1000)

    processes = [multiprocessing.get_context("fork").Process(target=work) for _ in range(2)]
    for process in processes:
        process.start()
    done, wait = 0, threading.Event()
    while done < 40:
        done = sum(sets.count(NAMES))
        wait.wait(0.05)
    broker.send(topic, messages_of(events(2, 40)))
    while done < 80:
        done = sum(sets.count(NAMES))
        wait.wait(0.05)
    for process in processes:
        process.kill()
        process.join()
    assert_holds(sets, slots(), events(1, 40), events(2, 40))


@pytest.mark.parametrize(
    "url", ["kafka://host", "kafka:///clicks", "kafka://host/a/b", "kafka://host/a?partitions=x"]
)
def test_urls_that_are_none(url):
    with pytest.raises(InputError, match="expected kafka://broker:9092/topic"):
        Topic.of(url)


def test_settings(tmp_path):
    (tmp_path / "client.properties").write_text("# secret\nsasl.password = a=b\n\n")
    config = tmp_path / "client.properties"
    found = Topic.of(f"kafka://a:1,b:2/clicks?security.protocol=SASL_SSL&config={config}")
    assert found.settings["bootstrap.servers"] == "a:1,b:2"
    assert found.settings["sasl.password"] == "a=b"
    assert found.settings["security.protocol"] == "SASL_SSL"
    assert found.settings["auto.offset.reset"] == "error"
    assert (found.name, found.partitions) == ("clicks", None)
