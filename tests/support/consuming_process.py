"""A consumer as a process of its own, which tells on standard output what it gets.

Run as ``python -m tests.support.consuming_process NAMESRV GROUP TOPIC FILTER``. Each line is JSON:
``ready`` with its client id, ``event`` with the fields of ``UnequalSubscriptions``, or ``message``
with a body.
"""

from __future__ import annotations

import asyncio
import json
import queue
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from halfmq.client import ClientConfig, Consumer, ConsumerEvent
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
HEARTBEAT_S = 0.2  # so that members learn soon of each other


def say(kind: str, content: object) -> None:
    """Write a line."""
    sys.stdout.write(json.dumps({kind: content}) + "\n")
    sys.stdout.flush()


async def main(namesrv: str, group: str, topic: str, expression: str) -> None:
    """Consume until killed."""

    def tell(event: ConsumerEvent) -> None:
        if event.name == "unequal_subscriptions":
            say("event", {"name": event.name, **asdict(event)})

    config = ClientConfig(namesrv=namesrv, heartbeat_interval=HEARTBEAT_S)
    async with Consumer(group, {topic: expression}, on_event=tell, config=config) as consumer:
        say("ready", consumer.client_id)
        async for message in consumer:
            await message.ack()
            say("message", message.body.decode())


class ConsumingProcess:
    """Such a process as its test sees it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: dict[str, queue.SimpleQueue[Any]] = defaultdict(queue.SimpleQueue)
        assert process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        self._reader.start()

    def next(self, kind: str) -> Any:
        """The content of the next line of this kind."""
        return self._lines[kind].get(timeout=PATIENCE_S)

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                ((kind, content),) = json.loads(line).items()
                self._lines[kind].put(content)


@contextmanager
def consuming(namesrv: str, group: str, topic: str, expression: str) -> Iterator[ConsumingProcess]:
    """A consumer process for the length of the block."""
    words = [sys.executable, "-m", "tests.support.consuming_process"]
    process = subprocess.Popen(
        [*words, namesrv, group, topic, expression], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    consumer = ConsumingProcess(process)
    try:
        yield consumer
    finally:
        consumer.end()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
