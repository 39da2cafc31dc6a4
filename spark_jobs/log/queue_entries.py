"""Find the files of consume queues and read their entries; no Spark in here.

The queue of a topic is a folder ``consumequeue/TOPIC/NUMBER`` of files, each named by the byte
where it begins in 20 digits. The entry of queue offset q is at byte q * 20. Files are reserved at
their full size, so that zeros follow the last entry that was written.

Queues of batches (``batchconsumequeue``) have another format and are not read.

Source: RocketMQ ``ConsumeQueue.java``; the entry from ``halfmq.store.format.queue_entry``.
"""

import re
from collections.abc import Iterator
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from halfmq.store.format.queue_entry import DTYPE, ENTRY_SIZE, PRE_BLANK
from halfmq.store.format.record import RECORD_SIZE_MIN

from ..errors import LogDirectoryError
from .arrays import Ints
from .files import child, entries, exists, is_folder, read_bytes
from .segments import FILE_NAME, OFFSET_END

Slots = npt.NDArray[np.void]
ENTRIES: Final = np.dtype(list(DTYPE))
assert ENTRIES.itemsize == ENTRY_SIZE

_ANY_NAME: Final = re.compile(r".+", re.DOTALL)
_QUEUE_NAME: Final = re.compile(r"\d{1,9}")  # an int, as in RocketMQ

NOT_A_PLACE: Final = "the file's name is not the place of an entry"
CUT_SHORT: Final = "the file ends within an entry"
NOT_AN_ENTRY: Final = "no record can be at this offset or have this size"


class EntryKind(IntEnum):
    """What stands in the place of an entry."""

    ENTRY = 0
    PRE_BLANK = 1  # fills the queue up to its first message
    BLANK = 2  # nothing, in front of an entry
    CORRUPT = 3


class QueueFile(NamedTuple):
    """One file of a queue."""

    topic: str
    queue: int
    begin: int  # bytes, as it is named
    path: str
    size: int  # bytes


class EntryBatch(NamedTuple):
    """Some entries of one file; of a range that is none, ``content`` is empty and ``error`` set."""

    file: QueueFile
    slots: Ints  # queue offsets
    content: Slots
    kinds: npt.NDArray[np.int8]
    error: str | None = None


def find_queue_files(directory: str, topics: frozenset[str] | None = None) -> list[QueueFile]:
    """List the files of the queues in a store root or in a folder of consume queues.

    Raises:
        LogDirectoryError: The directory cannot be read, or holds no consume queue.
    """
    try:
        if not is_folder(directory):
            reason = "is not a directory" if exists(directory) else "no such directory"
            raise LogDirectoryError(directory, reason)
        root = child(directory, "consumequeue")
        root = root if is_folder(root) else directory
        queues = list(_queues(root))
        if not queues:
            reason = f"no consume queue (a folder TOPIC/NUMBER of files) in {root}"
            raise LogDirectoryError(directory, reason)
        chosen = (one for one in queues if topics is None or one[0] in topics)
        return [file for queue in chosen for file in _files(*queue)]
    except OSError as error:
        place = str(error.filename or directory)
        raise LogDirectoryError(place, error.strerror or str(error)) from error


def _queues(root: str) -> Iterator[tuple[str, int, str]]:
    for topic in entries(root, _ANY_NAME):
        if topic.is_folder:
            for queue in entries(topic.path, _QUEUE_NAME):
                if queue.is_folder:
                    yield topic.name, int(queue.name), queue.path


def _files(topic: str, queue: int, folder: str) -> Iterator[QueueFile]:
    for file in entries(folder, FILE_NAME):
        if not file.is_folder and file.size:
            yield QueueFile(topic, queue, int(file.name), file.path, file.size)


def read_entries(file: QueueFile, first: int = 0, end: int = OFFSET_END) -> Iterator[EntryBatch]:
    """Read the entries of the queue offsets [first, end), up to the last one that was written.

    Raises:
        LogDirectoryError: The file cannot be read.
    """
    try:
        content = read_bytes(file.path)
    except OSError as error:
        raise LogDirectoryError(file.path, error.strerror or str(error)) from error
    if file.begin % ENTRY_SIZE or file.begin >= OFFSET_END:
        yield _no_entry(file, None, NOT_A_PLACE)
        return
    count, rest = divmod(len(content), ENTRY_SIZE)
    slots = file.begin // ENTRY_SIZE + np.arange(count, dtype=np.int64)
    found = np.frombuffer(content, dtype=ENTRIES, count=count)
    kinds = _kinds(found)
    written = np.flatnonzero(kinds != EntryKind.BLANK)
    count = int(written[-1]) + 1 if len(written) else 0
    if count and found["size"][count - 1] == 0:
        count -= 1  # a broker is just writing it: the size comes after the offset
    wanted = np.flatnonzero((slots[:count] >= first) & (slots[:count] < end))
    if len(wanted):
        yield EntryBatch(file, slots[wanted], found[wanted], kinds[wanted])
    last = file.begin // ENTRY_SIZE + len(found)
    if rest and first <= last < end:
        yield _no_entry(file, last, CUT_SHORT)


def _kinds(found: Slots) -> npt.NDArray[np.int8]:
    at, size, code = found["physical_offset"], found["size"], found["tags_code"]
    kinds = np.full(len(found), EntryKind.CORRUPT, dtype=np.int8)
    is_entry = (at >= 0) & (at < OFFSET_END) & (size >= RECORD_SIZE_MIN)
    kinds[is_entry & (size != PRE_BLANK.size)] = EntryKind.ENTRY
    kinds[(at == 0) & (size == PRE_BLANK.size) & (code == 0)] = EntryKind.PRE_BLANK
    kinds[(at == 0) & (size == 0) & (code == 0)] = EntryKind.BLANK
    return kinds


def _no_entry(file: QueueFile, slot: int | None, error: str) -> EntryBatch:
    slots = np.array([] if slot is None else [slot], dtype=np.int64)
    kinds = np.array([EntryKind.CORRUPT], dtype=np.int8)
    return EntryBatch(file, slots, np.zeros(0, dtype=ENTRIES), kinds, error)
