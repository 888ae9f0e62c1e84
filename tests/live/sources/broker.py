"""A broker of Kafka in a process of its own: that of librdkafka's tests."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager

SCRIPT = """
import json, sys
from confluent_kafka import Producer

owner = Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "none", "log_level": 2})
(broker,) = owner.list_topics(timeout=10).brokers.values()
print(f"{broker.host}:{broker.port}", flush=True)
producer = Producer({"bootstrap.servers": f"{broker.host}:{broker.port}", "log_level": 2})
for line in sys.stdin:
    topic, messages = json.loads(line)
    for partition, value in messages:
        producer.produce(topic, None if value is None else value.encode(), partition=partition)
    print(producer.flush(10), flush=True)
"""


class Broker:
    """A running broker. A topic is made by sending to it, and has four partitions."""

    def __init__(self, process):
        self.process, self.address = process, process.stdout.readline().strip()

    def url(self, topic, **options):
        query = "&".join(f"{name}={value}" for name, value in options.items())
        return f"kafka://{self.address}/{topic}?{query}"

    def send(self, topic, messages):
        """Send messages, each a partition and a text, and wait until the broker has them."""
        self.process.stdin.write(json.dumps([topic, messages]) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline().strip() == "0"


@contextmanager
def running():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SCRIPT], **pipes) as process:
        try:
            yield Broker(process)
        finally:
            process.kill()
