"""When old messages are deleted, what keeps them, and what consumers get then."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from halfmq.broker.config import StoreSettings
from halfmq.broker.delay.delivery import DelayService
from halfmq.broker.delay.levels import DelayLevels, parse_delay_levels
from halfmq.broker.disk.retention_policy import FIRST_SCAN_S, SCAN_S, RetentionPolicy
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.headers import PullMessageRequestHeader
from halfmq.store.deletion import Deleted, Deletion
from halfmq.store.files.page_cache import CachedReads, NotInMemoryError
from halfmq.store.message_store import MessageStore
from tests.support.delays import fetch_nothing
from tests.support.documents import ROOT
from tests.support.peers import COMMIT, UNKNOWN, Peer
from tests.support.race_windows import HOUR_MS, LOG_FILE_SIZE, Rig, windowed
from tests.support.stores import (
    Clock,
    append_durably,
    draft,
    flush,
    maintain,
    queue_files,
    small_config,
    unflushed,
    work_off,
)
from tests.support.usual_headers import pull_header

NOW_MS = 1_700_000_000_000
RESERVED_MS = 72 * HOUR_MS


class FakeLog(Deletion):
    """A log that records the calls of the schedule."""

    def __init__(self) -> None:
        self.min_offset = 0
        self.durable_offset = self.archived_end = self.deletable_end = 1_000_000
        self.expired_end = 0
        self.deleted = Deleted()
        self.looks: list[int] = []
        self.deletions: list[int] = []
        self.is_urgent = False

    @property
    def deletion(self) -> FakeLog:
        return self

    @property
    def bytes_to_free(self) -> int:
        return 0

    def find_expired(self, stored_before_ms: int) -> None:
        self.looks.append(stored_before_ms)

    def delete_before(self, end: int) -> None:
        self.deletions.append(end)

    def set_urgent(self, *, is_urgent: bool) -> None:
        self.is_urgent = is_urgent


class Floors:
    """The oldest undecided half and the oldest delayed message, which keep files."""

    def __init__(self, pending: int | None = None, waiting: int | None = None) -> None:
        self.oldest_pending_offset = pending
        self.waiting = waiting
        self.blocked: list[int] = []

    def oldest_waiting_offset(self) -> int | None:
        return self.waiting

    def on_retention_blocked(self, min_wanted_offset: int) -> None:
        self.blocked.append(min_wanted_offset)


class Scheduled:
    """A schedule over a fake log."""

    def __init__(self, floors: Floors | None = None, **settings: object) -> None:
        self.log = FakeLog()
        self.floors = floors or Floors()
        self.hour = 12
        self.scarce = False
        self.schedule = RetentionPolicy(
            self.log,
            StoreSettings(**settings),  # type: ignore[arg-type]
            oldest_pending=lambda: self.floors.oldest_pending_offset,
            oldest_delayed=self.floors.oldest_waiting_offset,
            on_blocked=self.floors.on_retention_blocked,
            is_scarce=lambda: self.scarce,
            now_ms=lambda: NOW_MS,
            fetch=fetch_nothing,
            hour_of=lambda _now_ms: self.hour,
        )
        assert self.schedule.tick() == FIRST_SCAN_S


def test_files_are_scanned_only_in_the_configured_hours() -> None:
    """By default in the fifth hour of the day; the age is a setting."""
    one = Scheduled(delete_when="4;16", file_reserved_hours=24)

    for one.hour in range(24):
        assert one.schedule.tick() == SCAN_S

    assert one.log.looks == [NOW_MS - 24 * HOUR_MS] * 2


def test_files_are_deleted_at_any_hour_if_the_disk_is_scarce() -> None:
    """Only files that are old enough."""
    one = Scheduled()
    one.scarce = True

    one.schedule.tick()

    assert one.log.looks == [NOW_MS - RESERVED_MS]


def test_space_is_freed_at_once_if_the_disk_is_scarce() -> None:
    """Otherwise slowly."""
    one = Scheduled()
    hurried: list[bool] = []
    for one.scarce in (False, True, False):
        one.schedule.tick()
        hurried.append(one.log.is_urgent)

    assert hurried == [False, True, False]


def test_an_operator_can_delete_old_files_at_any_hour() -> None:
    """One scan finds the files, the next one deletes them; then the hours apply again."""
    one = Scheduled()
    one.schedule.request_deletion()

    assert one.schedule.tick() < SCAN_S
    one.log.expired_end = 500
    one.schedule.tick()
    assert one.log.deletions == [500]
    for _ in range(5):
        one.schedule.tick()
    assert len(one.log.looks) == 3


@pytest.mark.parametrize(
    ("pending", "waiting", "expected"),
    [
        (None, None, 500),
        (300, None, 300),
        (None, 200, 200),
        (300, 200, 200),
        (200, 300, 200),
        (700, 800, 500),
    ],
)
def test_undecided_and_undelivered_messages_are_kept(
    pending: int | None, waiting: int | None, expected: int
) -> None:
    """With the log after them."""
    one = Scheduled(Floors(pending, waiting))
    one.scarce = True
    one.log.expired_end = 500

    one.schedule.tick()

    assert one.log.deletions == [expected]
    assert one.floors.blocked == ([500] if pending and pending < 500 else [])
    assert one.schedule.metrics()["blocked_at"] == (expected if expected < 500 else -1)


def test_files_stay_until_they_are_in_the_archive(caplog: pytest.LogCaptureFixture) -> None:
    """However old they are and scarce the disk is; the log says so once for each place."""
    one = Scheduled(Floors())
    one.scarce = True
    one.log.expired_end = 500
    for archived in (100, 100, 300, 500):
        one.log.archived_end, one.log.deletable_end = archived, archived - 50
        one.schedule.tick()

    assert one.log.deletions == [50, 50, 250, 450]
    assert caplog.text.count("event=retention_blocked archived_offset") == 2
    assert one.schedule.metrics()["blocked_at"] == -1


def test_files_beyond_the_durable_log_are_not_deleted() -> None:
    """A delayed message that is not on disk yet is not known as waiting."""
    one = Scheduled()
    one.scarce = True
    one.log.expired_end, one.log.durable_offset = 500, 400

    one.schedule.tick()

    assert one.log.deletions == [400]


def test_nothing_is_deleted_twice() -> None:
    """Scans continue for an hour and mostly find files that are deleted already."""
    one = Scheduled()
    one.scarce = True
    one.log.expired_end = one.log.min_offset = 500

    one.schedule.tick()

    assert one.log.deletions == []


# --- over a real store


def test_the_oldest_undelivered_message_is_found_in_any_level(tmp_path: Path) -> None:
    """A message whose copy is not on disk yet is undelivered."""
    clock = Clock()
    store = MessageStore(small_config(tmp_path), now_ms=clock)
    store.open()
    levels = DelayLevels(parse_delay_levels("1s 10s 1h"))
    service = DelayService(
        store,
        levels,
        tmp_path / "config",
        scan=store.reader.scan,
        now_ms=clock,
        monotonic_ms=clock,
        fetch=fetch_nothing,
        queue_of=lambda _topic, queue_id: queue_id,
    )
    service.load()
    assert service.oldest_waiting_offset() is None

    def delayed(level: int) -> int:
        message = levels.delayed(draft("T", properties={"DELAY": str(level)}))
        (appended,) = append_durably(store, message)
        service.on_stored(message)
        return appended.physical_offset

    short, long, medium = delayed(1), delayed(3), delayed(2)
    assert service.oldest_waiting_offset() == short
    clock.now += 1_000
    with unflushed(store):  # the copy stays in memory for now
        service.tick()
        assert service.oldest_waiting_offset() == short
    flush(store)
    assert service.oldest_waiting_offset() == long
    clock.now += 3_600_000
    service.tick()
    flush(store)
    assert service.oldest_waiting_offset() is None
    assert short < long < medium
    store.close()


def test_a_scan_fetches_queue_entries_that_are_not_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for all levels; the next scan deletes, even if they were evicted again."""
    clock = Clock(NOW_MS)
    store = MessageStore(small_config(tmp_path), now_ms=clock)
    store.open()
    levels = DelayLevels(parse_delay_levels("1s 10s 1h"))
    delays = DelayService(
        store,
        levels,
        tmp_path / "config",
        scan=store.reader.scan,
        now_ms=clock,
        monotonic_ms=clock,
        fetch=fetch_nothing,
        queue_of=lambda _topic, queue_id: queue_id,
    )
    delays.load()
    stored = []
    for level in "312":
        waiting = levels.delayed(draft("T", properties={"DELAY": level}))
        stored += append_durably(store, waiting)
        delays.on_stored(waiting)
    oldest = stored[0]
    queue_files(store).close()  # what was just written is read from the map
    one = Scheduled()
    fetches: list[tuple[NotInMemoryError, Callable[[bool], None]]] = []
    woken: list[bool] = []
    schedule = RetentionPolicy(
        one.log,
        StoreSettings(),
        oldest_pending=lambda: one.floors.oldest_pending_offset,
        oldest_delayed=delays.oldest_waiting_offset,
        on_blocked=one.floors.on_retention_blocked,
        is_scarce=lambda: True,
        now_ms=clock,
        fetch=lambda *fetch: fetches.append(fetch),
        wake=lambda: woken.append(True),
    )
    schedule.tick()
    one.log.expired_end = oldest.end
    monkeypatch.setattr(CachedReads, "read_into", lambda *_: -1)

    schedule.tick()
    assert one.log.deletions == []
    ((missing, on_fetched),) = fetches
    assert len(missing.missing) == 3
    missing.fetch()
    on_fetched(True)
    assert woken == [True]
    schedule.tick()

    assert one.log.deletions == [oldest.physical_offset]
    assert len(fetches) == 1
    schedule.tick()
    assert len(fetches) == 2, "each deletion asks memory first"
    store.close()


# --- in a whole broker


def fill(rig: Rig, files: int) -> None:
    """Append messages until the log has grown by so many files."""
    end = rig.store.write_offset + files * LOG_FILE_SIZE
    while rig.store.write_offset < end:
        rig.store.append([draft("orders", 0, bytes(30_000))])


async def delete(rig: Rig) -> None:
    """Delete everything that is old enough and not needed, as `mqadmin` does."""
    operator = await rig.peer()
    answer = await operator.call(RequestCode.DELETE_EXPIRED_COMMITLOG, None)
    assert answer.code == ResponseCode.SUCCESS
    rig.store.deletion.stop()  # from here on the test runs its work
    for _ in range(5):
        await rig.wait(1_000)
        maintain(rig.store)
        work_off(rig.store.deletion)


def pulling(offset: int) -> PullMessageRequestHeader:
    """Return the header of a pull from an offset."""
    return pull_header(queue_offset=offset, expression_type="TAG")


async def moved(peer: Peer, offset: int) -> tuple[int, int]:
    """Pull below the minimum; return where the consumer must continue, and the minimum."""
    answer = await peer.call(RequestCode.PULL_MESSAGE, pulling(offset))
    assert answer.code == ResponseCode.PULL_OFFSET_MOVED
    fields = cast("dict[str, str]", answer.header)
    return int(fields["nextBeginOffset"]), int(fields["minOffset"])


@windowed()
async def test_an_undecided_half_keeps_its_file_and_the_log_after_it(rig: Rig) -> None:
    """It is parked as expired; after its decision the files are deleted, and consumers move on."""
    producer = await rig.peer()
    await producer.prepare("0" * 32)  # creates the topic
    fill(rig, 2)
    await rig.wait(2_000)
    half = await producer.prepare("1" * 32)
    await producer.end(await producer.prepare("2" * 32), COMMIT)
    fill(rig, 3)
    await rig.wait(2_000)
    rig.loop.now_ms += RESERVED_MS
    fill(rig, 1)
    first_pending = rig.service.oldest_pending_offset
    assert first_pending is not None
    producer = await rig.peer()
    await delete(rig)

    assert rig.store.min_offset == 0  # the very first half holds it
    assert rig.metrics["retention_blocked"] == 1
    infos = rig.service.view.page(-1, 10).infos
    assert {info.parked_reason for info in infos} == {"expired"}

    first = next(info for info in infos if info.offset == first_pending)
    rig.service.operator.decide(first.offset, "rollback")
    await delete(rig)
    assert rig.store.min_offset == half.offset - half.offset % LOG_FILE_SIZE

    await rig.kill()
    producer = await rig.peer()
    assert rig.store.min_offset == half.offset - half.offset % LOG_FILE_SIZE
    assert (await producer.end(half, COMMIT)).code == ResponseCode.SUCCESS
    await delete(rig)
    minimum = rig.store.min_offset
    assert minimum > half.offset
    first_kept, _ = rig.store.queues.bounds("orders", 0)
    assert await moved(producer, 1) == (first_kept, first_kept)
    assert first_kept > 1
    # The half is deleted: a decision repeated days later is refused.
    assert (await producer.end(half, COMMIT)).code == ResponseCode.SYSTEM_ERROR

    await rig.restart()
    producer = await rig.peer()
    assert rig.store.min_offset == minimum
    assert (await producer.end(half, COMMIT)).code == ResponseCode.SYSTEM_ERROR
    assert (await producer.end(half, UNKNOWN)).code == ResponseCode.SYSTEM_ERROR
    assert rig.service.metrics()["pending"] == 0


@windowed()
async def test_a_pull_whose_messages_are_deleted_meanwhile_is_retried(rig: Rig) -> None:
    """It waited for the disk; the retry gets the new offset."""
    consumer = await rig.peer()
    await consumer.prepare("0" * 32)  # creates the topic
    fill(rig, 2)
    await rig.wait(1_000)
    store = rig.store
    store.reader.view = lambda ranges, **_: None  # type: ignore[method-assign]
    store.reader.file_part = lambda *_: None  # type: ignore[method-assign]

    def gone(ranges: object, **_: object) -> bytes:
        raise FileNotFoundError(str(ranges))

    store.reader.read_cold = gone  # type: ignore[method-assign]
    opaque = consumer.send(RequestCode.PULL_MESSAGE, pulling(0))
    answer = await rig.patiently(consumer.answer(opaque))

    assert answer.code == ResponseCode.PULL_RETRY_IMMEDIATELY
    assert cast("dict[str, str]", answer.header)["nextBeginOffset"] == "0"


@windowed()
async def test_a_decision_that_is_not_on_disk_frees_no_file(rig: Rig) -> None:
    """If a power cut removes it, the half is still there and is decided once."""
    producer = await rig.peer()
    half = await producer.prepare("1" * 32, b"both or neither")
    fill(rig, 2)
    await rig.wait(1_000)
    rig.loop.now_ms += RESERVED_MS + HOUR_MS
    fill(rig, 1)
    await rig.settle()
    producer = await rig.peer()
    rig.disk.held = True
    producer.end_one_way(half, COMMIT)
    await rig.wait(100)
    assert rig.service.metrics()["pending"] == 0
    await delete(rig)
    assert rig.store.min_offset == 0

    rig.disk.held = False
    await rig.kill(power_cut=True)
    producer = await rig.peer()
    assert (await producer.end(half, COMMIT)).code == ResponseCode.SUCCESS
    assert rig.bodies().count(b"both or neither") == 1
    await delete(rig)
    assert rig.store.min_offset > 0


@windowed()
async def test_operators_find_the_metrics_that_are_documented(rig: Rig) -> None:
    """With these names, as integers, and no others of disk and retention."""
    operator = await rig.peer()
    answer = await operator.call(RequestCode.GET_BROKER_RUNTIME_INFO, None)
    told = json.loads(answer.body)["table"]
    documented = set()
    text = (ROOT / "docs" / "operations.md").read_text()
    for row in re.findall(r"^\| (`halfmq\.(?:disk|retention)\..*?) \|", text, re.MULTILINE):
        first, *others = re.findall(r"`([^`]+)`", row)
        prefix = first.rpartition(".")[0]
        documented |= {first, *(f"{prefix}.{name}" for name in others)}

    assert documented == {
        name for name in told if name.startswith(("halfmq.disk.", "halfmq.retention."))
    }
    assert all(int(told[name]) >= -1 for name in documented)
    assert told["halfmq.transactions.retention_blocked"] == "0"
