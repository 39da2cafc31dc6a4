"""Writes commit-log segments for tests, in the dialects of RocketMQ and of halfmq.

The bytes are packed here, from the field tables of RocketMQ's ``CommitLog.java``, and not by
``halfmq.store``: a mistake there must not be repeated by what reads it.
"""

import json
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from .oracle.delays import LEVELS

HALF = "RMQ_SYS_TRANS_HALF_TOPIC"
OP = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
PARKED = "TRANS_CHECK_MAX_TIME_TOPIC"
SCHEDULE = "SCHEDULE_TOPIC_XXXX"
PREPARED, COMMIT, ROLLBACK = 0x4, 0x8, 0xC
V1, V2, BLANK = 0xDAA320A7, 0xDAA320AB, 0xCBD43194
START = 1_700_000_000_000  # ms; the clock of a test log begins here
HOST_V4 = bytes([127, 0, 0, 1]) + struct.pack(">i", 54321)
HOST_V6 = bytes(15) + b"\x01" + struct.pack(">i", 54321)


class Written(NamedTuple):
    """A record as it went into the log."""

    offset: int  # physical
    size: int
    queue_offset: int
    topic: str
    body: bytes
    properties: dict[str, str]
    queue_id: int = 0
    sys_flag: int = 0
    born: int = START  # ms
    stored: int = START  # ms


def encode_properties(properties: Mapping[str, str], *, last_separator: bool = True) -> bytes:
    encoded = "".join(f"{name}\x01{value}\x02" for name, value in properties.items()).encode()
    return encoded if last_separator else encoded[:-1]


def encode(
    topic: str,
    body: bytes,
    properties: bytes,
    *,
    offset: int,
    queue_id: int = 0,
    queue_offset: int = 0,
    flag: int = 0,
    sys_flag: int = 0,
    born: int = START,
    stored: int = START,
    born_host: bytes = HOST_V4,
    store_host: bytes = HOST_V4,
    reconsume_times: int = 0,
    prepared: int = 0,
    body_crc: int | None = None,
) -> bytes:
    """Pack one record; the hosts decide on the IPv6 bits, the topic on the version."""
    sys_flag |= (0x10 if len(born_host) == 20 else 0) | (0x20 if len(store_host) == 20 else 0)
    name = topic.encode()
    wide = len(topic) > 127
    crc = crc32(body) & 0x7FFFFFFF if body_crc is None else body_crc
    rest = b"".join(
        (
            struct.pack(">IIiiqqiq", V2 if wide else V1, crc, queue_id, flag, queue_offset,
                        offset, sys_flag, born),
            born_host,
            struct.pack(">q", stored),
            store_host,
            struct.pack(">iqi", reconsume_times, prepared, len(body)),
            body,
            struct.pack(">h" if wide else ">b", len(name)),
            name,
            struct.pack(">h", len(properties)),
            properties,
        )
    )  # fmt: skip
    return struct.pack(">i", len(rest) + 4) + rest


class LogWriter:
    """Appends records to segments in a folder; ``close`` writes the files."""

    def __init__(
        self,
        folder: Path,
        *,
        segment_size: int = 1 << 16,
        first: int = 0,
        last_separator: bool = True,
    ) -> None:
        assert first % segment_size == 0
        self.folder = folder
        self.segment_size = segment_size
        self.written: list[Written] = []
        self.now = START  # ms; every record is a millisecond later than the one before
        self._last_separator = last_separator
        self._base = first
        self._content = bytearray()
        self._queue_offsets: dict[tuple[str, int], int] = defaultdict(int)
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def end(self) -> int:
        """The physical offset at which the next record would start, if it fits."""
        return self._base + len(self._content)

    def append(
        self,
        topic: str,
        body: bytes = b"",
        properties: Mapping[str, str] | None = None,
        *,
        queue_id: int = 0,
        queue_offset: int | None = None,
        **fields: Any,
    ) -> Written:
        """Append one record; queue offsets count up by themselves unless given."""
        given = dict(properties or {})
        packed = encode_properties(given, last_separator=self._last_separator)
        slot = (topic, queue_id)
        counted = queue_offset is None and fields.get("sys_flag", 0) not in {PREPARED, ROLLBACK}
        place = (
            (self._queue_offsets[slot] if counted else 0) if queue_offset is None else queue_offset
        )
        self.now += 1
        fields = {"born": self.now - 1, "stored": self.now, **fields}
        record = self._encode(topic, body, packed, queue_id, place, fields)
        if len(self._content) + len(record) + 8 > self.segment_size:
            self._roll()
            record = self._encode(topic, body, packed, queue_id, place, fields)
        flags = fields.get("sys_flag", 0)
        times = fields["born"], fields["stored"]
        written = Written(self.end, len(record), place, topic, body, given, queue_id, flags, *times)
        self._content += record
        self.written.append(written)
        if counted:
            self._queue_offsets[slot] += 1
        return written

    def skip_slots(self, topic: str, queue_id: int, count: int) -> None:
        """Have the next record of a queue leave out some queue offsets."""
        self._queue_offsets[topic, queue_id] += count

    def append_raw(self, content: bytes) -> int:
        """Append bytes that may be anything; return their physical offset."""
        offset = self.end
        self._content += content
        return offset

    def close(self) -> Path:
        """Write the last segment at its full size, and return the folder."""
        self._write(self._content)
        return self.folder

    def _encode(
        self, topic: str, body: bytes, properties: bytes, queue_id: int, queue_offset: int,
        fields: Mapping[str, Any],
    ) -> bytes:  # fmt: skip
        return encode(topic, body, properties, offset=self.end, queue_id=queue_id,
                      queue_offset=queue_offset, **fields)  # fmt: skip

    def _roll(self) -> None:
        left = self.segment_size - len(self._content)
        self._write(self._content + struct.pack(">iI", left, BLANK))
        self._base += self.segment_size
        self._content = bytearray()

    def _write(self, content: bytes | bytearray) -> None:
        path = self.folder / f"{self._base:020}"
        with path.open("wb") as file:
            file.write(content)
            file.truncate(self.segment_size)


class Transactions:
    """What both dialects share: how a half and a final message look."""

    def __init__(self, log: LogWriter, *, group: str = "pg") -> None:
        self.log = log
        self.group = group
        self._keys = 0

    def key(self) -> str:
        self._keys += 1
        return f"7F0000010001{self._keys:020X}"

    def half(self, key: str | None = None, body: bytes = b"order", **more: str) -> Written:
        unique = key or self.key()
        properties = {
            "TRAN_MSG": "true",
            "PGROUP": self.group,
            "UNIQ_KEY": unique,
            "REAL_TOPIC": "orders",
            "REAL_QID": "3",
            "TAGS": "created",
            **more,
        }
        return self.log.append(HALF, body, properties)

    def commit(self, half: Written, *, names: int | None = None) -> Written:
        """Append the final message; ``names`` is the half it claims to come from."""
        return self.log.append(
            half.properties["REAL_TOPIC"],
            half.body,
            half.properties,
            queue_id=int(half.properties["REAL_QID"]),
            sys_flag=COMMIT,
            prepared=half.offset if names is None else names,
            born=half.born,
        )


class Apache(Transactions):
    """RocketMQ 5: copies at every check, ops in batches, nothing else for a rollback."""

    def __init__(self, log: LogWriter, *, group: str = "pg", op_each: bool = False) -> None:
        super().__init__(log, group=group)
        self._op_each = op_each  # as 4.x: one op per decision, at once
        self._done: list[int] = []

    def check(self, half: Written, times: int) -> Written:
        """Append the copy of a half that a check makes."""
        properties = {**half.properties, "TRANSACTION_CHECK_TIMES": str(times)}
        return self.log.append(HALF, half.body, properties, born=half.born)

    def commit(self, half: Written, *, names: int | None = None) -> Written:
        final = super().commit(half, names=names)
        self.done(half.queue_offset)
        return final

    def rollback(self, half: Written) -> Written | None:
        """Roll back; return the record that says so, if there is one."""
        self.done(half.queue_offset)
        return None

    def done(self, queue_offset: int) -> None:
        """Queue an op for a half queue offset."""
        self._done.append(queue_offset)
        if self._op_each:
            self._write_op(str(queue_offset))
            self._done.clear()

    def take_back(self, queue_offset: int) -> None:
        """Forget a queued op."""
        self._done.remove(queue_offset)

    def commit_at_level(self, half: Written, level: int) -> Written:
        """Append a final message that waits in the queue of a delay level, with no time."""
        properties = {**half.properties, "DELAY": str(level)}
        if isinstance(self, Ours):
            properties["TRANSACTION_HALF_ID"] = f"7F00000100002A9F{half.offset:016X}"
        final = self.log.append(
            SCHEDULE,
            half.body,
            properties,
            queue_id=level - 1,
            sys_flag=COMMIT,
            prepared=half.offset,
            born=half.born,
        )
        self.done(half.queue_offset)
        return final

    def write_ops(self) -> None:
        """Write the ops that are queued, as the batch thread does every three seconds."""
        if self._done:
            self._write_op("".join(f"{offset}," for offset in self._done))
            self._done.clear()

    def discard(self, half: Written) -> Written:
        return self.log.append(PARKED, half.body, half.properties, born=half.born)

    def _write_op(self, body: str) -> None:
        # In the order of Java's HashMap, as in the golden stores.
        self.log.append(OP, body.encode(), {"WAIT": "true", "TAGS": "d"})


class Ours(Apache):
    """halfmq: a record for a rollback too, no copies, ops as a late mirror."""

    def commit(self, half: Written, *, names: int | None = None) -> Written:
        identity = {"TRANSACTION_HALF_ID": f"7F00000100002A9F{half.offset:016X}"}
        return super().commit(half._replace(properties=half.properties | identity), names=names)

    def rollback(self, half: Written, *, names: int | None = None) -> Written:
        kept = ("PGROUP", "UNIQ_KEY", "__transactionId__")
        properties = {name: half.properties[name] for name in kept if name in half.properties}
        self.done(half.queue_offset)
        return self.log.append(
            HALF,
            b"",
            properties,
            sys_flag=ROLLBACK,
            prepared=half.offset if names is None else names,
        )

    def commit_delayed(
        self, half: Written, *, waits: int = 1, by_rocketmq: bool = False
    ) -> Written:
        """Append the final message to the delayed ones, then the copies up to its delivery.

        ``by_rocketmq`` leaves the transaction bits in the delivered copy, as RocketMQ does.
        """
        final = self.wait(half, self.log.now + 5)
        for _ in range(waits - 1):
            self.wait(half, self.log.now + 5, again=True)
        self.arrive(half, by_rocketmq=by_rocketmq)
        return final

    def _waiting(self, half: Written) -> dict[str, str]:
        identity = {"TRANSACTION_HALF_ID": f"7F00000100002A9F{half.offset:016X}"}
        return half.properties | identity | {"DELAY": "1"}

    def wait(self, half: Written, due: int, *, again: bool = False) -> Written:
        """Append the final message that waits until ``due``, or once more a copy of it."""
        properties = self._waiting(half) | {"TRANSACTION_DELIVER_MS": str(due)}
        if again:
            return self.log.append(SCHEDULE, half.body, properties, born=half.born)
        self.done(half.queue_offset)
        return self.log.append(
            SCHEDULE,
            half.body,
            properties,
            sys_flag=COMMIT,
            prepared=half.offset,
            born=half.born,
        )

    def arrive(self, half: Written, *, by_rocketmq: bool = False) -> Written:
        """Append what consumers get of a message that waited."""
        return self.log.append(
            half.properties["REAL_TOPIC"],
            half.body,
            self._waiting(half),
            queue_id=int(half.properties["REAL_QID"]),
            sys_flag=COMMIT if by_rocketmq else 0,
            born=half.born,
        )

    def _write_op(self, body: str) -> None:
        self.log.append(OP, body.encode(), {"TAGS": "d", "WAIT": "true"})

    def discard(self, half: Written, reason: str = "unknown") -> Written:
        properties = {**half.properties, "TRANSACTION_PARKED": reason}
        return self.log.append(PARKED, half.body, properties, prepared=half.offset, born=half.born)

    def resume(self, half: Written) -> Written:
        """Append the record by which an operator has a parked transaction asked about again."""
        properties = {"PGROUP": half.properties["PGROUP"]}
        return self.log.append(HALF, b"", properties, sys_flag=PREPARED, prepared=half.offset)

    def rollback_bare(self, half: Written) -> Written:
        """Append the rollback record of a half that the broker could not read."""
        properties = {"PGROUP": half.properties["PGROUP"]}
        self.done(half.queue_offset)
        return self.log.append(HALF, b"", properties, sys_flag=ROLLBACK, prepared=half.offset)

    # --- several messages

    def several(self, count: int, *, of: int | None = None) -> list[Written]:
        """Append the halves of several messages; of fewer than there were meant to be."""
        keys = [self.key() for _ in range(count)]
        return [
            self.half(key, b"one of several", TRANSACTION_GROUP=f"{keys[0]},{n},{of or count}")
            for n, key in enumerate(keys)
        ]

    def commit_several(
        self, halves: Sequence[Written], *, finals: int | None = None
    ) -> list[Written]:
        """Append the final messages, the one that names the others first; perhaps not all."""
        beside = ",".join(str(half.offset) for half in halves[1:])
        leader = {**halves[0].properties, "TRANSACTION_HALVES": beside}
        named = [halves[0]._replace(properties=leader), *halves[1:]][:finals]
        return [self.commit(half) for half in named]

    def rollback_several(self, halves: Sequence[Written]) -> Written:
        """Append the one rollback record."""
        kept = ("PGROUP", "UNIQ_KEY")
        properties = {"TRANSACTION_HALVES": ",".join(str(half.offset) for half in halves[1:])}
        properties |= {name: halves[0].properties[name] for name in kept}
        for half in halves:
            self.done(half.queue_offset)
        return self.log.append(HALF, b"", properties, sys_flag=ROLLBACK, prepared=halves[0].offset)


# --- what a store has beside its log


def java_hash(text: str) -> int:
    """The hash of Java's ``String``, signed."""
    value = 0
    for letter in text:
        value = (value * 31 + ord(letter)) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def write_store(log: LogWriter, queues: Mapping[str, int]) -> None:
    """Write the consume queues of a closed log, and the topics of which there are so many queues.

    The log's folder is ``commitlog`` of the store.
    """
    root = log.folder.parent
    entries: dict[tuple[str, int], dict[int, bytes]] = defaultdict(dict)
    for record in log.written:
        if record.sys_flag & ROLLBACK not in {PREPARED, ROLLBACK}:
            code = java_hash(record.properties.get("TAGS", ""))
            if record.topic == SCHEDULE:
                level = int(record.properties.get("DELAY", "0"))
                code = record.stored + LEVELS[level - 1] if level else code  # when it is due
            entry = struct.pack(">qiq", record.offset, record.size, code)
            entries[record.topic, record.queue_id].setdefault(record.queue_offset, entry)
    for (topic, queue), known in entries.items():
        folder = root / "consumequeue" / topic / str(queue)
        folder.mkdir(parents=True)
        content = bytearray((max(known) + 5) * 20)  # files are longer than what is written
        for slot, entry in known.items():
            content[slot * 20 : slot * 20 + 20] = entry
        (folder / f"{0:020}").write_bytes(content)
    table = {
        topic: {"topicName": topic, "readQueueNums": count, "writeQueueNums": count, "perm": 6}
        for topic, count in queues.items()
    }
    (root / "config").mkdir()
    (root / "config" / "topics.json").write_text(json.dumps({"topicConfigTable": table}))
