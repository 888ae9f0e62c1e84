"""JSON lines from a pipe: lines that are piped again from the beginning count once."""

from __future__ import annotations

import io
import json
import os
import threading
import time

import pytest

from setfold import live
from setfold.errors import InputError
from setfold.live.sources.intake import Intake
from setfold.live.sources.lines import apply_lines
from tests.live.events import assert_holds, events, slots


@pytest.fixture
def sets(store_url):
    with live.create(store_url, slots()) as found:
        yield found


def lines_of(rows):
    return "".join(json.dumps(row) + "\n" for row in rows.to_dict("records"))


def pipe(sets, text, source="pipe", rows=7, seconds=60.0, stop=None, **options):
    intake = Intake(sets, "user", **options)
    stream = io.BytesIO(text.encode()) if isinstance(text, str) else text
    apply_lines(intake, stream, source, stop or threading.Event(), rows, seconds)
    return intake


def test_lines_count_once(sets):
    text = lines_of(events(1))
    first = pipe(sets, text)
    assert (first.batches, first.rows) == (3, 20)
    again = pipe(sets, text)
    assert (again.batches, again.duplicates) == (0, 3)
    longer = pipe(sets, text + lines_of(events(2)))
    assert (longer.rows, longer.duplicates) == (20, 3)
    assert_holds(sets, slots(), events(1), events(2))
    assert pipe(sets, lines_of(events(3))).rows == 20  # other lines, from the beginning
    assert pipe(sets, text, source="other").rows == 20
    assert_holds(sets, slots(), events(1), events(2), events(3), events(1))


def test_batches_that_ended_early_are_found_again(sets):
    """Lines that arrive slowly make batches of any size. After a crash, all are piped again."""
    text, stop = lines_of(events(1)), threading.Event()
    first, rest = text[: len(text) // 2], text[len(text) // 2 :]
    reading, writing = os.pipe()
    intake = Intake(sets, "user")
    with os.fdopen(reading, "rb") as stream:
        words = (intake, stream, "pipe", stop, 1000, 0.001)
        thread = threading.Thread(target=apply_lines, args=words)
        thread.start()
        with os.fdopen(writing, "w") as file:
            file.write(first)
            file.flush()
            while not intake.batches:  # they have waited long enough
                time.sleep(0.001)
            file.write(rest)
        thread.join()
    assert intake.batches > 1
    again = pipe(sets, text, rows=3)
    assert (again.batches, again.duplicates) == (0, intake.batches)
    assert_holds(sets, slots(), events(1))


def test_a_crash_between_two_batches(sets):
    rows = events(1)
    spoiled = lines_of(rows[:14]) + "{]\n" + lines_of(rows[14:])
    with pytest.raises(InputError, match="standard input, line 15: the line is not valid JSON"):
        pipe(sets, spoiled)
    assert_holds(sets, slots(), rows[:14])
    found = pipe(sets, spoiled, skip=True)
    assert (found.duplicates, found.rows, found.skipped) == (2, 6, 1)
    assert_holds(sets, slots(), rows)


def test_bad_values_are_named_or_skipped(sets):
    bad = [
        '{"user": "ann", "x": 1}',
        '{"user": "ann", "x": 1, "y": "no"}',
        "[1]",
        '{"x": 1, "y": 2}',
    ]
    for line in bad:
        with pytest.raises(InputError, match="standard input, line 2: "):
            pipe(sets, '{"user": "ann", "x": 1, "y": 2}\n' + line, features="x,y")
        with pytest.raises(InputError, match="standard input, line 3: "):  # alone in its batch
            pipe(sets, "\n\n" + line, features="x,y")
    text = "\n".join(['{"user": "ann", "x": 1, "y": 2}', *bad])
    found = pipe(sets, text, features="x,y", skip=True)
    assert (found.rows, found.skipped) == (1, 4)
    found = pipe(sets, "\n".join(bad), source="bad", features="x,y", skip=True)
    assert (found.rows, found.skipped) == (0, 4)


def test_set_ids_keep_their_type(store_url):
    with live.create(store_url, slots()) as sets:
        pipe(sets, '{"user": 7, "x": 1, "y": 2}\n')
        with pytest.raises(InputError, match=r"line 1: column 'user': expected int64; got \"7\""):
            pipe(sets, '{"user": "7", "x": 1, "y": 2}\n', source="text")
        assert sets.count([7]) == [1]


def test_times(store_url, clock):
    with live.create(store_url, slots(), bucket="1h") as sets:
        line = '{"user": "ann", "x": 1, "y": 2, "at": "2001-09-09T01:%s:00Z"}\n'
        pipe(sets, line % 40 + line % 50, time="at")
        assert sets.count(["ann"], last="1h") == [2]
        with pytest.raises(InputError, match=r"line 1: .*'at' is missing"):
            pipe(sets, '{"user": "ann", "x": 1, "y": 2}\n', source="no time", time="at")


def test_lines_that_were_read_are_applied_before_the_end(sets):
    stop, rows = threading.Event(), events(1)

    class Stream(io.BytesIO):
        def __next__(self):
            line = super().__next__()
            if line.strip() == json.dumps(rows.to_dict("records")[9]).encode():
                stop.set()
            return line

    found = pipe(sets, Stream(lines_of(rows).encode()), rows=1000, stop=stop)
    assert 9 <= found.rows <= 20
    again = pipe(sets, lines_of(rows), rows=1000)
    assert again.rows == 20 - found.rows
    assert_holds(sets, slots(), rows)


def test_an_end_while_lines_may_be_known_applies_nothing(sets):
    pipe(sets, lines_of(events(1)), rows=1000)
    stop = threading.Event()
    stop.set()
    found = pipe(sets, lines_of(events(1)), rows=1000, stop=stop)
    assert (found.rows, found.duplicates) in [(0, 0), (0, 1)]
    assert_holds(sets, slots(), events(1))
