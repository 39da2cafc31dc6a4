"""Find the files of consume queues and read their entries; no Spark in here.

The queue of a topic is a folder ``consumequeue/TOPIC/NUMBER`` of files, each named by the byte
where it begins in 20 digits. The entry of queue offset q is at byte q * 20. Files are reserved at
their full size, so that zeros follow the last entry that was written.

Queues of batches (``batchconsumequeue``) have another format and are not read.

Source: RocketMQ ``ConsumeQueue.java``; the entry from ``halfmq.store.format.queue_entry``.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from halfmq.store.format.queue_entry import DTYPE, ENTRY_SIZE, PRE_BLANK
from halfmq.store.format.record import RECORD_SIZE_MIN

from ..errors import LogDirectoryError
from .arrays import Ints
from .files import ANY_NAME, entries, folder_in, is_remote, read_bytes, readable
from .segments import FILE_NAME, OFFSET_END

Slots = npt.NDArray[np.void]
ENTRIES: Final = np.dtype(list(DTYPE))
assert ENTRIES.itemsize == ENTRY_SIZE

_QUEUE_NAME: Final = re.compile(r"\d{1,9}")  # an int, as in RocketMQ


class EntryKind(IntEnum):
    """What stands in the place of an entry."""

    ENTRY = 0
    PRE_BLANK = 1  # fills the queue up to its first message
    BLANK = 2  # nothing, in front of an entry
    # What is corrupt:
    NO_ENTRY = 3  # 20 bytes of something else
    CUT_SHORT = 4  # less than 20 bytes, at the end of a file
    NO_PLACE = 5  # a file whose name is not the place of an entry; its slot is -1


class QueueFile(NamedTuple):
    """One file of a queue."""

    topic: str
    queue: int
    begin: int  # bytes, as it is named
    path: str
    size: int  # bytes


class EntryBatch(NamedTuple):
    """Some entries of one file."""

    file: QueueFile
    slots: Ints  # queue offsets
    content: Slots  # zeros where less than 20 bytes are there
    kinds: npt.NDArray[np.int8]  # EntryKind


def find_queue_files(directory: str, topics: frozenset[str] | None = None) -> list[QueueFile]:
    """List the files of the queues in a store root or in a folder of consume queues.

    Raises:
        LogDirectoryError: The directory cannot be read, or holds no consume queue.
    """
    with readable(directory):
        root = folder_in(directory, "consumequeue")
        queues = list(_queues(root))
        chosen = (one for one in queues if topics is None or one[0] in topics)
        files = [file for queue in chosen for file in _files(*queue)]
    if not queues:
        reason = f"no consume queue (a folder TOPIC/NUMBER of files) in {root}"
        raise LogDirectoryError(directory, reason)
    return files


def _queues(root: str) -> Iterator[tuple[str, int, str]]:
    for topic in entries(root, ANY_NAME):
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
    with readable(file.path):
        content, size = _written(file.path)
    if file.begin % ENTRY_SIZE or file.begin >= OFFSET_END:
        yield _corrupt(file, -1, EntryKind.NO_PLACE)
        return
    count = len(content) // ENTRY_SIZE
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
    last = (file.begin + size) // ENTRY_SIZE
    if size % ENTRY_SIZE and first <= last < end:
        yield _corrupt(file, last, EntryKind.CUT_SHORT)


def _written(path: str) -> tuple[bytes, int]:
    """Read a file up to its last entry; return it with the size of the whole file.

    Most of a file is reserved space. A local file system says where that is, and nothing of it is
    read.
    """
    if is_remote(path):
        content = read_bytes(path)
        size = len(content)
    else:
        with Path(path).open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            content = opened.read(_data_end(opened.fileno()))
    filled = -(-len(content.rstrip(b"\0")) // ENTRY_SIZE) * ENTRY_SIZE
    return content[:filled].ljust(min(filled, size), b"\0"), size


def _data_end(descriptor: int) -> int:
    """Find where the last part of a file ends that holds data."""
    end = 0
    with suppress(OSError):  # there is no data any more
        while True:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
            end = os.lseek(descriptor, start, os.SEEK_HOLE)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return end


def _kinds(found: Slots) -> npt.NDArray[np.int8]:
    at, size, code = found["physical_offset"], found["size"], found["tags_code"]
    kinds = np.full(len(found), EntryKind.NO_ENTRY, dtype=np.int8)
    is_entry = (at >= 0) & (at < OFFSET_END) & (size >= RECORD_SIZE_MIN)
    kinds[is_entry & (size != PRE_BLANK.size)] = EntryKind.ENTRY
    kinds[(at == 0) & (size == PRE_BLANK.size) & (code == 0)] = EntryKind.PRE_BLANK
    kinds[(at == 0) & (size == 0) & (code == 0)] = EntryKind.BLANK
    return kinds


def _corrupt(file: QueueFile, slot: int, kind: EntryKind) -> EntryBatch:
    kinds = np.array([kind], dtype=np.int8)
    return EntryBatch(file, np.array([slot]), np.zeros(1, dtype=ENTRIES), kinds)
