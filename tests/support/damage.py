"""Damage to files of a store, for tests of its detection."""

import zlib
from pathlib import Path

from halfmq.store.message_store import MessageStore
from tests.support.stores import Clock, append_durably, draft, small_config


def fill(store: MessageStore, count: int) -> None:
    """Append records of several queues, sizes and kinds, so that all kinds of files roll."""
    for number in range(count):
        properties = {"UNIQ_KEY": f"7F0000010001{number:020X}", "TAGS": f"tag-{number % 3}"}
        if number % 4 == 0:
            properties["KEYS"] = f"order-{number} customer-{number % 7}"
        body = bytes(number % 50) + b"x" * 300
        store.append([draft("orders", number % 2, body, properties=properties)])
    append_durably(store, draft("events", 0, b"last", properties={"KEYS": "last"}))


def filled_store(root: Path, count: int) -> Path:
    """Return a cleanly closed store of ``count`` orders and one event."""
    store = MessageStore(small_config(root), now_ms=Clock())
    store.open()
    fill(store, count)
    store.close()
    return root


def flip(path: Path, position: int, bit: int = 0) -> None:
    """Flip one bit of a file in place."""
    with path.open("r+b") as file:
        file.seek(position)
        value = file.read(1)[0]
        file.seek(position)
        file.write(bytes([value ^ 1 << bit]))


def extend(root: Path, queue: Path, queue_offset: int) -> None:
    """Write an entry's tags code as RocketMQ does with ``enableConsumeQueueExt``."""
    ahead = 20  # the unit of an earlier entry
    content = bytearray(queue.read_bytes())
    code = content[queue_offset * 20 + 12 : queue_offset * 20 + 20]
    unit = (20).to_bytes(2, "big") + code + bytes(8 + 2)
    directory = root / "consumequeue_ext" / queue.parent.parent.name / queue.parent.name
    directory.mkdir(parents=True)
    (directory / f"{0:020}").write_bytes((bytes(ahead) + unit).ljust(4096, b"\0"))
    content[queue_offset * 20 + 12 : queue_offset * 20 + 20] = (ahead | 1 << 63).to_bytes(8, "big")
    queue.write_bytes(content)


def only(directory: Path, number: int = 0) -> Path:
    """Return one of the files of a directory, by its index in the order of names."""
    return sorted(path for path in directory.iterdir() if path.is_file())[number]


def content_of(root: Path) -> dict[str, tuple[int, int, int]]:
    """Return date, size and checksum of each file, which a read-only tool must not change."""
    return {
        str(path.relative_to(root)): (
            path.stat().st_mtime_ns,
            path.stat().st_size,
            zlib.crc32(path.read_bytes()),
        )
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }
