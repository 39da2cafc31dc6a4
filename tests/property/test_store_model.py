"""The store, compared with a dictionary over any sequence of appends, stops and kills."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from halfmq.store.config import FlushMode
from halfmq.store.errors import CorruptRecordError, RecordTooLargeError
from halfmq.store.files.worker import Round, ThreadWorker, Worker
from halfmq.store.format.index import index_keys
from halfmq.store.format.properties import encode_properties, tag_hash, tags_code
from halfmq.store.format.record import Record, decode_record, decode_records
from halfmq.store.log.append_request import AppendRequest
from halfmq.store.message_store import GetStatus, MessageStore
from tests.support.stepped_worker import SteppedWorker
from tests.support.stores import (
    BORN,
    HOST,
    HOST_V6,
    Clock,
    crash,
    flush,
    log_of,
    maintain,
    small_config,
)

NEVER = 3_600_000  # ms
TOPICS = ("A", "B", "%RETRY%" + "g" * 140, "SCHEDULE_TOPIC_XXXX")
TAGS = ("", "x", "y")
UNIQUE_KEYS = tuple(
    f"7F0000010001{client}00000000{number:04X}"
    for client in ("0" * 8, "1" * 8)
    for number in (1, 2)
)
Key = tuple[str, int]

drafts = st.builds(
    lambda topic, queue_id, body, tag, key, sys_flag, born_host: AppendRequest(
        topic=topic,
        queue_id=queue_id,
        body=body,
        properties=(
            properties := encode_properties(
                {"TAGS": tag, "UNIQ_KEY" if key in UNIQUE_KEYS else "KEYS": key}
            )
        ),
        tags_code=tags_code(properties),
        sys_flag=sys_flag,
        born_timestamp=BORN,
        born_host=born_host,
        store_host=HOST,
    ),
    topic=st.sampled_from(TOPICS),
    queue_id=st.integers(0, 1),
    body=st.integers(0, 600).map(bytes) | st.sampled_from([bytes(3000), b"\xda\xa3\x20\xa7" * 20]),
    tag=st.sampled_from(TAGS),
    key=st.sampled_from(["", "k1", "k2 k3", "k1 k1", *UNIQUE_KEYS]),
    sys_flag=st.sampled_from([0, 0, 0, 0x1, 0x8, 0x4, 0xC]),
    born_host=st.sampled_from([HOST, HOST, HOST, HOST_V6]),
)


def is_whole(encoded: bytes) -> bool:
    """Return whether a reader would accept this as a record."""
    try:
        return decode_record(encoded).total_size == len(encoded)
    except CorruptRecordError:
        return False


class StoreModel(RuleBasedStateMachine):
    """A store and, in a list and a dictionary, what was appended to it."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="store-model-"))
        self.lives = 0
        self.clock = Clock()
        self.log: list[tuple[int, AppendRequest, int]] = []  # physical offset, draft, queue offset
        self.queues: dict[Key, list[int]] = {}  # physical offsets

    @initialize(
        log_size=st.sampled_from([8192, 16_384]),
        queue_size=st.sampled_from([60, 1000]),
        crc=st.booleans(),
        mode=st.sampled_from(FlushMode),
    )
    def create(self, log_size: int, queue_size: int, mode: FlushMode, *, crc: bool) -> None:
        self.changes: dict[str, Any] = {
            "commit_log_file_size": log_size,
            "consume_queue_file_size": queue_size,
            "append_property_crc": crc,
            "flush_mode": mode,
            "flush_interval_consume_queue_ms": NEVER,
            "flush_interval_ms": NEVER,
        }
        self.root = self.directory / "0"
        self.open()

    def open(self) -> None:
        def worker(name: str, work: Round, pause: float) -> Worker:
            if name != "store-deletion":
                return ThreadWorker(name, work, pause)
            self.helper = SteppedWorker(work)
            return self.helper

        config = small_config(self.root, **self.changes)
        self.store = MessageStore(config, now_ms=self.clock, worker=worker)
        report = self.store.open()
        assert report.end_offset == self.store.write_offset == self.store.durable_offset

    @property
    def start(self) -> int:
        """Return where the log begins; deleted records before that may return after a kill."""
        return self.store.min_offset

    @rule(group=st.lists(drafts, min_size=1, max_size=12), contiguous=st.booleans())
    def append(self, group: list[AppendRequest], *, contiguous: bool) -> None:
        before = self.store.write_offset
        try:
            done = self.store.append(group, contiguous=contiguous)
        except RecordTooLargeError:
            assert contiguous
            assert self.store.write_offset == before
            return
        for draft, appended in zip(group, done, strict=True):
            queue = self.queues.setdefault((draft.topic, draft.queue_id), [])
            if draft.sys_flag & 4:
                assert appended.queue_offset == 0
            else:
                assert appended.queue_offset == len(queue)
                queue.append(appended.physical_offset)
            self.log.append((appended.physical_offset, draft, appended.queue_offset))
        assert [appended.end for appended in done[:-1]] == [
            appended.physical_offset for appended in done[1:]
        ] or not contiguous
        flush(self.store)

    @rule(part=st.floats(0, 1), finish=st.booleans())
    def delete(self, part: float, *, finish: bool) -> None:
        """Delete the oldest files; perhaps continue before the deletion is complete."""
        before = self.store.min_offset
        wanted = int(part * self.store.write_offset)
        self.store.deletion.delete_before(wanted)
        flush(self.store)
        maintain(self.store)
        self.store.tick(1000)
        size = self.changes["commit_log_file_size"]
        last = log_of(self.store).files.bases[-1]
        assert self.store.min_offset == max(before, min(wanted - wanted % size, last))
        if finish:
            self.finish_deletion()

    @rule(steps=st.integers(1, 5))
    def go_on_deleting(self, steps: int) -> None:
        for _ in range(steps):
            self.helper.step()

    @rule()
    def finish_deletion(self) -> None:
        """After that queues begin with their first message, and no other file is left."""
        for _ in range(2):
            while self.helper.step():
                pass
            self.store.tick(1000)
        for key, queue in self.queues.items():
            first = next((at for at, one in enumerate(queue) if one >= self.start), len(queue))
            assert self.store.queues.bounds(*key) == (first, len(queue))
        names = sorted(path.name for path in (self.root / "commitlog").iterdir())
        assert int(names[0]) == self.start

    @rule()
    def look_for_old_files(self) -> None:
        """If all files are old, all but the last are deleted."""
        self.store.deletion.find_expired(1 << 60)
        while self.helper.step():
            pass
        bases = log_of(self.store).files.bases
        # The age of a file follows from the first record of the next one, which may have none.
        assert max(self.store.deletion.expired_end, bases[0]) in bases[-2:]
        assert self.store.deletion.expired_end <= bases[-1]

    @rule()
    def tick(self) -> None:
        assert not self.store.tick(1000)

    @rule()
    def upkeep(self) -> None:
        maintain(self.store)

    @rule()
    def stop_and_start(self) -> None:
        self.store.close()
        assert not (self.root / "abort").exists()
        self.open()

    def kill(self) -> None:
        """Continue with the files that a killed process would leave."""
        self.lives += 1
        copy = crash(self.root, self.directory / str(self.lives))
        self.store.close()
        shutil.rmtree(self.root)
        self.root = copy

    @rule(lost=st.sampled_from(["", "", "consumequeue", "index", "checkpoint"]))
    def kill_and_start(self, lost: str) -> None:
        self.kill()
        if lost == "checkpoint":
            (self.root / lost).unlink(missing_ok=True)
        elif lost:
            shutil.rmtree(self.root / lost)
        self.open()
        if lost == "consumequeue":  # their ends are known only from their messages
            for queue in self.queues.values():
                if all(physical < self.start for physical in queue):
                    queue.clear()

    @rule(part=st.floats(0, 1, exclude_max=True))
    @precondition(lambda self: self.log and self.log[-1][0] >= self.start)
    def tear_last_record(self, part: float) -> None:
        """Kill, and lose the last record from some byte on, as after a power cut."""
        self.kill()
        physical_offset, draft, _ = self.log.pop()
        if not draft.sys_flag & 4:
            self.queues[draft.topic, draft.queue_id].pop()
        start = physical_offset % self.changes["commit_log_file_size"]
        path = self.root / "commitlog" / f"{physical_offset - start:020d}"
        content = bytearray(path.read_bytes())
        end = start + int.from_bytes(content[start : start + 4], "big")
        cut = start + int(part * (end - start))
        content[cut:end] = bytes(end - cut)
        if is_whole(bytes(content[start:end])):
            content[start:end] = bytes(end - start)  # no checksum covers the loss: lose it all
        path.write_bytes(content)
        self.open()

    @rule(key=st.tuples(st.sampled_from(TOPICS), st.integers(0, 1)), data=st.data())
    def pull(self, key: Key, data: st.DataObject) -> None:
        queue = self.queues.get(key, [])
        offset = data.draw(st.integers(-1, len(queue) + 1))
        tags = data.draw(st.sampled_from([None, "x", "y"]))
        max_count = data.draw(st.integers(1, 40))
        codes = None if tags is None else frozenset({tag_hash(tags)})

        result = self.store.queues.get(*key, offset, max_count=max_count, tag_codes=codes)

        first, _ = self.store.queues.bounds(*key)
        if not first <= offset < len(queue):
            assert result.status is not GetStatus.FOUND
            if queue and offset < first:
                assert (result.status, result.next_offset) == (GetStatus.OFFSET_TOO_SMALL, first)
            return
        drafts_by_offset = {physical: draft for physical, draft, _ in self.log}
        expected = [
            physical
            for physical in queue[offset:]
            if physical >= self.start
            and (tags is None or drafts_by_offset[physical].tags_code == tag_hash(tags))
        ][:max_count]
        found = decode_records(self.store.reader.read_cold(result.ranges))
        assert [record.physical_offset for record in found] == expected
        assert offset < result.next_offset <= len(queue)

    @rule(key=st.sampled_from(["k1", "k2", "k3", *UNIQUE_KEYS]), topic=st.sampled_from(TOPICS))
    def look_up(self, key: str, topic: str) -> None:
        expected = {
            physical
            for physical, draft, _ in self.log
            if draft.topic == topic
            and physical >= self.start
            and draft.sys_flag & 0xC != 0xC
            and key.encode() in index_keys(draft.properties)
        }
        hits = self.store.index.query(topic, key, 64, 0, 1 << 60)
        newest = sorted(expected)[-20:]
        if len(hits) < 64:
            assert expected == set(hits)
        assert set(newest) <= set(hits)

    @invariant()
    def everything_is_in_its_place(self) -> None:
        if not hasattr(self, "store"):
            return
        scanned = list(self.store.reader.scan(0))
        kept = [one for one in self.log if one[0] >= self.start]
        assert [record.physical_offset for record in scanned] == [
            physical for physical, _, _ in kept
        ]
        for record, (_, draft, queue_offset) in zip(scanned, kept, strict=True):
            self.check(record, draft, queue_offset)
        for key, queue in self.queues.items():
            first, end = self.store.queues.bounds(*key)
            assert end == len(queue)
            assert all(physical < self.start for physical in queue[:first])

    @staticmethod
    def check(record: Record, draft: AppendRequest, queue_offset: int) -> None:
        assert (record.topic, record.queue_id, record.body) == (
            draft.topic,
            draft.queue_id,
            draft.body,
        )
        assert record.properties.startswith(draft.properties)
        assert record.queue_offset == queue_offset
        assert record.born_host == draft.born_host

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.directory)


def test_no_sequence_of_steps_makes_store_and_model_differ() -> None:
    """Appends, deletions, pulls, queries, stops, kills and torn ends, in any order."""
    run_state_machine_as_test(
        StoreModel,
        settings=settings(
            max_examples=20,
            stateful_step_count=20,
            suppress_health_check=[HealthCheck.data_too_large],
        ),
    )


@pytest.mark.campaign
def test_no_long_sequence_does() -> None:
    """The same for longer: about ``HALFMQ_CAMPAIGN_SECONDS`` (150)."""
    run_state_machine_as_test(
        StoreModel,
        settings=settings(
            max_examples=2 * int(os.environ.get("HALFMQ_CAMPAIGN_SECONDS", "150")),
            stateful_step_count=50,
            suppress_health_check=[HealthCheck.data_too_large],
        ),
    )
