"""Topics of Kafka: offsets and states change in one transaction, so every record counts once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from setfold.errors import BatchConflictError, InputError, StoreError
from setfold.files.readers.reader import import_optional
from setfold.live.batches import Offsets
from setfold.live.sources.intake import Intake
from setfold.live.sources.records import RecordFrame

SCHEME = "kafka://"
BATCH_ROWS = 10_000
BATCH_SECONDS = 1.0  # how long a record may wait for others
CONNECT_SECONDS = 30.0
SETTINGS = {
    "enable.auto.commit": False,  # the store has the offsets
    "auto.offset.reset": "error",  # no record is left out silently
    "isolation.level": "read_committed",
}


class Topic(NamedTuple):
    """What a URL says: kafka://broker:9092,broker:9092/topic?name=value&...

    Attributes:
        name: The topic.
        partitions: The partitions to read; None for those that the consumer group assigns.
        settings: Settings of the client, as librdkafka names them.
    """

    name: str
    partitions: list[int] | None
    settings: dict[str, Any]

    @classmethod
    def of(cls, url: str) -> Topic:
        """Parse a URL. `config=FILE` names a file of settings, one `name=value` in each line.

        Raises:
            InputError: It is no such URL.

        >>> topic = Topic.of("kafka://here:9092/clicks?partitions=0,2")
        >>> topic.name, topic.partitions, topic.settings["bootstrap.servers"]
        ('clicks', [0, 2], 'here:9092')
        """
        parts = urlsplit(url)
        name, given = parts.path.strip("/"), dict(parse_qsl(parts.query))
        listed = given.pop("partitions", None)
        try:
            partitions = None if listed is None else [int(one) for one in listed.split(",")]
        except ValueError:
            name = ""
        if not (url.startswith(SCHEME) and parts.netloc and name) or "/" in name:
            raise InputError(
                f"expected kafka://broker:9092/topic, and maybe ?partitions=0,1; got {url!r:.80}."
            )
        settings = {**SETTINGS, "bootstrap.servers": parts.netloc, "group.id": f"setfold-{name}"}
        if "config" in given:
            settings |= _read_settings(Path(given.pop("config")))
        return cls(name, partitions, settings | given)


def _read_settings(path: Path) -> dict[str, str]:
    """Return the settings in a file, such as passwords, which do not belong into a URL."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    pairs = [line.partition("=") for line in lines if line and not line.startswith("#")]
    return {name.strip(): value.strip() for name, _, value in pairs}


class TopicSource:
    """Reads a topic from where the store is, until an event is set.

    Several processes share the partitions of a topic, as a consumer group. Should two of them read
    the same one, the store takes the records from one of them.

    Args:
        intake: What takes the rows.
        topic: The topic.
        source: The name of the source in the store; by default the topic.
        rows: How many records are a batch.
        seconds: How long a record waits for others.
        note: Callback that is called with what happened, for people.
    """

    def __init__(
        self,
        intake: Intake,
        topic: Topic,
        source: str | None = None,
        *,
        rows: int = BATCH_ROWS,
        seconds: float = BATCH_SECONDS,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.intake, self.topic, self.source = intake, topic, source or topic.name
        self.rows, self.seconds, self.note = rows, seconds, note
        self.kafka = import_optional("confluent_kafka", "kafka")
        self.next: dict[int, int | None] = {}  # by partition, the offset that comes next
        self.pending: dict[int, list[Any]] = {}  # messages of the next batch

    def run(self, stop: threading.Event) -> None:
        """Read until the event is set. What was read and not applied yet will be read again.

        Raises:
            StoreError: The broker cannot be reached, or records that come next are not there.
            InputError: A record is bad.
        """
        consumer = self.kafka.Consumer(self.topic.settings, logger=_silent())
        try:
            self._check(consumer)
            if self.topic.partitions is None:
                consumer.subscribe(
                    [self.topic.name],
                    on_assign=self._assign,
                    on_revoke=self._revoke,
                    on_lost=self._revoke,
                )
            else:
                parts = [self.kafka.TopicPartition(self.topic.name, p) for p in self._partitions]
                self._assign(consumer, parts)
            while not stop.is_set():
                if self._collect(consumer, stop):
                    self._apply(consumer)
        finally:
            consumer.close()

    @property
    def _partitions(self) -> list[int]:
        return self.topic.partitions or []

    def _check(self, consumer: Any) -> None:
        """Raise StoreError unless the topic can be reached."""
        try:
            found = consumer.list_topics(self.topic.name, timeout=CONNECT_SECONDS)
        except self.kafka.KafkaException as error:
            where = self.topic.settings["bootstrap.servers"]
            raise StoreError(f"cannot reach Kafka at {where}: {error.args[0].str()}.") from error
        topic = found.topics[self.topic.name]
        if topic.error is not None:
            raise StoreError(f"cannot read the topic {self.topic.name}: {topic.error.str()}.")
        if wrong := [part for part in self._partitions if part not in topic.partitions]:
            raise InputError(
                f"the topic {self.topic.name} has no partition {wrong[0]}; it has "
                f"{len(topic.partitions)}."
            )

    # ---- partitions ------------------------------------------------------------------------

    def _assign(self, consumer: Any, parts: Sequence[Any]) -> None:
        """Begin to read partitions, each from where the store is."""
        known = self.intake.sets.positions(self.source)
        for part in parts:
            self.next[part.partition] = known.get(str(part.partition))
            part.offset = known.get(str(part.partition), self.kafka.OFFSET_BEGINNING)
        consumer.assign(parts)

    def _revoke(self, consumer: Any, parts: Sequence[Any]) -> None:
        """Forget partitions that another process reads from now on."""
        for part in parts:
            self.next.pop(part.partition, None)
            self.pending.pop(part.partition, None)

    # ---- batches ---------------------------------------------------------------------------

    def _collect(self, consumer: Any, stop: threading.Event) -> bool:
        """Collect messages until they are a batch; return whether there are any."""
        end = time.monotonic() + self.seconds
        while not stop.is_set():
            count = sum(map(len, self.pending.values()))
            left = end - time.monotonic()
            if count >= self.rows or left <= 0:
                break
            for message in consumer.consume(self.rows - count, min(left, 0.1)):
                if message.error() is not None:
                    self._handle(message)
                else:
                    self.pending.setdefault(message.partition(), []).append(message)
        return any(self.pending.values()) and not stop.is_set()

    def _handle(self, message: Any) -> None:
        """Raise StoreError, if an error does not pass by itself."""
        error, codes = message.error(), self.kafka.KafkaError
        if error.code() == codes._AUTO_OFFSET_RESET:
            part = message.partition()
            raise StoreError(
                f"Kafka no longer has offset {self.next.get(part)} of {self.topic.name}, partition "
                f"{part}, which comes next: records were deleted before they were read."
            )
        if error.code() == codes.UNKNOWN_TOPIC_OR_PART or error.fatal():
            raise StoreError(f"cannot read the topic {self.topic.name}: {error.str()}.")
        self.note(f"Kafka: {error.str()}")

    def _apply(self, consumer: Any) -> None:
        """Apply the messages that were collected, together with their offsets."""
        pending, self.pending = {p: own for p, own in self.pending.items() if own}, {}
        messages = [message for own in pending.values() for message in own]
        ranges: dict[int | str, tuple[int, int]] = {}
        for part, own in pending.items():
            first = self.next.get(part)  # there may be gaps between offsets
            ranges[part] = (own[0].offset() if first is None else first, own[-1].offset() + 1)

        def place_of(row: int) -> str:
            message = messages[row]
            return f"{self.topic.name}, partition {message.partition()}, offset {message.offset()}"

        records = [message.value() or b"null" for message in messages]
        frame = RecordFrame([r if r.strip() else b"null" for r in records], place_of, self.intake)
        try:
            self.intake.apply(frame, Offsets(self.source, ranges))
        except BatchConflictError as error:
            self.note(str(error))
            self._assign(consumer, consumer.assignment())
            return
        self.next |= {int(part): after for part, (_, after) in ranges.items()}


def _silent() -> Any:
    """Return a logger for the messages of librdkafka, which come as errors, too."""
    import logging

    found = logging.getLogger("setfold.kafka")
    found.addHandler(logging.NullHandler())
    found.propagate = False
    return found
