"""A process that appends and prints what is durable, until it is killed.

Run as ``python -m tests.support.store_child ROOT SEED [FILES]``. Each line on standard output is
one record that is on disk: ``topic queue_id queue_offset physical_offset crc32 of the record``.
With FILES it keeps deleting old files of the log, all but so many.
"""

import os
import random
import sys
import zlib
from pathlib import Path

from halfmq.store.log.append_request import AppendResult
from halfmq.store.message_store import MessageStore
from tests.support.stores import BORN, draft, small_config, wait_until

TOPICS = ("orders", "events", "RMQ_SYS_TRANS_HALF_TOPIC")
STEP = 40  # ms by which the clock advances per call, so that checkpoints are seconds apart


class SteppingClock:
    """A clock that continues at the end of the log, in steps that do not depend on real time."""

    def __init__(self) -> None:
        self.now = BORN

    def __call__(self) -> int:
        self.now += STEP
        return self.now


def acknowledge(store: MessageStore, done: list[AppendResult], keys: list[tuple[str, int]]) -> None:
    lines = []
    for (topic, queue_id), appended in zip(keys, done, strict=True):
        encoded = store.reader.record_bytes(appended.physical_offset)
        assert encoded is not None
        lines.append(
            f"{topic} {queue_id} {appended.queue_offset} {appended.physical_offset}"
            f" {zlib.crc32(encoded)}\n"
        )
    os.write(1, "".join(lines).encode())


def main(root: Path, seed: int, keep: int | None = None) -> None:
    """Append groups for ever."""
    choose = random.Random(seed)
    clock = SteppingClock()
    config = small_config(root, flush_interval_consume_queue_ms=5)
    store = MessageStore(config, now_ms=clock)
    store.open()
    for record in store.reader.scan(0):
        clock.now = record.store_timestamp
    number = 0
    while True:
        keys = [(choose.choice(TOPICS), choose.randrange(3)) for _ in range(choose.randrange(1, 9))]
        group = []
        for key in keys:
            number += 1
            body = choose.randbytes(choose.choice([0, 10, 300, 3000]))
            properties = {"UNIQ_KEY": f"{seed}-{number}", "TAGS": choose.choice("ab")}
            group.append(draft(*key, body, properties=properties))
        done = store.append(group, contiguous=len(group) < 5)  # larger groups may not fit a file
        if keep is not None:
            store.deletion.delete_before(store.write_offset - keep * config.commit_log_file_size)
        store.tick()
        if choose.random() < 0.8:  # the others are flushed with later ones
            store.request_flush()
            wait_until(lambda end=done[-1].end: store.durable_offset >= end)  # type: ignore[misc]
            acknowledge(store, done, keys)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
