"""What consumers find and read."""

import errno
import os
import random
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from msgspec import structs

from halfmq.store.config import FlushMode
from halfmq.store.errors import DiskFullError
from halfmq.store.files import disk, page_cache, zero_copy
from halfmq.store.files.mapped_file import reserve
from halfmq.store.files.zero_copy import BELIEVED_S, BLOCK_SIZE, BLOCKS_MAX, PageResidency
from halfmq.store.format.properties import tag_hash
from halfmq.store.format.queue_entry import PRE_BLANK
from halfmq.store.format.record import decode_records
from halfmq.store.index import index_builder, index_file
from halfmq.store.index.index_builder import PROPERTIES_PER_PUT, RECORDS_PER_PUT, IndexBuilder
from halfmq.store.log import log_reader
from halfmq.store.log.log_reader import GAP_MAX, spans
from halfmq.store.message_store import GetStatus, MessageStore

# Thousands of gaps of every shape: appending records for each would take minutes.
from halfmq.store.queue.pull_selection import _merged
from tests.support.stores import (
    Clock,
    append_durably,
    draft,
    everything,
    flush,
    log_of,
    pulled,
    queue_files,
    small_config,
    wait_until,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MessageStore]:
    opened = MessageStore(small_config(tmp_path), now_ms=Clock())
    opened.open()
    yield opened
    opened.close()


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
def test_a_pull_says_where_to_go_on(
    store: MessageStore, offset: int, status: GetStatus, following: int
) -> None:
    """The statuses and next offsets are RocketMQ's, on which clients act."""
    append_durably(store, draft(), draft(), draft())

    result = store.queues.get("T", 0, offset)

    assert (result.status, result.next_offset) == (status, following)
    assert (result.min_offset, result.max_offset) == (0, 3)


def test_a_pull_from_no_queue_says_so(store: MessageStore) -> None:
    """An unknown queue and an empty one are told apart."""
    store.append([draft(sys_flag=0xC)])  # knows the queue, but is not in it

    assert store.queues.get("nowhere", 0, 0).status is GetStatus.NO_MATCHED_LOGIC_QUEUE
    assert store.queues.get("T", 0, 5).status is GetStatus.NO_MESSAGE_IN_QUEUE
    assert store.queues.bounds("nowhere", 0) == (0, 0)


def test_neighbours_are_one_range(store: MessageStore) -> None:
    """A pull of messages that were stored together is one read; interleaved ones are several."""
    done = append_durably(store, draft(), draft(), draft("U"), draft(), draft("U"), draft("U"))

    result = store.queues.get("T", 0, 0)

    assert result.ranges == [
        (0, done[1].end),
        (done[3].physical_offset, done[3].size),
    ]
    assert (result.count, result.size) == (3, sum(done[place].size for place in (0, 1, 3)))


@pytest.mark.parametrize(("max_count", "count"), [(0, 1), (1, 1), (7, 7), (100, 20)])
def test_a_pull_is_limited_by_count(store: MessageStore, max_count: int, count: int) -> None:
    """At least one message comes, whatever was asked."""
    append_durably(store, *(draft() for _ in range(20)))

    result = store.queues.get("T", 0, 0, max_count=max_count)

    assert (result.count, result.next_offset) == (count, count)


@pytest.mark.parametrize("tags", [None, frozenset({tag_hash("A")})])
def test_a_pull_is_limited_by_bytes(store: MessageStore, tags: frozenset[int] | None) -> None:
    """The first message comes however large it is; then the sum counts."""
    done = append_durably(
        store, *(draft(body=bytes(500), properties={"TAGS": "A"}) for _ in range(9))
    )
    size = done[0].size

    assert store.queues.get("T", 0, 0, max_bytes=1, tag_codes=tags).count == 1
    assert store.queues.get("T", 0, 0, max_bytes=3 * size - 1, tag_codes=tags).count == 2
    result = store.queues.get("T", 0, 0, max_bytes=3 * size, tag_codes=tags)
    assert (result.count, result.next_offset) == (3, 3)


def test_a_filter_compares_tags(store: MessageStore) -> None:
    """Messages with other tags, or none, are passed over and not looked at again."""
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


def test_a_filter_that_nothing_passes_still_makes_progress(store: MessageStore) -> None:
    """At most 800 entries are looked at in one pull, so that none of them takes long."""
    for _ in range(10):
        append_durably(store, *(draft(properties={"TAGS": "A"}) for _ in range(100)))

    result = store.queues.get("T", 0, 0, tag_codes=frozenset({1}))

    assert (result.status, result.next_offset) == (GetStatus.NO_MATCHED_MESSAGE, 800)
    assert result.ranges == []


def test_a_filter_sees_the_low_half_of_the_code(store: MessageStore) -> None:
    """Due times in the schedule topic use all 64 bits; RocketMQ compares 32 of them."""
    append_durably(store, draft(tags_code=(5 << 32) | 0xFFFF_FFFF))

    assert store.queues.get("T", 0, 0, tag_codes=frozenset({-1})).status is GetStatus.FOUND


def test_what_is_not_on_disk_is_not_seen(tmp_path: Path) -> None:
    """Under SYNC_FLUSH nobody consumes a message that a power cut could take back."""
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
    """The user has chosen not to wait for the disk."""
    config = small_config(tmp_path, flush_mode=FlushMode.ASYNC_FLUSH, flush_interval_ms=3_600_000)
    store = MessageStore(config, now_ms=Clock())
    store.open()

    store.append([draft()])

    assert store.durable_offset == 0
    assert store.queues.bounds("T", 0) == (0, 1)
    assert store.queues.get("T", 0, 0).status is GetStatus.FOUND
    store.close()


def test_part_of_a_queue_becomes_visible(tmp_path: Path) -> None:
    """The visible end lies between messages, wherever the flush has come to."""
    store = MessageStore(small_config(tmp_path), now_ms=Clock())
    store.open()
    done = append_durably(store, *(draft(queue_id=place % 2) for place in range(150)))
    queue = queue_files(store)["T", 0]

    for place, appended in enumerate(done):
        assert queue.visible_end(appended.end - 1) == (place + 1) // 2
        assert queue.visible_end(appended.end) == place // 2 + 1
    store.close()


def test_reading_from_memory_and_from_disk_agree(store: MessageStore) -> None:
    """Over many files, in ranges of all sizes."""
    append_durably(store, *(draft(body=bytes([place]) * 700) for place in range(100)))
    ranges = []
    offset = 0
    while offset < 100:
        result = store.queues.get("T", 0, offset, max_count=13)
        ranges += result.ranges
        offset = result.next_offset

    assert store.reader.read(ranges) == store.reader.read_cold(ranges)
    assert len(decode_records(store.reader.read_cold(ranges))) == 100


@pytest.mark.parametrize("seed", range(5))
def test_messages_with_others_between_them_are_read_in_few_calls(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """What lies between is read and left out, as long as it is not much, nor in another file."""
    chance = random.Random(seed)
    print(f"seed={seed}")
    bodies = [bytes([number % 251]) * chance.randrange(1, 400) for number in range(400)]
    done = append_durably(store, *(draft(queue_id=chance.randrange(3), body=b) for b in bodies))
    ranges = [(one.physical_offset, one.size) for one in done if chance.random() < 0.4]
    file_size = small_config(Path("any")).commit_log_file_size
    calls: list[str] = []

    def counting(name: str) -> Callable[..., object]:
        real = getattr(disk, name)

        def counted(*arguments: object) -> object:
            calls.append(name)
            return real(*arguments)

        return counted

    monkeypatch.setattr(disk, "preadv", counting("preadv"))
    monkeypatch.setattr(disk, "pread", counting("pread"))
    wanted = b"".join(
        record for offset, _ in ranges if (record := store.reader.record_bytes(offset))
    )
    calls.clear()

    assert store.reader.read(ranges, prefix=b"head") == b"head" + wanted
    assert store.reader.read_cold(ranges) == wanted
    files = len({offset // file_size for offset, _ in ranges})
    assert calls == ["preadv"] * files + ["pread"] * files


def test_far_apart_messages_are_read_one_by_one() -> None:
    """More than a few kilobytes that nobody wants cost more than a call."""
    ranges = [(0, 100), (100 + GAP_MAX, 100), (300 + 2 * GAP_MAX, 100)]

    assert list(spans(ranges, 1 << 30)) == [
        (0, 200 + GAP_MAX, [(0, 100), (100 + GAP_MAX, 200 + GAP_MAX)]),
        (300 + 2 * GAP_MAX, 100, [(0, 100)]),
    ]


def test_a_cold_range_is_not_waited_for(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop thread learns that it would have to wait, and asks another thread."""
    append_durably(store, draft())
    ranges = store.queues.get("T", 0, 0).ranges

    def nothing_cached(*_: object) -> int:
        raise BlockingIOError(errno.EAGAIN, "would block")

    def partly_cached(*_: object) -> int:
        return 10

    for answer in (nothing_cached, partly_cached):
        with monkeypatch.context() as patched:
            patched.setattr(disk, "preadv", answer)
            assert store.reader.read(ranges) is None
    assert store.reader.read(ranges) is not None


def test_cold_queue_entries_are_not_waited_for(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consumer far behind waits for the disk in a thread; one that keeps up does not wait."""
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


def test_queue_entries_are_warmed_from_file_to_file(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads on comes to the next file soon; a queue that is not there needs nothing."""
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


def test_neighbours_become_one_range_wherever_they_begin_and_end() -> None:
    """As a walk from message to message finds it."""
    choose = random.Random(4711)
    for _ in range(500):
        starts, sizes, end = [], [], choose.randrange(100)
        walked: list[tuple[int, int]] = []
        for _ in range(choose.randint(1, 8)):
            gap, size = choose.choice([0, 0, 7]), choose.randint(1, 5)
            if walked and not gap:
                walked[-1] = (walked[-1][0], walked[-1][1] + size)
            else:
                walked.append((end + gap, size))
            starts.append(end + gap)
            sizes.append(size)
            end += gap + size

        assert _merged(tuple(starts), tuple(sizes)) == walked


def reading_end(store: MessageStore) -> int:
    """Return the reader's descriptor of the log's first file; skip where nobody knows of pages."""
    # The kernel is asked about a descriptor, and the reader has its own.
    fd = store.reader._descriptor(0)
    kernel = PageResidency()
    kernel.lacks(fd, 0, 1)
    if not kernel.is_known:
        pytest.skip("the kernel does not tell what is cached: cachestat needs Linux 6.5")
    return fd


def test_what_is_cached_by_half_is_not_read(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other half would be waited for."""
    append_durably(store, draft(body=bytes(8000)))
    (where,) = store.queues.get("T", 0, 0).ranges
    real = disk.preadv

    def half(fd: int, targets: Sequence[memoryview], position: int, flags: int) -> int:
        (target,) = targets
        return real(fd, (target[: len(target) // 2],), position, flags)

    monkeypatch.setattr(disk, "preadv", half)

    assert store.reader.view([where]) is None
    assert store.reader.read([where]) is None


def test_any_number_of_scattered_messages_is_read(tmp_path: Path) -> None:
    """A call takes a thousand parts at most; refused, it would be thought to know no cold."""
    config = small_config(tmp_path, commit_log_file_size=1 << 20, consume_queue_file_size=20_000)
    with closing(MessageStore(config, now_ms=Clock())) as store:
        store.open()
        both = (draft(topic, body=b"") for _ in range(700) for topic in ("T", "other"))
        append_durably(store, *both)

        ranges = store.queues.get("T", 0, 0, max_count=700).ranges

        assert len(ranges) == 700
        assert store.reader.read(ranges) == store.reader.read_cold(ranges)
        # A read that waits would find the same.
        assert store.reader._cached._flags == disk.NO_WAIT


def test_views_are_what_a_read_returns_and_live_until_they_are_forgotten(
    store: MessageStore,
) -> None:
    """Sockets take them at the end of a pass of the loop, and the memory is used again."""
    append_durably(store, draft(body=bytes(100)), draft("other", body=bytes(3_000)))
    append_durably(store, draft(body=bytes(200)))
    ranges, others = store.queues.get("T", 0, 0).ranges, store.queues.get("other", 0, 0).ranges
    assert len(ranges) == 2
    first, second = store.reader.view(ranges, prefix=b"head"), store.reader.view(others)
    assert first is not None
    assert second is not None
    kept = bytes(first)

    assert (
        kept
        == b"head" + store.reader.read_cold(ranges)
        == store.reader.read(ranges, prefix=b"head")
    )
    assert bytes(second) == store.reader.read_cold(others)
    assert store.reader.read(others) == bytes(second)
    assert bytes(first) == kept, "reads leave views alone"

    store.reader.forget_views()
    store.reader.view(others)
    assert bytes(first) != kept
    assert store.reader.read(ranges, prefix=b"head") == kept


def test_more_views_than_there_is_memory_for_are_right_as_well(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them has memory of its own."""
    monkeypatch.setattr(log_reader, "SCRATCH_SIZE", 1_000)
    append_durably(store, *(draft(body=bytes([number]) * 300) for number in range(6)))
    ranges = [store.queues.get("T", 0, number, max_count=1).ranges for number in range(6)]

    views = [store.reader.view(one) for one in ranges]

    for one, view in zip(ranges, views, strict=True):
        assert view is not None
        assert bytes(view) == store.reader.read_cold(one)


def test_what_is_known_to_be_cold_is_not_tried(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even a read that may not wait costs the loop the beginning of a read-ahead."""
    done = append_durably(store, *(draft(body=bytes(8000)) for _ in range(8)))
    ranges = [(done[0].physical_offset, done[0].size), (done[1].physical_offset, done[1].size)]
    log = reading_end(store)
    os.fsync(log)
    tried: list[int] = []
    real = disk.preadv

    def preadv(fd: int, buffers: tuple[memoryview], position: int, flags: int = 0) -> int:
        tried.append(position)
        return real(fd, buffers, position, flags)

    monkeypatch.setattr(disk, "preadv", preadv)
    for _ in range(1_000):  # what is still being read, after the first try, cannot be dropped
        tried.clear()
        os.posix_fadvise(log, 0, 0, os.POSIX_FADV_DONTNEED)
        if store.reader.read(ranges) is None and not tried:
            break
    else:
        pytest.fail("every read was tried")

    cold = store.reader.read_cold(ranges)
    assert store.reader.read(ranges) == cold


def test_a_look_at_what_is_cold_brings_in_nothing_else(tmp_path: Path) -> None:
    """What the kernel reads ahead, unasked, is prepared by who looks: the event loop."""
    size = 4 << 20
    config = small_config(tmp_path, commit_log_file_size=size)
    with closing(MessageStore(config, now_ms=Clock())) as store:
        store.open()
        done = append_durably(store, *(draft(body=bytes(8000)) for _ in range(300)))
        where = (done[0].physical_offset, done[0].size)  # a start looks like the start of a scan
        fd = reading_end(store)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        kernel = PageResidency()
        before = kernel.cached(fd, 0, size)

        store.reader.read([where])

        after = kernel.cached(fd, 0, size)
        assert before is not None
        assert after is not None
        assert after - before <= where[1] + 2 * disk.PAGE_SIZE


def test_who_reads_on_finds_more_in_memory(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cold answer brings the next ones along; a single record brings itself alone."""
    done = append_durably(store, *(draft(body=bytes(500)) for _ in range(8)))
    first = (done[0].physical_offset, done[0].size)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(disk, "prefetch", lambda _fd, at, size: asked.append((at, size)))

    store.reader.read_cold([first])
    store.reader.read_cold([first], ahead=2_000)

    assert asked == [(first[0], first[1]), (first[0], first[1] + 2_000)]


def test_what_is_still_being_read_is_not_waited_for(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel counts its pages as cached, and who wants them waits for the disk."""
    append_durably(store, draft(body=bytes(8000)))
    (where,) = store.queues.get("T", 0, 0).ranges

    def locked(*_: object) -> int:
        raise BlockingIOError(errno.EAGAIN, "would block")

    monkeypatch.setattr(disk, "preadv", locked)

    assert store.reader.read([where]) is None
    assert store.reader.view([where]) is None


@pytest.mark.skipif(disk.sendfile is None, reason="the system sends nothing from files")
def test_a_part_is_sent_from_where_it_lies(store: MessageStore) -> None:
    """In as many pieces as the socket takes; what follows it is none of it."""
    append_durably(store, *(draft(body=bytes([number]) * 3_000) for number in range(4)))
    (where,) = store.queues.get("T", 0, 1, max_count=2).ranges
    part = store.reader.file_part(*where)
    if part is None and not store.reader.can_send_parts:
        pytest.skip("the kernel does not tell what is in memory (cachestat, Linux 6.5)")
    assert part is not None

    ours, theirs = socket.socketpair()
    with ours, theirs:
        sent = structs.replace(part, length=2_500).send(ours.fileno())
        sent += part.send(ours.fileno(), sent)
        ours.shutdown(socket.SHUT_WR)
        with theirs.makefile("rb") as received:
            assert received.read() == part.rest() == store.reader.read_cold([where])
    assert sent == part.length == where[1]
    assert part.rest(sent - 10) == store.reader.read_cold([where])[-10:]
    longer = structs.replace(part, length=1 << 20)
    assert longer.rest(1 << 16) == longer.rest()[1 << 16 :]


def test_a_part_is_of_what_is_in_memory_for_certain(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sends another one would wait for the disk."""
    append_durably(store, draft(body=bytes(8000)))
    (where,) = store.queues.get("T", 0, 0).ranges

    with monkeypatch.context() as cold:
        cold.setattr(PageResidency, "lacks", lambda *_: True)
        assert store.reader.file_part(*where) is None
    with monkeypatch.context() as being_read:
        being_read.setattr(disk, "preadv", lambda *_: 0)
        assert store.reader.file_part(*where) is None
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(disk, "sendfile", None)
        assert not store.reader.can_send_parts
    # A call that no kernel knows, as cachestat before Linux 6.5.
    monkeypatch.setattr(zero_copy, "_CACHESTAT", 100_000)
    assert store.reader.file_part(*where) is None
    assert not store.reader.can_send_parts


def test_of_what_many_ask_for_the_kernel_is_not_asked_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for a block, and again soon: what is evicted meanwhile is noticed."""
    now = 100.0
    monkeypatch.setattr(zero_copy, "monotonic", lambda: now)
    asked: list[tuple[int, int]] = []
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * BLOCK_SIZE))
    with disk.opened(path) as fd:
        pages = PageResidency()
        if pages.cached(fd, 0, 1) is None:
            pytest.skip("the kernel does not tell what is cached: cachestat needs Linux 6.5")
        lacks = PageResidency.lacks

        def asking(pages: PageResidency, fd: int, position: int, length: int) -> bool:
            asked.append((position, length))
            return lacks(pages, fd, position, length)

        monkeypatch.setattr(PageResidency, "lacks", asking)
        for position in range(BLOCK_SIZE, 2 * BLOCK_SIZE, 1_000):
            assert pages.has(fd, 0, position, 900)
        assert asked == [(BLOCK_SIZE, BLOCK_SIZE), (2 * BLOCK_SIZE, BLOCK_SIZE)]
        assert pages.has(fd, 5 * BLOCK_SIZE, BLOCK_SIZE, 900), "that is another file"
        assert len(asked) == 3
        monkeypatch.setattr(PageResidency, "lacks", lambda *_: True)
        assert pages.has(fd, 0, BLOCK_SIZE, 900)
        now += BELIEVED_S
        assert not pages.has(fd, 0, BLOCK_SIZE, 900)


def test_a_part_of_a_block_that_is_not_all_there_is_asked_for_itself(tmp_path: Path) -> None:
    """As at the end of the log, and of a file."""
    path = tmp_path / "file"
    path.write_bytes(bytes(BLOCK_SIZE + 5_000))
    with disk.opened(path) as fd:
        pages = PageResidency()
        if pages.cached(fd, 0, 1) is None:
            pytest.skip("the kernel does not tell what is cached: cachestat needs Linux 6.5")
        assert pages.has(fd, 0, BLOCK_SIZE - 100, 5_100)
        assert not pages.has(fd, 0, BLOCK_SIZE, 10_000)


def test_what_is_remembered_of_the_page_cache_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many places are read from."""
    path = tmp_path / "file"
    path.write_bytes(bytes(BLOCK_SIZE))
    monkeypatch.setattr(PageResidency, "lacks", lambda *_: False)
    with disk.opened(path) as fd:
        pages = PageResidency()
        pages.is_known = True  # also before Linux 6.5
        for number in range(BLOCKS_MAX + 10):
            assert pages.has(fd, number * BLOCK_SIZE, 0, 100)

    # Memory that only grows shows in no answer.
    assert len(pages._believed_until) == 10


def test_who_found_nothing_looks_first_for_a_while_only(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look costs a tenth of an answer; one miss does not make all answers dearer for long."""
    append_durably(store, draft(body=bytes(8000)))
    (where,) = store.queues.get("T", 0, 0).ranges
    now = 100.0
    looks: list[int] = []
    monkeypatch.setattr(log_reader, "monotonic", lambda: now)
    monkeypatch.setattr(PageResidency, "lacks", lambda _pages, _fd, at, _size: looks.append(at))
    with monkeypatch.context() as missing:
        missing.setattr(disk, "preadv", lambda *_: 0)
        assert store.reader.read([where]) is None

    assert store.reader.read([where]) is not None
    assert len(looks) == 1
    now += log_reader.WARY_S
    assert store.reader.read([where]) is not None
    assert len(looks) == 1


def test_where_the_kernel_cannot_tell_it_is_tried(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Linux 6.5 it does not know the question."""
    append_durably(store, draft())
    # A call that no kernel knows, as cachestat before Linux 6.5.
    monkeypatch.setattr(zero_copy, "_CACHESTAT", 100_000)
    (where,) = store.queues.get("T", 0, 0).ranges
    with monkeypatch.context() as missing:
        missing.setattr(disk, "preadv", lambda *_: 0)
        assert store.reader.read([where]) is None

    assert store.reader.read([where]) == store.reader.read_cold([where])


def test_where_the_system_cannot_tell_it_is_read_anyway(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems refuse the flag; macOS does not have it."""
    append_durably(store, draft())
    ranges = store.queues.get("T", 0, 0).ranges
    real = disk.preadv

    def preadv(fd: int, buffers: tuple[memoryview], position: int, flags: int = 0) -> int:
        if flags:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return real(fd, buffers, position)

    monkeypatch.setattr(disk, "preadv", preadv)

    assert store.reader.read(ranges) == store.reader.read_cold(ranges)


def test_a_message_larger_than_any_buffer_is_read(tmp_path: Path) -> None:
    """Four megabytes, the largest that RocketMQ's defaults allow."""
    config = small_config(tmp_path, commit_log_file_size=8 << 20)
    store = MessageStore(config, now_ms=Clock())
    store.open()
    body = os.urandom(4 << 20)

    append_durably(store, draft(body=body), draft(body=body), draft())

    assert [record.body for record in pulled(store, "T", 0)] == [body, body, b"body"]
    assert [record.body for record in store.reader.scan(0)] == [body, body, b"body"]
    store.close()


def test_a_scan_gives_every_record_in_log_order(store: MessageStore) -> None:
    """Over blanks and file ends, those in no queue included, from any record to any other."""
    kinds = (0, 4, 8, 0xC)
    done = append_durably(
        store, *(draft(sys_flag=kinds[place % 4], body=bytes(900)) for place in range(80))
    )

    offsets = [appended.physical_offset for appended in done]
    assert [record.physical_offset for record in store.reader.scan(0)] == offsets
    assert [record.physical_offset for record in store.reader.scan(-5)] == offsets
    part = store.reader.scan(offsets[20], offsets[60])
    assert [record.physical_offset for record in part] == offsets[20:60]


def test_time_searches_agree_with_walking(store: MessageStore) -> None:
    """Lower is the first message at or behind a time, upper the last one at or before it."""
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


def test_messages_are_found_by_key(store: MessageStore) -> None:
    """Also those that the index has not taken in yet, and never those of another topic."""
    done = append_durably(
        store,
        draft(properties={"KEYS": "a b", "UNIQ_KEY": "u1"}),
        draft("U", properties={"KEYS": "a"}),
        draft(properties={"KEYS": "b", "UNIQ_KEY": "u2"}),
    )
    first, _, third = (appended.physical_offset for appended in done)

    assert store.index.query("T", "a", 9, 0, 1 << 60) == [first]
    assert store.index.query("T", "b", 9, 0, 1 << 60) == [first, third]
    assert store.index.query("T", "u2", 9, 0, 1 << 60) == [third]
    assert store.index.query("T", "none", 9, 0, 1 << 60) == []
    assert store.index.last_update == (done[2].store_timestamp, third)
    assert not store.tick()


@pytest.mark.parametrize("in_batch", [False, True])
def test_the_index_catches_up_in_slices(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch, *, in_batch: bool
) -> None:
    """Of so many records, whether they came together or not; a tick says whether to come again."""
    monkeypatch.setattr(index_builder, "RECORDS_PER_PUT", 16)
    keys = [f"{number:032X}" for number in range(5 * 16)]
    drafts = [draft(properties={"UNIQ_KEY": key}) for key in keys]
    if in_batch:
        appended = store.append(drafts, contiguous=True)
    else:
        appended = [store.append([one])[0] for one in drafts]

    assert _ticks(store) == 5
    flush(store)
    for key, one in zip(keys, appended, strict=True):
        assert store.index.query("T", key, 9, 0, 1 << 60) == [one.physical_offset]


def test_a_slice_of_the_index_is_at_most_128_records(store: MessageStore) -> None:
    """Each key may touch a page for the first time, for which the kernel needs 4 us."""
    for number in range(1_000):
        store.append([draft(properties={"UNIQ_KEY": f"u{number}", "KEYS": f"k{number}"})])

    assert _ticks(store) >= 1_000 // 128


def test_few_records_with_many_keys_are_a_slice(store: MessageStore) -> None:
    """Or one pass would take as long as all keys of so many records."""
    keys = " ".join(f"key-{number}" for number in range(200))
    count = 2 * PROPERTIES_PER_PUT // len(keys)
    for _ in range(count):
        store.append([draft(properties={"KEYS": keys})])

    assert count < RECORDS_PER_PUT
    assert _ticks(store) == 2


def test_an_append_indexes_no_more_than_a_slice_of_what_waits(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when too much waits: the others wait for their answers meanwhile."""
    monkeypatch.setattr(index_builder, "RECORDS_PER_PUT", 16)
    for number in range(3 * 16):
        store.append([draft(properties={"UNIQ_KEY": f"u{number}"})])
    monkeypatch.setattr(index_builder, "PENDING_BYTES_MAX", store.write_offset - 1)
    monkeypatch.setattr(index_builder, "SLICE_MS", 0.0)
    store.append([draft(properties={"UNIQ_KEY": "last"})])

    assert _ticks(store) == 3


def test_an_index_that_cannot_follow_is_filled_from_the_log(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is bounded whatever comes, and no key is missing once there is time."""
    monkeypatch.setattr(index_builder, "PENDING_BYTES_MAX", 5_000)
    monkeypatch.setattr(index_builder, "RETRY_EVERY", 0.0)
    drafts = [draft(body=bytes(500), properties={"UNIQ_KEY": f"u{number}"}) for number in range(20)]
    done = store.append(drafts, contiguous=True)
    was_behind = store.index.lags
    (last,) = append_durably(store, draft(properties={"UNIQ_KEY": "last"}))
    while store.tick(0.0):
        pass

    assert (was_behind, store.index.lags) == (True, False)
    for number, one in enumerate(done):
        assert store.index.query("T", f"u{number}", 9, 0, 1 << 60) == [one.physical_offset]
    assert store.index.query("T", "last", 9, 0, 1 << 60) == [last.physical_offset]


def _ticks(store: MessageStore) -> int:
    ticks = 1
    while store.tick(budget_ms=0.0):
        ticks += 1
    return ticks


def test_a_store_without_an_index_finds_nothing_by_key(tmp_path: Path) -> None:
    """messageIndexEnable=false: no files, no work."""
    store = MessageStore(small_config(tmp_path, index_enabled=False), now_ms=Clock())
    store.open()
    append_durably(store, draft(properties={"KEYS": "a"}))

    assert store.index.query("T", "a", 9, 0, 1 << 60) == []
    assert store.index.last_update == (0, 0)
    assert not (tmp_path / "index").exists()
    store.close()


def test_many_queues_need_few_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queues share a bounded number of open files, and messages come through all the same."""
    # The limit comes from the system's, which a test cannot lower for itself alone.
    monkeypatch.setattr("halfmq.store.message_store._mapped_queues_max", lambda: 3)
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


def test_long_logs_need_few_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are only read are closed again when others are read."""
    monkeypatch.setattr("halfmq.store.log.log_reader.DESCRIPTORS_MAX", 4)
    store = MessageStore(small_config(tmp_path), now_ms=Clock())
    store.open()
    append_durably(store, *(draft(body=bytes(4000)) for _ in range(60)))

    for offset in range(60):
        assert store.reader.read(store.queues.get("T", 0, offset, max_count=1).ranges) is not None

    # What is open besides, for the appender and for maps, is as many again.
    assert len(store.reader._descriptors) == 4
    store.close()


def test_entries_that_stand_for_nothing_are_skipped(store: MessageStore) -> None:
    """RocketMQ fills the beginning of a queue that starts late; pulls pass over that."""
    append_durably(store, draft())
    queue = queue_files(store)["T", 0]
    queue.extend(PRE_BLANK.pack() * 2, queue.last_end)
    append_durably(store, draft(body=b"after"))

    result = store.queues.get("T", 0, 0)

    assert (result.count, result.next_offset) == (2, 4)
    assert [record.body for record in pulled(store, "T", 0)] == [b"body", b"after"]
    assert store.queues.get("T", 0, 1, max_count=1).status is GetStatus.FOUND
    assert store.queues.store_time_at("T", 0, 1) == -1


def test_an_index_that_found_no_space_catches_up_from_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages are stored meanwhile and kept nowhere in memory; no key is missing in the end."""
    monkeypatch.setattr(index_builder, "PENDING_BYTES_MAX", 5_000)
    monkeypatch.setattr(index_builder, "RETRY_EVERY", 0.0)
    full = False

    def limited(fd: int, start: int, end: int, path: Path) -> None:
        if full:
            raise DiskFullError(path, "no space")
        reserve(fd, start, end, path)

    monkeypatch.setattr("halfmq.store.index.index_file.reserve", limited)
    # Space that was reserved before the disk was full would hide that it is.
    monkeypatch.setattr(index_file, "_RESERVED_AHEAD", 0)
    store = MessageStore(small_config(tmp_path), now_ms=Clock())
    store.open()

    def send(first: int, count: int) -> None:
        for number in range(first, first + count):
            properties = {"UNIQ_KEY": f"u{number}", "KEYS": f"k{number}"}
            append_durably(store, draft(body=bytes(900), properties=properties))

    def missing(first: int, count: int) -> list[int]:
        return [
            number
            for number in range(first, first + count)
            if not store.index.query("T", f"k{number}", 10, 0, 1 << 60)
        ]

    def is_behind() -> bool:
        assert isinstance(store.index, IndexBuilder)
        # Records kept in memory for a file without space would use up that, and show in no answer.
        assert not store.index._pending
        return store.index.lags

    send(0, 10)
    assert missing(0, 10) == []
    full = True
    send(10, 40)
    assert is_behind()
    assert not store.tick(), "a full disk keeps nobody busy"
    assert missing(0, 50) == list(range(10, 50))
    full = False
    while store.tick(0.0):
        pass
    send(50, 5)
    assert missing(0, 55) == []
    assert not is_behind()

    full = True
    send(55, 20)
    store.close()
    store = MessageStore(small_config(tmp_path), now_ms=Clock())
    store.open()  # on a disk that is still full
    send(75, 3)
    full = False
    store.tick()
    assert missing(0, 78) == []
    store.close()


@pytest.mark.parametrize("size", [0, 10, 100])
def test_a_read_that_may_not_wait_gives_what_one_gives_that_may(tmp_path: Path, size: int) -> None:
    """Less at the end of a file, and on this thread only."""
    path = tmp_path / "file"
    path.write_bytes(bytes(range(size)))
    with path.open("rb") as file:
        for position in (0, 5, 200):
            with page_cache.allowed_to_wait(False):
                found = page_cache.read(path, file.fileno(), 20, position)
            with page_cache.allowed_to_wait(True):
                waited = page_cache.read(path, file.fileno(), 20, position)
            assert found == waited
            assert found == bytes(range(size))[position : position + 20]


def test_a_fetch_reads_what_it_can(store: MessageStore, tmp_path: Path) -> None:
    """A record whole, whatever its size, though another file is gone: that is told in the end."""
    (done,) = append_durably(store, draft(body=bytes(5_000)))
    path = log_of(store).files.path(0)
    reads: list[tuple[int, int]] = []

    def pread(fd: int, size: int, position: int) -> bytes:
        reads.append((position, size))
        return os.pread(fd, size, position)

    gone = page_cache.Missing(tmp_path / "gone", 0, 10)
    short = page_cache.Missing(path, 4, 10)
    where = store.reader.lacking([done.physical_offset, -1, store.write_offset]).missing
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(disk, "pread", pread)
        with pytest.raises(FileNotFoundError):
            page_cache.NotInMemoryError([gone, *where, short]).fetch()

    assert [one[:2] for one in where] == [(path, done.physical_offset)]
    assert (done.physical_offset, done.size) in reads
    assert reads[-1] == (4, 10)
