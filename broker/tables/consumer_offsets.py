"""The position of each consumer group in each queue.

Commits change memory only; the file is written at most every `PERSIST_INTERVAL_MS`. After a crash,
consumers repeat messages consumed since the last write, and skip none. A reset is written before it
is answered, and stays until a consumer pulls from its offset.

Source: RocketMQ `ConsumerOffsetManager`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

from halfmq.remoting.codes import INT64_MAX, ResponseCode
from halfmq.store.format.topics import SYSTEM_GROUP_PREFIX

from ..errors import RequestRefusedError
from ..limits.kept import OFFSET_BYTES, Kept
from .table_file import PeriodicSave, TableFile, as_integer, as_object

NO_OFFSET: Final = -1
"""Result of `query` if the group has not committed an offset in the queue."""

PERSIST_INTERVAL_MS: Final = 5_000
"""Milliseconds between two writes of the file. Source: `flushConsumerOffsetInterval`."""

COMMITS_PER_VERSION: Final = 500
"""Commits that count as one change. Source: `consumerOffsetUpdateVersionStep`."""


PAIR_BYTES: Final = 340
"""Of a group in a topic, besides both names: its entry, and a dict for a few queues."""

QUEUE_BYTES: Final = 80
"""Of each queue: the offset, and its place in that dict."""

RESET_BYTES: Final = 240
"""Of a queue that was reset and not pulled since, besides both names: its entry."""

KEYS_PER_STEP: Final = 64  # examined in one step, in some 10 us

_RESETS_KEY: Final = "halfmqResets"
"""Key of the file for pending resets. RocketMQ has them in memory; it ignores and drops the key."""


class ConsumerOffsetTable:
    """Next offset to consume by group, topic and queue, kept in `consumerOffset.json`."""

    def __init__(
        self, path: Path, *, now_ms: Callable[[], int], bytes_max: int = OFFSET_BYTES.most
    ) -> None:
        self._file = TableFile(
            path,
            now_ms,
            derived=["groupTopicMap", _RESETS_KEY],
            table_key="offsetTable",
            if_removed="each consumer group then begins where its own setting says, at its first "
            "or last message",
        )
        self._bytes_max = bytes_max
        self._offsets: dict[str, dict[int, int]] = {}  # "topic@group" → queue id → offset
        self._bytes = 0
        self._commits = 0
        # "topic@group@queue id" → offset from which its consumer must continue, and has not pulled.
        self._resets: dict[str, int] = {}
        self._saves = PeriodicSave(PERSIST_INTERVAL_MS, now_ms)
        self.on_forget: Callable[[str, str, Collection[int]], None] = lambda *_: None
        """Called with group, topic and queue ids of offsets that `forget` has removed."""

    def load(self) -> None:
        """Read the file; raise what ``TableFile.load`` raises."""
        content = self._file.load()
        for key, queues in as_object(content.get("offsetTable")).items():
            self._offsets[key] = {
                as_integer(queue_id, -1): as_integer(offset, 0)
                for queue_id, offset in as_object(queues).items()
            }
            self._bytes += _size_of(key, len(self._offsets[key]))
        for key, offset in as_object(content.get(_RESETS_KEY)).items():
            self._add_reset(key, as_integer(offset, 0))

    def query(self, group: str, topic: str, queue_id: int) -> int:
        """Return the next offset to consume, or `NO_OFFSET`."""
        queues = self._offsets.get(f"{topic}@{group}")
        return NO_OFFSET if queues is None else queues.get(queue_id, NO_OFFSET)

    def reset(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Set the next offset to consume; ignore commits of other offsets until ``end_reset``.

        Raises what ``commit`` raises.
        """
        self.place(group, topic, queue_id, offset)
        key = f"{topic}@{group}@{queue_id}"
        self._check_room(RESET_BYTES + len(key))
        self._add_reset(key, offset)

    def _add_reset(self, key: str, offset: int) -> None:
        self._bytes += RESET_BYTES + len(key)
        self._resets[key] = offset

    def pending_reset(self, group: str, topic: str, queue_id: int) -> int | None:
        """Return the offset to which a queue was reset; None if it was not, or that has ended.

        A reset ends when a consumer pulls from its offset, and not when one is told: that may be
        an earlier owner of the queue, which has left a pull behind.
        """
        return self._resets.get(f"{topic}@{group}@{queue_id}") if self._resets else None

    def end_reset(self, group: str, topic: str, queue_id: int) -> None:
        """Count commits again; a consumer pulls from the offset of the reset."""
        self._end_reset(f"{topic}@{group}@{queue_id}")

    def _end_reset(self, key: str) -> None:
        if self._resets.pop(key, None) is not None:
            self._bytes -= RESET_BYTES + len(key)
            self._saves.dirty = True

    def place(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Set the next offset to consume, and drop a pending reset.

        Raises what ``commit`` raises.
        """
        self.end_reset(group, topic, queue_id)
        self.commit(group, topic, queue_id, offset)

    def commit(
        self, group: str, topic: str, queue_id: int, offset: int, *, end: int = INT64_MAX
    ) -> bool:
        """Set the next offset to consume; it may decrease.

        Return False if it is ignored because a reset to another offset is pending, or because it is
        beyond the end of the queue: messages to come would be skipped. RocketMQ keeps it.

        Raises:
            RequestRefusedError: The group is the broker's own, or the queue is a new one and the
                table is full.
        """
        if group.startswith(SYSTEM_GROUP_PREFIX):
            raise RequestRefusedError(
                f"the offsets of group[{group}] are the broker's own: consume with a group whose "
                f"name does not begin with {SYSTEM_GROUP_PREFIX}",
                ResponseCode.NO_PERMISSION,
            )
        if offset > end or self.pending_reset(group, topic, queue_id) not in (None, offset):
            return False
        self.keep(group, topic, queue_id, offset)
        return True

    def keep(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Set an offset that no client commits; otherwise as `commit`."""
        key = f"{topic}@{group}"
        queues = self._offsets.get(key)
        if queues is None or queue_id not in queues:
            self._check_room(size := QUEUE_BYTES if queues else _size_of(key, 1))
            self._bytes += size
            queues = self._offsets.setdefault(key, {})
        queues[queue_id] = offset
        self._saves.dirty = True
        self._commits += 1
        if self._commits % COMMITS_PER_VERSION == 0:
            self._file.next_version()

    def _check_room(self, size: int) -> None:
        if self._bytes + size > self._bytes_max:
            raise RequestRefusedError(
                f"no offset of a further queue can be kept: the limit is {self._bytes_max} bytes",
                ResponseCode.NO_PERMISSION,
            )

    def key_batches(self) -> list[list[str]]:
        """Return `topic@group` of everything that has a commit, in batches for slices."""
        keys = list(self._offsets)
        return [keys[at : at + KEYS_PER_STEP] for at in range(0, len(keys), KEYS_PER_STEP)]

    def queues_of_key(self, key: str) -> Mapping[int, int]:
        """Return the offsets of one `topic@group` by queue id."""
        return self._offsets.get(key, {})

    @property
    def data_version(self) -> dict[str, int]:
        """The version of the table as RocketMQ writes it."""
        return self._file.data_version

    def queues(self, group: str, topic: str) -> Mapping[int, int]:
        """Return the offsets of the group in the topic by queue id."""
        return self._offsets.get(f"{topic}@{group}", {})

    def forget(self, *, topic: str | None = None, group: str | None = None) -> Iterator[None]:
        """Remove the offsets of a topic or of a group, in steps.

        A consumer that still runs begins at 0 if the topic is created again.
        """
        for reset in list(self._resets):
            of_topic, _, of_group = _key(reset).partition("@")
            if topic in (None, of_topic) and group in (None, of_group):
                self._end_reset(reset)
        for number, key in enumerate(list(self._offsets)):
            of_topic, _, of_group = key.partition("@")
            if topic in (None, of_topic) and group in (None, of_group):
                queues = self._offsets.pop(key, {})
                self._bytes -= _size_of(key, len(queues))
                if topic is not None and self._bytes < self._bytes_max:
                    for queue_id in queues:
                        self._add_reset(f"{key}@{queue_id}", 0)
                self.on_forget(of_group, of_topic, queues)
                self._file.next_version()
                self._saves.dirty = True
            if number % KEYS_PER_STEP == 0:
                yield

    async def save_now(self) -> None:
        """Write the current offsets on a thread; return when they are on disk.

        Raises:
            RequestRefusedError: They could not be written; that is tried again later.
        """
        await self._file.save_on_thread(self._content, patient=True)

    def groups(self) -> set[str]:
        return {key.partition("@")[2] for key in self._offsets}

    def persist_job(self) -> Callable[[], None] | None:
        """Return a function that writes the current offsets; None if nothing is due.

        The function may run on another thread while commits continue.
        """
        return self._job(patient=True) if self._saves.is_due() else None

    def persist(self) -> None:
        """Write the file now, for a stop; blocks on the disk."""
        if self._saves.dirty:
            self._job(patient=False)()

    def _job(self, *, patient: bool) -> Callable[[], None]:
        write = self._file.prepare(self._content, patient=patient)
        return self._saves.job(write, self._file)

    def _content(self) -> dict[str, object]:
        offsets = _LiveOffsets(self._offsets)
        # Without those of deleted topics, which may never be created again.
        resets = {key: at for key, at in self._resets.copy().items() if _key(key) in offsets}
        return {"offsetTable": offsets, _RESETS_KEY: resets}

    def kept(self) -> Kept:
        return {OFFSET_BYTES: self._bytes}


def _size_of(key: str, queues: int) -> int:
    """Return the bytes that a group in a topic takes."""
    return PAIR_BYTES + len(key) + QUEUE_BYTES * queues


def _key(reset: str) -> str:
    """Return the "topic@group" of a "topic@group@queue id"."""
    return reset.rpartition("@")[0]


class _LiveOffsets(dict[str, dict[int, int]]):
    """The offsets, for a thread that writes them while commits continue.

    The keys are copied at once, in a millisecond for a hundred thousand. The offsets of a group in
    a topic are copied when they are written. Each offset is independent of the others, so a newer
    one may be written.
    """

    def __getitem__(self, key: str) -> dict[int, int]:
        return super().__getitem__(key).copy()
