"""Consume queues as consumers see them: pulls, filters, visibility and searches by time."""

import errno
import random
import resource
from pathlib import Path

import pytest

from halfmq.store.config import FlushMode
from halfmq.store.files import disk
from halfmq.store.files.mapped_file_queue import MappedFileQueue
from halfmq.store.format.properties import tag_hash
from halfmq.store.format.queue_entry import PRE_BLANK, QueueEntry
from halfmq.store.format.record import decode_records
from halfmq.store.message_store import GetStatus, MessageStore
from halfmq.store.queue.consume_queue import ConsumeQueue, MapPool
from halfmq.store.queue.pull_selection import select
from tests.support.stores import (
    Clock,
    append_durably,
    draft,
    everything,
    flush,
    pulled,
    queue_files,
    small_config,
    wait_until,
)


@pytest.mark.parametrize(
    ("offset", "status", "following"),
    [
        (0, GetStatus.FOUND, 3),
        (2, GetStatus.FOUND, 3),
        (3, GetStatus.OFFSET_OVERFLOW_ONE, 3),
        (4, GetStatus.OFFSET_OVERFLOW_BADLY, 3),
        (-1, GetStatus.OFFSET_TOO_SMALL, 0),
    ],
)
def test_a_pull_returns_the_offset_to_continue_at(
    store: MessageStore, offset: int, status: GetStatus, following: int
) -> None:
    """Statuses and next offsets are RocketMQ's, because clients act on them."""
    append_durably(store, draft(), draft(), draft())

    result = store.queues.get("T", 0, offset)

    assert (result.status, result.next_offset) == (status, following)
    assert (result.min_offset, result.max_offset) == (0, 3)


def test_a_pull_from_an_unknown_or_empty_queue_has_its_own_status(store: MessageStore) -> None:
    """Clients distinguish an unknown queue from an empty one."""
    store.append([draft(sys_flag=0xC)])  # names the queue, but has no entry in it

    assert store.queues.get("nowhere", 0, 0).status is GetStatus.NO_MATCHED_LOGIC_QUEUE
    assert store.queues.get("T", 0, 5).status is GetStatus.NO_MESSAGE_IN_QUEUE
    assert store.queues.bounds("nowhere", 0) == (0, 0)


def test_adjacent_messages_are_one_range(store: MessageStore) -> None:
    """Messages stored together need one read; those with others in between need several."""
    done = append_durably(store, draft(), draft(), draft("U"), draft(), draft("U"), draft("U"))

    result = store.queues.get("T", 0, 0)

    assert result.ranges == [
        (0, done[1].end),
        (done[3].physical_offset, done[3].size),
    ]
    assert (result.count, result.size) == (3, sum(done[place].size for place in (0, 1, 3)))


@pytest.mark.parametrize(("max_count", "count"), [(0, 1), (1, 1), (7, 7), (100, 20)])
def test_a_pull_is_limited_by_count(store: MessageStore, max_count: int, count: int) -> None:
    """It returns at least one message, for any limit."""
    append_durably(store, *(draft() for _ in range(20)))

    result = store.queues.get("T", 0, 0, max_count=max_count)

    assert (result.count, result.next_offset) == (count, count)


@pytest.mark.parametrize("tags", [None, frozenset({tag_hash("A")})])
def test_a_pull_is_limited_by_bytes(store: MessageStore, tags: frozenset[int] | None) -> None:
    """The first message is returned at any size; after it the sum is limited."""
    done = append_durably(
        store, *(draft(body=bytes(500), properties={"TAGS": "A"}) for _ in range(9))
    )
    size = done[0].size

    assert store.queues.get("T", 0, 0, max_bytes=1, tag_codes=tags).count == 1
    assert store.queues.get("T", 0, 0, max_bytes=3 * size - 1, tag_codes=tags).count == 2
    result = store.queues.get("T", 0, 0, max_bytes=3 * size, tag_codes=tags)
    assert (result.count, result.next_offset) == (3, 3)


def test_a_filter_compares_tags(store: MessageStore) -> None:
    """Messages with other tags, or none, are skipped, and the next pull begins after them."""
    tags = ["A", "B", "", "B", "C", "B", "A"]
    append_durably(store, *(draft(properties={"TAGS": tag}) for tag in tags))

    result = store.queues.get("T", 0, 0, tag_codes=frozenset({tag_hash("B")}))

    encoded = store.reader.read(result.ranges)
    assert encoded is not None
    assert [record.queue_offset for record in decode_records(encoded)] == [1, 3, 5]
    assert result.next_offset == 7
    both = store.queues.get(
        "T", 0, 0, tag_codes=frozenset({tag_hash("B"), tag_hash("C")}), max_count=2
    )
    assert (both.count, both.next_offset) == (2, 4)


def test_a_pull_makes_progress_even_if_no_message_matches(store: MessageStore) -> None:
    """A pull examines at most 800 entries, so that it does not take long."""
    for _ in range(10):
        append_durably(store, *(draft(properties={"TAGS": "A"}) for _ in range(100)))

    result = store.queues.get("T", 0, 0, tag_codes=frozenset({1}))

    assert (result.status, result.next_offset) == (GetStatus.NO_MATCHED_MESSAGE, 800)
    assert result.ranges == []


def test_a_filter_compares_the_low_half_of_the_code(store: MessageStore) -> None:
    """Due times in the schedule topic use all 64 bits; RocketMQ compares 32 of them."""
    append_durably(store, draft(tags_code=(5 << 32) | 0xFFFF_FFFF))

    assert store.queues.get("T", 0, 0, tag_codes=frozenset({-1})).status is GetStatus.FOUND


def test_messages_that_are_not_on_disk_are_not_visible(tmp_path: Path) -> None:
    """Under SYNC_FLUSH no consumer gets a message that a power cut could remove."""
    seen: list[int] = []
    blocked = [True]

    def fdatasync(_: int) -> None:
        seen.append(1)
        wait_until(lambda: not blocked[0])

    store = MessageStore(
        small_config(tmp_path, flush_interval_ms=1), now_ms=Clock(), fdatasync=fdatasync
    )
    store.open()
    done = store.append([draft(), draft()])

    assert store.queues.bounds("T", 0) == (0, 0)
    assert store.queues.get("T", 0, 0).status is GetStatus.NO_MESSAGE_IN_QUEUE
    assert store.queues.offset_by_time("T", 0, 0) == 0
    assert store.queues.store_time_at("T", 0, 0) == -1
    assert store.reader.record_bytes(0) is None
    assert store.index.query("T", "x", 9, 0, 1 << 60) == []
    blocked[0] = False
    flush(store)
    assert store.queues.bounds("T", 0) == (0, 2)
    assert store.readable_offset == done[-1].end
    store.close()


def test_async_flush_shows_messages_at_once(tmp_path: Path) -> None:
    """With this setting no message waits for the disk."""
    config = small_config(tmp_path, flush_mode=FlushMode.ASYNC_FLUSH, flush_interval_ms=3_600_000)
    store = MessageStore(config, now_ms=Clock())
    store.open()

    store.append([draft()])

    assert store.durable_offset == 0
    assert store.queues.bounds("T", 0) == (0, 1)
    assert store.queues.get("T", 0, 0).status is GetStatus.FOUND
    store.close()


def test_a_queue_is_visible_up_to_the_flushed_offset(tmp_path: Path) -> None:
    """Only whole messages are visible, for any flushed offset."""
    store = MessageStore(small_config(tmp_path), now_ms=Clock())
    store.open()
    done = append_durably(store, *(draft(queue_id=place % 2) for place in range(150)))
    queue = queue_files(store)["T", 0]

    for place, appended in enumerate(done):
        assert queue.visible_end(appended.end - 1) == (place + 1) // 2
        assert queue.visible_end(appended.end) == place // 2 + 1
    store.close()


def test_a_pull_with_cold_queue_entries_does_not_wait(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lagging consumer waits for the disk in a thread; one that keeps up does not wait."""
    append_durably(store, *(draft() for _ in range(1_000)))

    def nothing_cached(*_: object) -> int:
        raise BlockingIOError(errno.EAGAIN, "would block")

    with monkeypatch.context() as patched:
        patched.setattr(disk, "preadv", nothing_cached)
        for count in (32, 700):
            cold = store.queues.get("T", 0, 0, max_count=count, wait=False)
            assert (cold.status, cold.next_offset) == (GetStatus.NOT_IN_MEMORY, 0)
            assert store.queues.get("T", 0, 0, max_count=count).count == count
        assert store.queues.get("T", 0, 990, wait=False).count == 10
    store.queues.warm("T", 0, 0)
    assert store.queues.get("T", 0, 0, wait=False).count == 32


def test_queue_entries_are_loaded_across_files(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consumer reaches the next file soon; for a missing queue nothing is loaded."""
    append_durably(store, *(draft() for _ in range(200)))
    opened: list[str] = []
    real = disk.open_file

    def open_file(path: Path, flags: int, mode: int = 0o644) -> int:
        opened.append(f"{path.parent.name}/{path.name}")
        return real(path, flags, mode)

    monkeypatch.setattr(disk, "open_file", open_file)
    size = small_config(Path("any")).consume_queue_file_size

    store.queues.warm("T", 0, 5)
    store.queues.warm("nobody", 0, 0)

    assert opened == [f"0/{0:020}", f"0/{size:020}"]


def test_adjacent_messages_become_one_range_for_all_shapes_of_gaps(tmp_path: Path) -> None:
    """The result is that of a walk from message to message."""
    choose = random.Random(4711)
    queue = ConsumeQueue("T", 0, MappedFileQueue(tmp_path, 200_000), MapPool(1))
    end = 0
    for _ in range(500):
        entries: list[bytes] = []
        first, end = queue.next_offset, end + 1
        walked: list[tuple[int, int]] = []
        for _ in range(choose.randint(1, 8)):
            gap, size = choose.choice([0, 0, 7]), choose.randint(1, 5)
            if walked and not gap:
                walked[-1] = (walked[-1][0], walked[-1][1] + size)
            else:
                walked.append((end + gap, size))
            entries.append(QueueEntry(end + gap, size, 0).pack())
            end += gap + size
        queue.extend(b"".join(entries), end)

        found = select(
            queue,
            first,
            readable_offset=end,
            log_start=0,
            max_count=len(entries),
            max_bytes=1 << 20,
            tag_codes=None,
        )

        assert found.ranges == walked
    queue.close()


def test_time_searches_agree_with_walking(store: MessageStore) -> None:
    """Lower is the first message at or after a time, upper the last one at or before it."""
    times: list[int] = []
    for size in (1, 3, 1, 60, 2):
        times += [appended.store_timestamp for appended in append_durably(store, *[draft()] * size)]

    for at in range(times[0] - 2, times[-1] + 3):
        lower = next((place for place, time in enumerate(times) if time >= at), len(times))
        upper = max((place for place, time in enumerate(times) if time <= at), default=0)
        assert store.queues.offset_by_time("T", 0, at) == lower
        assert store.queues.offset_by_time("T", 0, at, upper=True) == upper
    assert store.queues.store_time_at("T", 0, 4) == times[4]
    assert store.queues.store_time_at("T", 0, len(times)) == -1
    assert store.queues.store_time_at("T", 9, 0) == -1
    assert store.queues.offset_by_time("U", 0, 0) == 0


def test_many_queues_need_few_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queues share a limited number of open files, and all messages are served."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (24, 24))  # files open for three queues
    store = MessageStore(small_config(tmp_path), now_ms=Clock())
    store.open()
    descriptors = Path("/proc/self/fd")
    baseline = len(list(descriptors.iterdir())) if descriptors.exists() else 0

    for turn in range(4):
        append_durably(store, *(draft(queue_id=number, body=b"%d" % turn) for number in range(40)))
        assert len(everything(store)) == 40 * (turn + 1)

    if baseline:
        logs = len(list((tmp_path / "commitlog").iterdir()))
        assert len(list(descriptors.iterdir())) <= baseline + 2 * 3 + logs + 4
    for number in range(40):
        assert [record.body for record in pulled(store, "T", number)] == [b"0", b"1", b"2", b"3"]
    store.close()


def test_blank_entries_are_skipped(store: MessageStore) -> None:
    """RocketMQ fills the beginning of a queue that starts at a higher offset with them."""
    append_durably(store, draft())
    queue = queue_files(store)["T", 0]
    queue.extend(PRE_BLANK.pack() * 2, queue.last_end)
    append_durably(store, draft(body=b"after"))

    result = store.queues.get("T", 0, 0)

    assert (result.count, result.next_offset) == (2, 4)
    assert [record.body for record in pulled(store, "T", 0)] == [b"body", b"after"]
    assert store.queues.get("T", 0, 1, max_count=1).status is GetStatus.FOUND
    assert store.queues.store_time_at("T", 0, 1) == -1
