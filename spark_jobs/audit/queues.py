"""What the records of one split say about the queues: order, gaps, and their consume queues.

Within a topic's queue the offsets of the records rise by one in log order (by INNER_NUM where a
record is a batch). The consume queue has an entry for each, at the place that the offset names.
Both are checked where the log is read, queue by queue; what crosses splits is left to ``edges``,
which the driver puts side by side.

A queue that begins again at 0 is no fault: its topic was deleted and created anew.

Source: RocketMQ ``ConsumeQueue.java``, ``CommitLogDispatcherBuildConsumeQueue``.
"""

import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from halfmq.store.format.flags import INNER_BATCH, TRANSACTION_MASK, TransactionType
from halfmq.store.format.properties import PROPERTY_INNER_NUM, PROPERTY_TAGS, tag_hash
from halfmq.store.format.queue_entry import ENTRY_SIZE, PRE_BLANK
from halfmq.store.format.topics import SCHEDULE_TOPIC

from ..errors import LogDirectoryError
from ..log.arrays import Bools, Ints
from ..log.numbers import numbers_at
from ..log.queue_entries import ENTRIES, Slots
from ..log.rows import Rows, cut
from .judge import Kind

FAULTS_PER_QUEUE_MAX: Final = 1_000  # told of one queue in one split; of more, how many there are
EXTENDED: Final = -(1 << 31)  # tags codes below are places in a consumequeue_ext
NO_TAGS_CODE: Final = 1 << 62  # in place of a code that cannot be told from the record
_QUEUE_BITS: Final = 20
_SAFE_NAME: Final = re.compile(r"[%|a-zA-Z0-9_-]+")
_FILE_NAME: Final = re.compile(r"\d{20}")

QUEUED: Final = np.dtype(
    [
        ("queue", "<i8"),  # number of the topic, and of its queue
        ("slot", "<i8"),
        ("end", "<i8"),  # the slot behind it
        ("at", "<i8"),
        ("size", "<i8"),
        ("tags_code", "<i8"),
    ]
)


class QueueFault(NamedTuple):
    """One thing that is wrong with a queue; ``offsets`` are physical, of records."""

    kind: Kind
    topic: str
    queue: int
    offsets: list[int]
    detail: str


class Covered(NamedTuple):
    """Queue offsets from ``first`` to before ``end``, each of which has a record."""

    first: int
    end: int
    first_at: int  # physical offset of the record with the first one
    last_at: int  # and with the last one


class Edge(NamedTuple):
    """What a split knows of one run of a queue: of what lies between two beginnings at 0."""

    topic: str
    queue: int
    restarts: bool  # whether it begins the queue again, behind another run in the same split
    records: int
    first_at: int
    first_slot: int
    last_at: int
    end_slot: int  # behind the last record
    covered: list[Covered]  # by rising queue offset; in a sound queue there is one
    listed: int  # the highest slot that has an entry in the consume queue; -1: none
    missing: list[tuple[int, int, int]]  # first slot, last slot, physical offset: without an entry


class QueueFiles:
    """The consume queues of a store."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._open: dict[tuple[str, int], list[tuple[int, Slots]]] = {}

    def has(self, topic: str) -> bool:
        """Tell whether the topic should have one: those of batches have another kind."""
        batched = self._root.with_name("batchconsumequeue")
        return bool(_SAFE_NAME.fullmatch(topic)) and not (batched / topic).is_dir()

    def is_extended(self, topic: str, queue: int) -> bool:
        """Tell whether entries may have places in a ``consumequeue_ext`` for tags codes."""
        return (self._root.with_name("consumequeue_ext") / topic / str(queue)).is_dir()

    def entries(self, topic: str, queue: int, slots: Ints) -> Slots:
        """Read entries; where there is none all fields are 0."""
        found = np.zeros(len(slots), dtype=ENTRIES)
        for first, content in self._files(topic, queue):
            here = np.flatnonzero((slots >= first) & (slots < first + len(content)))
            found[here] = content[slots[here] - first]
        return found

    def all(self, topic: str, queue: int) -> Iterator[tuple[int, Slots]]:
        """Give all entries, file by file, with the slot of the first one."""
        yield from self._files(topic, queue)

    def queues(self) -> Iterator[tuple[str, int]]:
        """Name the queues that have files."""
        for topic in sorted(self._root.iterdir()):
            if topic.is_dir():
                for queue in sorted(topic.iterdir()):
                    if queue.name.isdigit() and queue.is_dir():
                        yield topic.name, int(queue.name)

    def _files(self, topic: str, queue: int) -> list[tuple[int, Slots]]:
        known = self._open.get((topic, queue))
        if known is None:
            folder = self._root / topic / str(queue)
            paths = sorted(folder.iterdir()) if folder.is_dir() else []
            mapped = (_map(path) for path in paths if _FILE_NAME.fullmatch(path.name))
            known = self._open[topic, queue] = [one for one in mapped if one is not None]
        return known


def _map(path: Path) -> tuple[int, Slots] | None:
    """Map one file; None when it is none, or has been deleted since."""
    try:
        with path.open("rb") as file:
            count = os.fstat(file.fileno()).st_size // ENTRY_SIZE
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if count else b""
    except (FileNotFoundError, IsADirectoryError):
        return None
    except OSError as error:
        raise LogDirectoryError(str(path), error.strerror or str(error)) from error
    return int(path.name) // ENTRY_SIZE, np.frombuffer(content, dtype=ENTRIES, count=count)


def is_written(entries: Slots) -> Bools:
    """Tell which entries name a record."""
    size = entries["size"]
    written: Bools = (size > 0) & (size != PRE_BLANK.size)
    return written


class QueueWatch:
    """Collects what the records of a split say about queues.

    ``with_tags`` is needed to compare them with the consume queues.
    """

    def __init__(self, *, with_tags: bool) -> None:
        self._with_tags = with_tags
        self._topics: dict[str, int] = {}
        self._taken: list[Slots] = []

    def take(self, rows: Rows) -> None:
        """Take the next records."""
        bits = rows.field("sys_flag")
        kind = bits & TRANSACTION_MASK
        queued = (kind == TransactionType.NONE) | (kind == TransactionType.COMMIT)
        rows, bits = rows.select(queued), bits[queued]
        if not len(rows):
            return
        slots = np.zeros(len(rows), dtype=QUEUED)
        numbers = [self._topics.setdefault(name, len(self._topics)) for name in rows.topic_names]
        topic = np.array(numbers, dtype=np.int64)[rows.topic_codes]
        slots["queue"] = (topic << _QUEUE_BITS) + (rows.field("queue_id") & (1 << _QUEUE_BITS) - 1)
        slots["slot"] = rows.field("queue_offset")
        slots["end"] = slots["slot"] + _slots_taken(rows, bits)
        slots["at"] = rows.physical_offsets
        slots["size"] = rows.sizes
        if self._with_tags:
            slots["tags_code"] = _tags_codes(rows)
        self._taken.append(slots)

    def taken(self) -> "Queued":
        """Return what was collected."""
        return Queued(np.concatenate([np.zeros(0, QUEUED), *self._taken]), list(self._topics))


class Queued(NamedTuple):
    """The records of a split as far as queues are concerned, in log order."""

    slots: Slots  # QUEUED
    topics: list[str]  # by their numbers

    def compared(self, files: "QueueFiles | None") -> tuple[list[Edge], list[QueueFault]]:
        """Say what they tell, in the order of the queues, and what the consume queues say."""
        if not len(self.slots):
            return [], []
        slots = self.slots[np.argsort(_small(self.slots["queue"]), kind="stable")]
        bounds = np.flatnonzero(slots["queue"][1:] != slots["queue"][:-1]) + 1
        edges: list[Edge] = []
        faults: list[QueueFault] = []
        for part in np.split(slots, bounds):
            number = int(part["queue"][0])
            topic, queue = self.topics[number >> _QUEUE_BITS], number & (1 << _QUEUE_BITS) - 1
            runs = np.split(part, _restarts(part))
            for run in runs:
                faults += _disorder(topic, queue, run)
                edges.append(_edge(topic, queue, run, restarts=run is not runs[0]))
            # Where a topic was created anew, the consume queues have only what came after.
            if files is not None and files.has(topic):
                edges[-1] = _compared(edges[-1], runs[-1], files, faults)
        return edges, faults


def _compared(edge: Edge, run: Slots, files: QueueFiles, faults: list[QueueFault]) -> Edge:
    entries = files.entries(edge.topic, edge.queue, run["slot"])
    if files.is_extended(edge.topic, edge.queue):
        run = run.copy()
        run["tags_code"][entries["tags_code"] < EXTENDED] = NO_TAGS_CODE
    faults += _wrong_entries(edge.topic, edge.queue, run, entries)
    written = is_written(entries)
    listed = int(run["slot"][written].max(initial=-1))
    return edge._replace(listed=listed, missing=_ranges(run[~written]))


def _edge(topic: str, queue: int, run: Slots, *, restarts: bool) -> Edge:
    return Edge(
        topic=topic,
        queue=queue,
        restarts=restarts,
        records=len(run),
        first_at=int(run["at"][0]),
        first_slot=int(run["slot"][0]),
        last_at=int(run["at"][-1]),
        end_slot=int(run["end"][-1]),
        covered=list(_covered(run)),
        listed=-1,
        missing=[],
    )


def _covered(run: Slots) -> Iterator[Covered]:
    if not _is_sound(run):
        run = run[np.argsort(run["slot"], kind="stable")]
    ends = np.maximum.accumulate(run["end"])
    gaps = np.flatnonzero(run["slot"][1:] > ends[:-1])
    firsts = [0, *(gaps + 1).tolist()]
    lasts = [*gaps.tolist(), len(run) - 1]
    for first, last in zip(firsts, lasts, strict=True):
        at = int(run["at"][first]), int(run["at"][last])
        yield Covered(int(run["slot"][first]), int(ends[last]), *at)


def _is_sound(run: Slots) -> bool:
    return bool((run["slot"][1:] == run["end"][:-1]).all())


def _small(numbers: Ints) -> npt.NDArray[np.generic]:
    """Renumber so that a stable sort is one by counting, where there are few numbers."""
    distinct = np.unique(numbers)
    if len(distinct) >= 1 << 16:
        return numbers
    return np.searchsorted(distinct, numbers).astype(np.uint16)


def _slots_taken(rows: Rows, bits: Ints) -> Ints:
    taken = np.ones(len(rows), dtype=np.int64)
    if (bits & INNER_BATCH).any():
        row, starts, ends = rows.property_block.find(PROPERTY_INNER_NUM)
        inner = numbers_at(rows.property_block.padded, starts, ends)
        right = inner.is_number & (bits[row] & INNER_BATCH != 0) & (inner.values > 0)
        taken[row[right]] = inner.values[right]
    return taken


def _tags_codes(rows: Rows) -> Ints:
    """Compute what the consume queue should say of the tags of each record."""
    block = rows.property_block
    row, starts, ends = block.find(PROPERTY_TAGS)
    tags = cut(block.buffer, starts, ends).dictionary_encode()
    hashes = [tag_hash(str(tag, "utf-8", "replace")) for tag in tags.dictionary.to_pylist()]
    codes = np.zeros(len(rows), dtype=np.int64)
    codes[row] = np.array(hashes, dtype=np.int64)[tags.indices.to_numpy()]
    # Of a delayed message it is the time when it is due, which only the broker knew.
    waits = np.array([name == SCHEDULE_TOPIC for name in rows.topic_names], dtype=np.bool_)
    codes[rows.of_topics(waits)] = NO_TAGS_CODE
    return codes


def _restarts(slots: Slots) -> Ints:
    """Find the records that begin the queue again."""
    return np.flatnonzero(slots["slot"][1:] == 0) + 1


def _disorder(topic: str, queue: int, run: Slots) -> Iterator[QueueFault]:
    if _is_sound(run):
        return
    for place in np.flatnonzero(run["slot"][1:] < run["end"][:-1])[:FAULTS_PER_QUEUE_MAX]:
        before, after = run[place], run[place + 1]
        yield out_of_order(topic, queue, before["at"], before["slot"], after["at"], after["slot"])


def out_of_order(
    topic: str, queue: int, at: int, slot: int, next_at: int, next_slot: int
) -> QueueFault:
    """Say that a record is not where its queue offset says."""
    detail = f"queue {queue} of {topic} goes from offset {slot} to {next_slot}"
    return QueueFault(Kind.OUT_OF_ORDER, topic, queue, [int(at), int(next_at)], detail)


def _wrong_entries(topic: str, queue: int, run: Slots, entries: Slots) -> Iterator[QueueFault]:
    codes = entries["tags_code"]
    wrong = (entries["physical_offset"] != run["at"]) | (entries["size"] != run["size"])
    wrong |= (codes != run["tags_code"]) & (run["tags_code"] != NO_TAGS_CODE)
    wrong &= is_written(entries)
    for place in np.flatnonzero(wrong)[:FAULTS_PER_QUEUE_MAX]:
        record = run[place]
        offset, size, code = entries[place].tolist()
        told = f"offset {offset}, size {size}, tags code {code}"
        due = f"offset {record['at']}, size {record['size']}"
        if record["tags_code"] != NO_TAGS_CODE:
            due += f", tags code {record['tags_code']}"
        detail = f"entry {record['slot']} of queue {queue} of {topic} says {told}; it is {due}"
        yield QueueFault(Kind.WRONG_QUEUE_ENTRY, topic, queue, [int(record["at"])], detail)


def _ranges(slots: Slots) -> list[tuple[int, int, int]]:
    """Put neighbours together: first slot, last slot, physical offset of the first."""
    if not len(slots):
        return []
    ends = np.flatnonzero(slots["slot"][1:] != slots["end"][:-1])
    firsts = np.concatenate([[0], ends + 1])
    lasts = np.append(ends, len(slots) - 1)
    return [
        (int(slots["slot"][first]), int(slots["slot"][last]), int(slots["at"][first]))
        for first, last in zip(firsts, lasts, strict=True)
    ]
