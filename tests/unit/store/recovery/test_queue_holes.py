"""A part of a queue file that became zeros is noticed by the next start."""

from pathlib import Path

import pytest

from halfmq.store.message_store import MessageStore
from tests.support.stores import (
    Clock,
    append_durably,
    crash,
    draft,
    everything,
    maintain,
    small_config,
)

COUNT = 40  # entries, of the 50 in a file


@pytest.mark.parametrize("ending", ["kill", "stop"])
@pytest.mark.parametrize("start", range(0, COUNT * 20 - 40, 95))
def test_zeros_among_the_entries_lead_to_a_rebuild(tmp_path: Path, start: int, ending: str) -> None:
    """Wherever they lie, though the queue's end is where the checkpoint says."""
    store = MessageStore(small_config(tmp_path / "store"), now_ms=Clock())
    store.open()
    append_durably(store, *(draft("quiet", 0, f"{number}".encode()) for number in range(COUNT)))
    for _ in range(200):  # the part of the log that a start scans holds none of them
        append_durably(store, draft("busy", 0, bytes(1_000)))
    maintain(store)
    maintain(store)
    root = tmp_path / "store"
    if ending == "kill":
        root = crash(root, tmp_path / "killed")
        store.close(clean=False)
    else:
        store.close()
    queue = root / "consumequeue" / "quiet" / "0" / f"{0:020}"
    with queue.open("r+b") as file:
        file.seek(start)
        file.write(bytes(40))

    store = MessageStore(small_config(root), now_ms=Clock())
    store.open()
    found = [record.body for record in everything(store) if record.topic == "quiet"]
    store.close()
    assert found == [f"{number}".encode() for number in range(COUNT)]
