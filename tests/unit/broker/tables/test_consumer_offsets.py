"""Consumer offsets: commit and query, the file of a real broker, and when it is written."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from halfmq.broker.errors import RequestRefusedError
from halfmq.broker.limits.kept import OFFSET_BYTES
from halfmq.broker.tables.consumer_offsets import (
    NO_OFFSET,
    PAIR_BYTES,
    PERSIST_INTERVAL_MS,
    QUEUE_BYTES,
    RESET_BYTES,
    ConsumerOffsetTable,
)
from halfmq.remoting.codes import ResponseCode
from tests.support.broker_doubles import Clock, config_path
from tests.support.golden_store import unpack
from tests.support.tables import load_table


def table(root: Path, clock: Clock, *, bytes_max: int = 1 << 20) -> ConsumerOffsetTable:
    made = ConsumerOffsetTable(
        config_path(root, "consumerOffset.json"), now_ms=clock, bytes_max=bytes_max
    )
    made.load()
    return made


def save_if_due(offsets: ConsumerOffsetTable) -> None:
    """Write the file as the broker's ticker does."""
    job = offsets.persist_job()
    if job is not None:
        job()


def test_a_query_returns_the_latest_commit(tmp_path: Path) -> None:
    """By group, topic and queue; an offset may decrease."""
    offsets = table(tmp_path, Clock())
    offsets.commit("g", "T", 0, 5)
    offsets.commit("g", "T", 0, 3)
    offsets.commit("g", "T", 99, 1)

    assert offsets.query("g", "T", 0) == 3
    assert offsets.query("g", "T", 99) == 1
    assert offsets.query("g", "T", 1) == NO_OFFSET
    assert offsets.query("g", "U", 0) == NO_OFFSET
    assert offsets.query("h", "T", 0) == NO_OFFSET


def test_the_file_of_a_real_broker_loads_with_every_offset(tmp_path: Path) -> None:
    """With its integer keys, as Apache RocketMQ 5.3.3 wrote them."""
    golden = unpack("plain-clean", tmp_path)
    offsets = table(golden.root, Clock())

    for key, queues in golden.truth["consumerOffsets"].items():
        topic, _, group = key.partition("@")
        for queue_id, offset in queues.items():
            assert offsets.query(group, topic, int(queue_id)) == offset


def test_offsets_are_written_at_most_every_interval(tmp_path: Path) -> None:
    """A commit does not access the disk; the file follows within seconds."""
    clock = Clock()
    offsets = table(tmp_path, clock)
    path = config_path(tmp_path, "consumerOffset.json")
    offsets.commit("g", "T", 0, 5)
    save_if_due(offsets)
    assert not path.exists()

    clock.now += PERSIST_INTERVAL_MS
    save_if_due(offsets)
    assert load_table(path) is not None
    written = path.stat().st_mtime_ns, path.stat().st_ino

    clock.now += PERSIST_INTERVAL_MS
    save_if_due(offsets)  # nothing changed
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == written


def test_saved_offsets_are_loaded_after_a_restart(tmp_path: Path) -> None:
    """The file has the keys of RocketMQ."""
    clock = Clock()
    offsets = table(tmp_path, clock)
    offsets.commit("g", "T", 0, 5)
    offsets.commit("g", "T", 3, -1)
    offsets.commit("g", "%RETRY%g", 0, 7)
    offsets.persist()

    saved = load_table(config_path(tmp_path, "consumerOffset.json"))
    assert saved is not None
    assert saved["offsetTable"] == {"T@g": {"0": 5, "3": -1}, "%RETRY%g@g": {"0": 7}}
    assert table(tmp_path, clock).query("g", "%RETRY%g", 0) == 7


def test_the_derived_map_of_a_foreign_file_is_not_kept(tmp_path: Path) -> None:
    """It would be wrong after the first commit, and no reader needs it."""
    golden = unpack("delay-retry-dlq", tmp_path)
    offsets = table(golden.root, Clock())
    offsets.commit("cg_retry", "retry_t", 0, 8)
    offsets.persist()
    saved = load_table(config_path(golden.root, "consumerOffset.json"))

    assert saved is not None
    assert "groupTopicMap" not in saved
    assert saved["offsetTable"]["retry_t@cg_retry"] == {"0": 8}
    assert saved["offsetTable"]["sql_t@cg_sql"] == {"0": 10}


def test_the_version_steps_once_in_five_hundred_commits(tmp_path: Path) -> None:
    """As in RocketMQ, whose slaves compare it."""
    offsets = table(tmp_path, Clock())
    for offset in range(1_001):
        offsets.commit("g", "T", 0, offset)
    offsets.persist()
    saved = load_table(config_path(tmp_path, "consumerOffset.json"))

    assert saved is not None
    assert saved["dataVersion"]["counter"] == 2


def test_an_older_write_never_replaces_a_newer_one(tmp_path: Path) -> None:
    """A slow thread must not bring old offsets back."""
    clock = Clock()
    offsets = table(tmp_path, clock)
    offsets.commit("g", "T", 0, 1)
    clock.now += PERSIST_INTERVAL_MS
    late = offsets.persist_job()
    offsets.commit("g", "T", 0, 2)
    offsets.persist()
    assert late is not None
    late()

    assert table(tmp_path, clock).query("g", "T", 0) == 2


def test_a_failed_write_is_tried_again(tmp_path: Path) -> None:
    """A full disk loses seconds of progress, not all of it."""
    clock = Clock()
    (tmp_path / "config").write_text("in the way")
    offsets = ConsumerOffsetTable(config_path(tmp_path, "consumerOffset.json"), now_ms=clock)
    offsets.commit("g", "T", 0, 1)
    clock.now += PERSIST_INTERVAL_MS
    save_if_due(offsets)
    (tmp_path / "config").unlink()
    clock.now += PERSIST_INTERVAL_MS
    save_if_due(offsets)

    assert table(tmp_path, clock).query("g", "T", 0) == 1


def test_a_full_table_accepts_commits_of_known_queues(tmp_path: Path) -> None:
    """Clients may name any queue id; this must not harm other consumers."""
    offsets = table(tmp_path, Clock(), bytes_max=510)
    offsets.commit("g", "T", 0, 1)
    offsets.commit("g", "T", 1, 1)
    with pytest.raises(RequestRefusedError, match="the limit is 510 bytes"):
        offsets.commit("g", "T", 2, 1)
    with pytest.raises(RequestRefusedError, match="the limit is 510 bytes"):
        offsets.reset("g", "T", 0, 1)
    offsets.commit("g", "T", 1, 2)

    assert offsets.query("g", "T", 1) == 2


@pytest.mark.parametrize("queues", [1, 8, 100])
def test_offsets_take_at_most_the_memory_that_is_counted(tmp_path: Path, queues: int) -> None:
    """Whoever fills the table fills no more memory than operators plan."""
    offsets = table(tmp_path, Clock(), bytes_max=OFFSET_BYTES.most)
    count = 20_000 // queues
    tracemalloc.start()
    try:
        for number in range(count):
            for queue_id in range(queues):
                offsets.commit(f"group-{number}", f"topic-{number}", queue_id, 10**6 + number)
        committed, _ = tracemalloc.get_traced_memory()
        counted = offsets.kept()[OFFSET_BYTES]
        assert committed <= counted
        for number in range(count):
            for queue_id in range(queues):
                offsets.reset(f"group-{number}", f"topic-{number}", queue_id, 10**7 + number)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    kept = offsets.kept()[OFFSET_BYTES]
    assert taken <= kept

    offsets.persist()
    assert table(tmp_path, Clock()).kept()[OFFSET_BYTES] == kept
    for _ in offsets.forget(group="group-0"):
        pass
    for number in range(count):
        for queue_id in range(queues):
            offsets.end_reset(f"group-{number}", f"topic-{number}", queue_id)
    each = PAIR_BYTES + len("topic-0@group-0") + QUEUE_BYTES * queues
    assert offsets.kept()[OFFSET_BYTES] == counted - each
    for _ in offsets.forget(topic="topic-1"):
        pass
    assert offsets.kept()[OFFSET_BYTES] == counted - 2 * each + sum(
        RESET_BYTES + len(f"topic-1@group-1@{queue_id}") for queue_id in range(queues)
    )


@pytest.mark.parametrize("group", ["CID_RMQ_SYS_TRANS", "CID_RMQ_SYS_REVIVE_GROUP"])
def test_clients_cannot_commit_offsets_of_system_groups(tmp_path: Path, group: str) -> None:
    """A RocketMQ broker that takes over the store would use them."""
    offsets = table(tmp_path, Clock())

    with pytest.raises(RequestRefusedError, match="broker's own") as refusal:
        offsets.commit(group, "RMQ_SYS_TRANS_HALF_TOPIC", 0, 7)

    assert refusal.value.code == ResponseCode.NO_PERMISSION
    assert offsets.query(group, "RMQ_SYS_TRANS_HALF_TOPIC", 0) == NO_OFFSET


def test_the_event_loop_copies_no_offsets_for_a_save(tmp_path: Path) -> None:
    """The writing thread copies them one by one, while commits continue."""
    copied: list[int] = []

    class Counted(dict[int, int]):
        def copy(self) -> dict[int, int]:
            copied.append(1)
            return super().copy()

    clock = Clock()
    offsets = table(tmp_path, clock)
    for number in range(100):
        offsets.commit("g", f"T{number}", 0, number)
    # Nothing public shows which thread copies the queues.
    offsets._offsets = {key: Counted(queues) for key, queues in offsets._offsets.items()}
    clock.now += PERSIST_INTERVAL_MS

    job = offsets.persist_job()
    assert job is not None
    assert not copied
    offsets.commit("g", "T7", 0, 1_000)
    job()

    assert len(copied) == 100
    assert table(tmp_path, clock).query("g", "T7", 0) == 1_000
    clock.now += PERSIST_INTERVAL_MS
    assert offsets.persist_job() is not None  # for what came after the job was made
