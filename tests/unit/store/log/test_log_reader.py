"""Reading the log by physical offset, without waiting for the disk if asked."""

import errno
import os
import random
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from msgspec import structs

from halfmq.store.files import disk, zero_copy
from halfmq.store.files.zero_copy import PageResidency
from halfmq.store.format.record import decode_records
from halfmq.store.log import log_reader
from halfmq.store.log.log_reader import GAP_MAX, spans
from halfmq.store.message_store import MessageStore
from tests.support.stores import Clock, append_durably, draft, pulled, small_config


def test_reads_from_memory_and_from_disk_agree(store: MessageStore) -> None:
    """For ranges of all sizes across many files."""
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
def test_messages_with_small_gaps_between_them_are_read_in_few_calls(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Small gaps within a file are read and dropped, which costs less than another call."""
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
    expected = b"".join(
        record for offset, _ in ranges if (record := store.reader.record_bytes(offset))
    )
    calls.clear()

    assert store.reader.read(ranges, prefix=b"head") == b"head" + expected
    assert store.reader.read_cold(ranges) == expected
    files = len({offset // file_size for offset, _ in ranges})
    assert calls == ["preadv"] * files + ["pread"] * files


def test_messages_with_large_gaps_are_read_one_by_one() -> None:
    """A large gap costs more than another call."""
    ranges = [(0, 100), (100 + GAP_MAX, 100), (300 + 2 * GAP_MAX, 100)]

    assert list(spans(ranges, 1 << 30)) == [
        (0, 200 + GAP_MAX, [(0, 100), (100 + GAP_MAX, 200 + GAP_MAX)]),
        (300 + 2 * GAP_MAX, 100, [(0, 100)]),
    ]


def test_a_read_of_a_cold_range_does_not_wait(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It returns None, so that the event loop can read it in another thread."""
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


@contextmanager
def first_log_file(root: Path) -> Iterator[int]:
    """Open the first file of the log; skip the test if the kernel does not report cached pages."""
    with disk.opened(root / "commitlog" / f"{0:020d}") as fd:
        kernel = PageResidency()
        kernel.lacks(fd, 0, 1)
        if not kernel.is_known:
            pytest.skip("the kernel does not report what is cached: cachestat needs Linux 6.5")
        yield fd


def test_a_partly_cached_range_is_not_read(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read would wait for the other part."""
    append_durably(store, draft(body=bytes(8000)))
    (where,) = store.queues.get("T", 0, 0).ranges
    real = disk.preadv

    def half(fd: int, targets: Sequence[memoryview], position: int, flags: int) -> int:
        (target,) = targets
        return real(fd, (target[: len(target) // 2],), position, flags)

    monkeypatch.setattr(disk, "preadv", half)

    assert store.reader.view([where]) is None
    assert store.reader.read([where]) is None


def test_any_number_of_scattered_messages_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system refuses a call with over a thousand parts, as it does one that may not wait."""
    config = small_config(tmp_path, commit_log_file_size=1 << 20, consume_queue_file_size=20_000)
    with closing(MessageStore(config, now_ms=Clock())) as store:
        store.open()
        both = (draft(topic, body=b"") for _ in range(700) for topic in ("T", "other"))
        append_durably(store, *both)

        ranges = store.queues.get("T", 0, 0, max_count=700).ranges

        assert len(ranges) == 700
        assert store.reader.read(ranges) == store.reader.read_cold(ranges)
        flags: list[int] = []
        real = disk.preadv

        def preadv(fd: int, buffers: Sequence[memoryview], position: int, passed: int = 0) -> int:
            flags.append(passed)
            return real(fd, buffers, position, passed)

        monkeypatch.setattr(disk, "preadv", preadv)
        store.reader.read(ranges[:1])
        assert flags == [disk.NO_WAIT], "reads still do not wait for the disk"


def test_views_equal_reads_and_are_valid_until_they_are_released(
    store: MessageStore,
) -> None:
    """Sockets send them at the end of an event loop pass; then their memory is reused."""
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
    assert bytes(first) == kept, "reads do not change views"

    store.reader.forget_views()
    store.reader.view(others)
    assert bytes(first) != kept
    assert store.reader.read(ranges, prefix=b"head") == kept


def test_views_beyond_the_shared_memory_are_correct(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these has memory of its own."""
    monkeypatch.setattr(log_reader, "SCRATCH_SIZE", 1_000)
    append_durably(store, *(draft(body=bytes([number]) * 300) for number in range(6)))
    ranges = [store.queues.get("T", 0, number, max_count=1).ranges for number in range(6)]

    views = [store.reader.view(one) for one in ranges]

    for one, view in zip(ranges, views, strict=True):
        assert view is not None
        assert bytes(view) == store.reader.read_cold(one)


def test_a_range_known_to_be_cold_is_not_read(
    store: MessageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even a read that may not wait makes the calling thread start the read-ahead."""
    done = append_durably(store, *(draft(body=bytes(8000)) for _ in range(8)))
    ranges = [(done[0].physical_offset, done[0].size), (done[1].physical_offset, done[1].size)]
    tried: list[int] = []
    real = disk.preadv

    def preadv(fd: int, buffers: tuple[memoryview], position: int, flags: int = 0) -> int:
        tried.append(position)
        return real(fd, buffers, position, flags)

    monkeypatch.setattr(disk, "preadv", preadv)
    with first_log_file(tmp_path) as log:
        os.fsync(log)
        for _ in range(1_000):  # pages that are being read, after the first try, stay cached
            tried.clear()
            os.posix_fadvise(log, 0, 0, os.POSIX_FADV_DONTNEED)
            if store.reader.read(ranges) is None and not tried:
                break
        else:
            pytest.fail("every read was tried")

    cold = store.reader.read_cold(ranges)
    assert store.reader.read(ranges) == cold


def test_a_read_of_a_cold_range_causes_no_read_ahead(tmp_path: Path) -> None:
    """The calling thread, the event loop, would have to prepare what the kernel reads ahead."""
    size = 4 << 20
    config = small_config(tmp_path, commit_log_file_size=size)
    with closing(MessageStore(config, now_ms=Clock())) as store:
        store.open()
        done = append_durably(store, *(draft(body=bytes(8000)) for _ in range(300)))
        where = (done[0].physical_offset, done[0].size)  # a start checks like the start of a scan
        with first_log_file(tmp_path) as fd:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            kernel = PageResidency()
            before = kernel.cached(fd, 0, size)

            store.reader.read([where])

            after = kernel.cached(fd, 0, size)
        assert before is not None
        assert after is not None
        assert after - before <= where[1] + 2 * disk.PAGE_SIZE


def test_a_part_of_the_log_that_is_not_in_memory_can_be_loaded(tmp_path: Path) -> None:
    """As far as the log reaches."""
    config = small_config(tmp_path, commit_log_file_size=4 << 20)
    with closing(MessageStore(config, now_ms=Clock())) as store:
        store.open()
        end = append_durably(store, *(draft(body=bytes(8000)) for _ in range(8)))[-1].end
        with first_log_file(tmp_path) as log:
            os.fsync(log)
            for _ in range(1_000):  # pages that are in use are not evicted
                os.posix_fadvise(log, 0, 0, os.POSIX_FADV_DONTNEED)
                if (missing := store.reader.missing_part(0, 1 << 20)) is not None:
                    break
            else:
                pytest.skip("the kernel does not tell what is in memory, or evicts nothing")

        missing.fetch()

        assert [(one.position, one.size) for one in missing.missing] == [(0, end)]
        assert store.reader.read([(0, end)]) is not None
        assert store.reader.missing_part(end, 1) is None


def test_a_read_does_not_wait_for_pages_that_are_being_read(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel counts such pages as cached, but a read would wait for the disk."""
    append_durably(store, draft(body=bytes(8000)))
    (where,) = store.queues.get("T", 0, 0).ranges

    def locked(*_: object) -> int:
        raise BlockingIOError(errno.EAGAIN, "would block")

    monkeypatch.setattr(disk, "preadv", locked)

    assert store.reader.read([where]) is None
    assert store.reader.view([where]) is None


@pytest.mark.skipif(disk.sendfile is None, reason="the system cannot send from files")
def test_a_file_part_is_sent_from_the_page_cache(store: MessageStore) -> None:
    """In as many pieces as the socket accepts, and nothing after it."""
    append_durably(store, *(draft(body=bytes([number]) * 3_000) for number in range(4)))
    (where,) = store.queues.get("T", 0, 1, max_count=2).ranges
    part = store.reader.file_part(*where)
    if part is None and not store.reader.can_send_parts:
        pytest.skip("the kernel does not report what is cached: cachestat needs Linux 6.5")
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


def test_a_file_part_is_returned_only_if_it_is_known_to_be_in_memory(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sending any other range could wait for the disk."""
    append_durably(store, draft(body=bytes(8000)))
    (where,) = store.queues.get("T", 0, 0).ranges

    with monkeypatch.context() as cold:
        cold.setattr(PageResidency, "lacks", lambda *_: True)
        assert store.reader.file_part(*where) is None
    with monkeypatch.context() as loading:
        loading.setattr(disk, "preadv", lambda *_: 0)
        assert store.reader.file_part(*where) is None
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(disk, "sendfile", None)
        assert not store.reader.can_send_parts
    # No kernel has this call, as none before Linux 6.5 has cachestat.
    monkeypatch.setattr(zero_copy, "CACHESTAT", 100_000)
    assert store.reader.file_part(*where) is None
    assert not store.reader.can_send_parts


def test_after_a_miss_residency_is_checked_before_reads_for_a_while(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check costs a tenth of an answer, so one miss must not slow all later reads."""
    append_durably(store, draft(body=bytes(8000)))
    (where,) = store.queues.get("T", 0, 0).ranges
    now = 100.0
    checks: list[int] = []
    monkeypatch.setattr(log_reader, "monotonic", lambda: now)
    monkeypatch.setattr(PageResidency, "lacks", lambda _pages, _fd, at, _size: checks.append(at))
    with monkeypatch.context() as missing:
        missing.setattr(disk, "preadv", lambda *_: 0)
        assert store.reader.read([where]) is None

    assert store.reader.read([where]) is not None
    assert len(checks) == 1
    now += log_reader.CHECK_FIRST_S
    assert store.reader.read([where]) is not None
    assert len(checks) == 1


def test_without_cachestat_reads_are_tried(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux has had the call since 6.5."""
    append_durably(store, draft())
    # No kernel has this call, as none before Linux 6.5 has cachestat.
    monkeypatch.setattr(zero_copy, "CACHESTAT", 100_000)
    (where,) = store.queues.get("T", 0, 0).ranges
    with monkeypatch.context() as missing:
        missing.setattr(disk, "preadv", lambda *_: 0)
        assert store.reader.read([where]) is None

    assert store.reader.read([where]) == store.reader.read_cold([where])


def test_without_reads_that_do_not_wait_reads_wait(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems refuse the flag, and macOS does not have it."""
    append_durably(store, draft())
    ranges = store.queues.get("T", 0, 0).ranges
    real = disk.preadv

    def preadv(fd: int, buffers: tuple[memoryview], position: int, flags: int = 0) -> int:
        if flags:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return real(fd, buffers, position)

    monkeypatch.setattr(disk, "preadv", preadv)

    assert store.reader.read(ranges) == store.reader.read_cold(ranges)


def test_a_message_of_the_largest_size_is_read(tmp_path: Path) -> None:
    """RocketMQ's default limit is 4 MiB, more than any buffer here."""
    config = small_config(tmp_path, commit_log_file_size=8 << 20)
    store = MessageStore(config, now_ms=Clock())
    store.open()
    body = os.urandom(4 << 20)

    append_durably(store, draft(body=body), draft(body=body), draft())

    assert [record.body for record in pulled(store, "T", 0)] == [body, body, b"body"]
    assert [record.body for record in store.reader.scan(0)] == [body, body, b"body"]
    store.close()


def test_a_scan_yields_every_record_in_log_order(store: MessageStore) -> None:
    """Across files, also records of no queue, and from any record to any other."""
    kinds = (0, 4, 8, 0xC)
    done = append_durably(
        store, *(draft(sys_flag=kinds[place % 4], body=bytes(900)) for place in range(80))
    )

    offsets = [appended.physical_offset for appended in done]
    assert [record.physical_offset for record in store.reader.scan(0)] == offsets
    assert [record.physical_offset for record in store.reader.scan(-5)] == offsets
    part = store.reader.scan(offsets[20], offsets[60])
    assert [record.physical_offset for record in part] == offsets[20:60]


def test_long_logs_need_few_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is only read is closed when enough others are read."""
    monkeypatch.setattr("halfmq.store.log.log_reader.DESCRIPTORS_MAX", 4)
    store = MessageStore(small_config(tmp_path), now_ms=Clock())
    store.open()
    append_durably(store, *(draft(body=bytes(4000)) for _ in range(60)))

    for offset in range(60):
        assert store.reader.read(store.queues.get("T", 0, offset, max_count=1).ranges) is not None

    descriptors = Path("/proc/self/fd")
    if descriptors.exists():
        log = tmp_path / "commitlog"
        assert len(list(log.iterdir())) >= 15  # with records; the next may be reserved already
        # Besides the four, appender, helper and flusher have some of the last files open.
        assert sum(log in path.resolve().parents for path in descriptors.iterdir()) <= 4 + 5
    store.close()
