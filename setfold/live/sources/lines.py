"""JSON lines from a pipe.

A pipe has no offsets. A batch is identified by the name of the source, by the numbers of its lines,
counted from the beginning of the pipe, and by the digest of their bytes. If the same lines are piped
again from the beginning, after a crash for example, they are divided into the same batches as far
as they were applied, and these count once.
"""

from __future__ import annotations

import hashlib
import queue
import re
import threading
import time
from collections.abc import Sequence
from typing import BinaryIO

from setfold.live.batches import Identity
from setfold.live.contents import DIGEST_BYTES
from setfold.live.sources.intake import Intake
from setfold.live.sources.records import RecordFrame

BATCH_ROWS = 10_000
BATCH_SECONDS = 1.0  # how long a line may wait for others
AHEAD = 1 << 16  # lines that are read ahead
KEY = re.compile(r"(\d+)-(\d+):[0-9a-f]+$")


class Lines:
    """The lines of a pipe, read by a thread, so that waiting for them can end.

    Args:
        stream: The pipe.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self.queue: queue.Queue[bytes | None] = queue.Queue(AHEAD)
        self.ended = self.stopped = False
        threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream: BinaryIO) -> None:
        for line in stream:
            self.queue.put(line)
            if self.stopped:
                break
        self.queue.put(None)

    def take(self, seconds: float | None) -> bytes | None:
        """Return the next line; None if there is none within some time, or none any more."""
        if self.ended:
            return None
        try:
            line = self.queue.get(timeout=seconds)
        except queue.Empty:
            return None
        self.ended = line is None
        return line

    def rest(self) -> list[bytes]:
        """Read no more; return the lines that were read already."""
        self.stopped, found = True, []
        while (line := self.take(0)) is not None:
            found.append(line)
        return found


def apply_lines(
    intake: Intake,
    stream: BinaryIO,
    source: str,
    stop: threading.Event,
    rows: int = BATCH_ROWS,
    seconds: float = BATCH_SECONDS,
) -> None:
    """Apply JSON lines in batches, until the pipe ends or an event is set.

    Args:
        intake: What takes the rows.
        stream: The pipe.
        source: The name of the source.
        stop: The event. Lines that were read already are applied.
        rows: How many lines are a batch.
        seconds: How long a line waits for others.
    """
    sizes, lines, first = _sizes_before(intake, source), Lines(stream), 0
    while not lines.ended:
        some: list[bytes] = []
        for size in sizes.get(first, ()):  # wait: they may be the same lines as before
            _collect(lines, some, size, None, stop)
            if len(some) == size and intake.knows(_identity(source, first, some)):
                intake.duplicates += 1
                break
            if len(some) < size and stop.is_set():
                return  # nobody knows whether they were applied
        else:
            _collect(lines, some, max(rows, len(some)), seconds, stop)
            some += lines.rest() if stop.is_set() else []
            _apply(intake, source, first, some)
        first += len(some)
        if stop.is_set():
            return


def _sizes_before(intake: Intake, source: str) -> dict[int, list[int]]:
    """Return the sizes of batches that were applied before, by the number of their first line."""
    with intake.sets.database.reading() as view:
        keys = [KEY.match(key) for key in view.keys_of(source)]
    found: dict[int, list[int]] = {}
    for first, last in sorted((int(key[1]), int(key[2])) for key in keys if key is not None):
        found.setdefault(first, []).append(last - first + 1)
    return found


def _collect(
    lines: Lines, some: list[bytes], size: int, seconds: float | None, stop: threading.Event
) -> None:
    """Append lines until there are `size`, or the first one has waited for some time."""
    end = None
    while len(some) < size and not (lines.ended or stop.is_set()):
        if some and end is None and seconds is not None:
            end = time.monotonic() + seconds
        left = 0.1 if end is None else end - time.monotonic()  # now and then, look at the event
        if left <= 0:
            return
        line = lines.take(min(left, 0.1))
        if line is not None:
            some.append(line)


def _identity(source: str, first: int, lines: Sequence[bytes]) -> Identity:
    digest = hashlib.blake2b(b"".join(lines), digest_size=DIGEST_BYTES).hexdigest()
    return Identity.of((source, f"{first}-{first + len(lines) - 1}", digest))


def _apply(intake: Intake, source: str, first: int, lines: Sequence[bytes]) -> None:
    numbers = [number for number, line in enumerate(lines) if line.strip()]
    if not numbers:
        return

    def place_of(row: int) -> str:
        return f"standard input, line {first + numbers[row] + 1}"

    frame = RecordFrame([lines[number] for number in numbers], place_of, intake)
    intake.apply(frame, _identity(source, first, lines))
