"""Stores that were stopped or killed, and then damaged and opened again."""

import shutil
from pathlib import Path

from halfmq.store.message_store import MessageStore, RecoveryReport
from tests.support.stores import Clock, draft, everything, small_config

FILE_SIZE = 16_384
QUEUE_FILE_SIZE = 1000
NEVER = 3_600_000  # ms


def open_store(root: Path, **changes: object) -> tuple[MessageStore, RecoveryReport]:
    """Open a store with small files whose queues and checkpoint are flushed only when closed."""
    settings = {"flush_interval_consume_queue_ms": NEVER} | changes
    store = MessageStore(small_config(root, **settings), now_ms=Clock())
    return store, store.open()


def filled(root: Path, count: int = 195) -> list[int]:
    """Create a cleanly closed store with messages in four queues; return their offsets."""
    store, _ = open_store(root)
    done = []
    for number in range(count):
        key = ("T", 0) if number % 2 else ("U", number % 3)
        properties = {"UNIQ_KEY": f"u{number}", "TAGS": "A"}
        done += store.append([draft(*key, body=b"%05d" % number * 100, properties=properties)])
    store.close()
    return [appended.physical_offset for appended in done]


def log_path(root: Path, base: int) -> Path:
    """Return the path of a log file."""
    return root / "commitlog" / f"{base:020d}"


def patch(path: Path, position: int, content: bytes) -> None:
    """Overwrite bytes of a file."""
    with path.open("r+b") as file:
        file.seek(position)
        file.write(content)


def log_patch(root: Path, offset: int, content: bytes) -> None:
    """Overwrite bytes of the log at a physical offset."""
    patch(log_path(root, offset - offset % FILE_SIZE), offset % FILE_SIZE, content)


def mark_aborted(root: Path) -> None:
    """Let the next start find that the store was killed."""
    (root / "abort").write_text("1")


def forget_mark(root: Path) -> None:
    """Erase the durable mark, as a power cut may."""
    patch(root / "checkpoint", 512, bytes(16))


def forget_digests(root: Path) -> None:
    """Let a start after a kill scan whole files of the log, and not only the end."""
    shutil.rmtree(root / "digests")


def served(store: MessageStore) -> list[int]:
    """Return the physical offsets of all messages that consumers can get."""
    return [record.physical_offset for record in everything(store)]


def remove_queues(root: Path) -> None:
    """Delete all queues."""
    shutil.rmtree(root / "consumequeue")


def remove_one_queue(root: Path) -> None:
    """Delete one queue."""
    shutil.rmtree(root / "consumequeue" / "T" / "0")


def remove_everything_derived(root: Path) -> None:
    """Delete queues, index and checkpoint."""
    remove_queues(root)
    shutil.rmtree(root / "index")
    (root / "checkpoint").unlink(missing_ok=True)
