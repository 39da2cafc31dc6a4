"""Consume queues: for each topic and queue id, where its messages lie in the commit log.

A queue is derived from the log and can be rebuilt from it, so its entries need not be flushed
before a message is acknowledged. The appender writes entries inline through ``map``, ``position``
and ``limit``, and moves ``position`` itself. It calls ``grow`` when ``position`` reaches ``limit``:
because the file is full, its reserved space is used up, or the map was closed.

Recently written entries are read from the map. All others are read by ``preadv``: a fault on a page
that is not in memory would stop the whole process and read megabytes ahead.

A broker can have more queues than the process may open files. ``MapPool`` closes the files that
were opened first; they are opened again when they are used.
"""

import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from attrs import define, field

from ..errors import DiskFullError
from ..files import disk
from ..files.mapped_file import try_reserve, write_zeros, zero_tail
from ..files.mapped_file_queue import MappedFileQueue
from ..files.page_cache import CachedReads, read
from ..format.queue_entry import ENTRY_SIZE, PRE_BLANK, QueueEntry, unpack_entry
from ..format.record import HEAD_V4, MAGIC_V1, MAGIC_V2, TOPIC_LENGTH_V1_MAX, topic_field
from ..format.record_fields import PROPERTIES_LENGTH

# Most bytes reserved at a time: a page at first, because most queues are short, then as much as the
# file holds already. Whole files would cost 6 MB per queue.
RESERVE_STEP: Final = 1 << 16
# Bytes before the end of a queue that are read through the map if this run wrote them: they are in
# memory, and the map saves 3 us per pull for consumers that lag by up to 13 000 messages.
FRESH_BYTES: Final = 1 << 18
WARMED_BYTES: Final = 1 << 18  # read at once, so that the next 13 000 entries are in memory too
BLANKS_MAX: Final = 16 << 20  # most blank entries in a row: 320 MB
_PAGE: Final = 4096
# Used in place of a map that is not open, so that the appender needs no test for None.
_CLOSED: Final = disk.Map(-1, ENTRY_SIZE)
_NOTHING: Final[Mapping[int, QueueEntry]] = {}
_HEAD_BYTES: Final = _PAGE // ENTRY_SIZE * ENTRY_SIZE  # all entries of most queues


def _unmap(opened: disk.Map) -> None:
    if opened is not _CLOSED:
        opened.close()


def is_directory_name(topic: str) -> bool:
    """Return whether a topic is a safe directory name; a damaged log may hold any bytes."""
    return topic not in {"", ".", ".."} and "/" not in topic and "\0" not in topic


def _is_written(fd: int, place: int) -> bool:
    """Return whether a file has a valid entry at a place, counted from its first one."""
    return unpack_entry(disk.pread(fd, ENTRY_SIZE, place * ENTRY_SIZE)).is_valid


def _first_after(fd: int, base: int, queue_offsets: range, physical_offset: int) -> int:
    """Return the first of some queue offsets in a file whose record is at or after an offset."""

    def is_after(queue_offset: int) -> bool:
        for place in range(queue_offset, queue_offsets.stop):
            entry = unpack_entry(disk.pread(fd, ENTRY_SIZE, place * ENTRY_SIZE - base))
            if entry != PRE_BLANK:  # a blank entry has no offset; the next entry decides
                # An invalid one was removed meanwhile, with all after it.
                return entry.physical_offset >= physical_offset or not entry.is_valid
        return True

    return queue_offsets.start + bisect_left(queue_offsets, True, key=is_after)


class MapPool:
    """Limits the number of queues with open files, each of which uses up to two descriptors."""

    __slots__ = ("_queues", "_size_max")

    def __init__(self, size_max: int) -> None:
        self._queues: dict[ConsumeQueue, None] = {}  # in the order of their last mapping
        self._size_max = size_max

    def mapped(self, queue: "ConsumeQueue") -> None:
        """Record that a queue has opened a file; close the oldest queue's if there are too many."""
        self._queues.pop(queue, None)
        self._queues[queue] = None
        if len(self._queues) > self._size_max:
            oldest = next(iter(self._queues))
            self.forget(oldest)
            oldest.close()

    def forget(self, queue: "ConsumeQueue") -> None:
        """Record that a queue has closed its files."""
        self._queues.pop(queue, None)


@define(eq=False, repr=False)
class ConsumeQueue:
    """The entries of one topic and queue id, and the fields that all its records share."""

    topic: str
    queue_id: int
    _files: MappedFileQueue
    _pool: MapPool
    special: bool = False  # the appender's fast path cannot encode its records
    magic: int = field(init=False)
    topic_field: bytes = field(init=False)
    overhead: int = field(init=False)

    next_offset: int = field(default=0, init=False)  # queue offset of the next entry
    min_offset: int = field(default=0, init=False)
    is_deleted: bool = field(default=False, init=False)  # a new queue may use its files' names
    last_end: int = field(default=0, init=False)  # physical offset after the newest record
    # Entries below are counted, see ``QueueReader.take_appended``.
    counted_offset: int = field(default=0, init=False)
    appended_bytes: int = field(
        default=0, init=False
    )  # of the records of the entries from there on
    # Entries below are on disk; moved by the maintenance thread alone.
    flushed_offset: int = field(default=0, init=False)
    kept_end: int = field(default=sys.maxsize, init=False)  # unchanged below since the last run

    map: disk.Map = field(default=_CLOSED, init=False)  # of the file that next_offset falls into
    position: int = field(default=0, init=False)  # where in that file the next entry goes
    limit: int = field(default=0, init=False)  # from here on grow() precedes a write
    _active_base: int = field(default=0, init=False)
    _reserved_end: int = field(default=0, init=False)  # of the blocks reserved in that file
    _fresh_from: int = field(init=False)  # position of the first entry written through that map
    _read_fd: int = field(default=-1, init=False)  # of the file that is read without the map
    _read_base: int = field(default=-1, init=False)
    _cached: CachedReads = field(factory=CachedReads, init=False)
    # Entries by queue offset, from ``load`` to the end of the recovery.
    _known: Mapping[int, QueueEntry] = field(default=_NOTHING, init=False)
    _visible_end: int = field(default=0, init=False)  # result of the last search
    # The names of the files and of their directories are on disk.
    _names_durable: bool = field(default=False, init=False)
    _end_durable: bool = field(default=True, init=False)  # so are zeros for removed entries

    def __attrs_post_init__(self) -> None:
        topic_bytes = self.topic.encode()
        if not is_directory_name(self.topic) or self.queue_id < 0:
            raise ValueError(f"topic {self.topic!r}, queue {self.queue_id} cannot name a directory")
        version_2 = len(topic_bytes) > TOPIC_LENGTH_V1_MAX
        self.magic = MAGIC_V2 if version_2 else MAGIC_V1
        self.topic_field = topic_field(topic_bytes, version_2=version_2)
        self.overhead = HEAD_V4.size + len(self.topic_field) + PROPERTIES_LENGTH.size
        self._fresh_from = self._files.file_size

    def grow(self) -> None:
        """Make room for at least one entry at ``position``; if the file is full, in the next one.

        Raises:
            DiskFullError: There is no space; nothing has changed.
        """
        files = self._files
        base, position = self._active_base, self.position
        if position >= files.file_size:
            base, position = base + files.file_size, 0
        if base not in files.bases[-2:]:
            self._create(base)
        self._reserved_end = self._map_active(base, position)
        self._active_base, self.position = base, position
        self.limit = self._reserved_end // ENTRY_SIZE * ENTRY_SIZE

    def _create(self, base: int) -> None:
        try:
            disk.make_directories(self._files.directory)
        except OSError as error:
            raise DiskFullError(self._files.directory, str(error)) from error
        self._files.create(base)
        self._names_durable = False

    def _map_active(self, base: int, position: int) -> int:
        """Map the file for writing and reserve space from ``position`` on; return its end."""
        size = self._files.file_size
        reserved_end = self._reserved_end if base == self._active_base else 0
        path = self._files.path(base)
        fd = disk.open_file(path, disk.WRITE)
        try:
            if reserved_end < min(position + ENTRY_SIZE, size):
                reserved_end = self._reserve(fd, position, path)
            if self.map is _CLOSED or base != self._active_base:
                _unmap(self.map)
                self.map = disk.Map(fd, size)
                self._fresh_from = position
                self._pool.mapped(self)
        finally:
            disk.close(fd)
        return reserved_end

    def _reserve(self, fd: int, position: int, path: Path) -> int:
        """Reserve space from ``position`` on, more in longer files; return its end."""
        step = min(max(position, _PAGE), RESERVE_STEP)
        end = min((position + step + _PAGE) // _PAGE * _PAGE, self._files.file_size)
        try_reserve(fd, position - position % _PAGE, end, path)
        # A first touch through the map would read ahead, up to megabytes of empty file: 1.3 ms
        # instead of 10 us.
        write_zeros(fd, position, end, path)
        return end

    def extend(self, entries: bytes, physical_end: int) -> None:
        """Append entries; the record of the last one ends at ``physical_end``."""
        done = 0
        while done < len(entries):
            if self.position >= self.limit:
                self.grow()
            size = min(self.limit - self.position, len(entries) - done)
            self.map[self.position : self.position + size] = entries[done : done + size]
            self.position += size
            done += size
        self.next_offset += len(entries) // ENTRY_SIZE
        self.last_end = physical_end

    def replace(self, queue_offset: int, entry: QueueEntry) -> None:
        """Overwrite one entry; only for recovery."""
        position = queue_offset * ENTRY_SIZE
        base = self._files.base_of(position)
        with disk.opened(self._files.path(base), disk.WRITE) as fd:
            disk.pwrite(fd, entry.pack(), position - base)
        self.forget_known()
        self.flushed_offset = min(self.flushed_offset, queue_offset)
        self.kept_end = min(self.kept_end, queue_offset)

    def move_to(self, queue_offset: int) -> None:
        """Continue at ``queue_offset``; existing entries there stay until overwritten."""
        self.close()
        self.forget_known()
        position = queue_offset * ENTRY_SIZE
        self._active_base = self._files.base_of(position)
        self._reserved_end = 0
        self.position = position - self._active_base
        self.next_offset = queue_offset
        self._visible_end = min(self._visible_end, queue_offset)
        self.flushed_offset = min(self.flushed_offset, queue_offset)

    def cut(self, end: int) -> None:
        """Remove all entries from queue offset ``end`` on, and continue there.

        A file that becomes empty is kept and zeroed: after a kill it is often the only file of a
        queue, and deleting and creating it would take milliseconds for each queue.
        """
        self.move_to(end)
        self.kept_end = min(self.kept_end, end)
        files = self._files
        bases = files.bases
        removed: object = files.remove_from(self._active_base + 1)
        if bases and bases[-1] == self._active_base:
            removed = zero_tail(files.path(self._active_base), self.position) or removed
        if removed:
            self.sync_end_again()
        if end and not self.position:
            self._active_base -= files.file_size
            self.position = files.file_size
        self.last_end = self._end_of(end - 1) if end > self.first_offset else 0

    def sync_end_again(self) -> None:
        """Make the next ``sync`` flush the zeros after the end, even if no entry was added.

        The zeros may not be on disk yet. After a power cut the removed entries would reappear, and
        a start would trust them as soon as the checkpoint has passed them.
        """
        self._end_durable = False

    def _end_of(self, queue_offset: int) -> int:
        entry = self.entry(queue_offset)
        return 0 if entry.size == PRE_BLANK.size else entry.physical_offset + entry.size

    def skip_to(self, queue_offset: int) -> None:
        """Continue at a higher offset; the records in between are missing in the log."""
        gap = queue_offset - self.next_offset
        if self.next_offset == self.first_offset or gap > BLANKS_MAX:
            self._start_at(queue_offset)
        else:
            self.extend(PRE_BLANK.pack() * gap, self.last_end)

    def _start_at(self, queue_offset: int) -> None:
        """Begin an empty queue at an offset other than 0.

        The entries before it in its file are blank.
        Source: RocketMQ ``ConsumeQueue.java``, ``fillPreBlank``.
        """
        self._files.remove_from(0)
        in_file = queue_offset * ENTRY_SIZE % self._files.file_size // ENTRY_SIZE
        self.cut(queue_offset - in_file)
        self.extend(PRE_BLANK.pack() * in_file, 0)
        self.min_offset = queue_offset

    @property
    def first_offset(self) -> int:
        """The queue offset of the first entry of the first file, blank or not."""
        bases = self._files.bases
        return bases[0] // ENTRY_SIZE if bases else self.next_offset

    def visible_end(self, readable_offset: int) -> int:
        """Return the queue offset after the last entry whose record may be read."""
        if self.last_end <= readable_offset:
            return self.next_offset
        low, high = max(self.min_offset, self._visible_end), self.next_offset
        while low < high:
            middle = (low + high) // 2
            physical_offset, size, _ = self.entry(middle)
            if physical_offset + size <= readable_offset or size == PRE_BLANK.size:
                low = middle + 1
            else:
                high = middle
        self._visible_end = low  # the readable offset never decreases
        return low

    def entry(self, queue_offset: int) -> QueueEntry:
        """Read one entry; it need not be valid."""
        return self._known.get(queue_offset) or unpack_entry(self.entries(queue_offset, 1))

    def entries(self, queue_offset: int, count: int) -> bytes:
        """Read consecutive entries, 20 bytes each, waiting for the disk if needed.

        Raises:
            FileNotFoundError: Their file does not exist.
        """
        found = self.cached_entries(queue_offset, count)
        if found is not None:
            return found
        position = queue_offset * ENTRY_SIZE
        wanted = count * ENTRY_SIZE
        base = self._files.base_of(position)
        found = read(self._files.path(base), self._reading(base), wanted, position - base)
        while len(found) < wanted:
            base += self._files.file_size
            found += read(self._files.path(base), self._reading(base), wanted - len(found), 0)
        return found

    def cached_entries(self, queue_offset: int, count: int) -> bytes | None:
        """Read consecutive entries, 20 bytes each; None if some must be read from disk.

        Raises:
            FileNotFoundError: Their file does not exist.
        """
        file_size = self._files.file_size
        position = queue_offset * ENTRY_SIZE
        start = position % file_size
        wanted = count * ENTRY_SIZE
        base = position - start
        if (
            base == self._active_base
            and start >= self._fresh_from
            and start >= self.position - FRESH_BYTES
        ):
            return self.map[start : start + wanted]
        target = bytearray(wanted)
        if start + wanted <= file_size:
            read = self._cached.read_into(self._reading(base), (target,), start)
            return bytes(target) if read == wanted else None
        in_file = file_size - start
        view = memoryview(target)
        if self._cached.read_into(self._reading(base), (view[:in_file],), start) != in_file:
            return None
        while in_file < wanted:
            base += file_size
            more = view[in_file : in_file + file_size]
            if self._cached.read_into(self._reading(base), (more,), 0) != len(more):
                return None
            in_file += len(more)
        return bytes(target)

    def warm(self, queue_offset: int) -> None:
        """Load entries from an offset on into memory, waiting for the disk; any thread.

        Raises:
            FileNotFoundError: The file does not exist.
        """
        position = queue_offset * ENTRY_SIZE
        base = self._files.base_of(position)
        with disk.opened(self._files.path(base)) as fd:
            got = disk.pread(fd, WARMED_BYTES, position - base)
        if len(got) < WARMED_BYTES and base + self._files.file_size in self._files.bases:
            with disk.opened(self._files.path(base + self._files.file_size)) as fd:
                disk.pread(fd, WARMED_BYTES - len(got), 0)

    def _reading(self, base: int) -> int:
        """Return a descriptor of the file at ``base`` for reading."""
        if base != self._read_base or self._read_fd < 0:
            self._stop_reading()
            self._read_fd = disk.open_file(self._files.path(base), disk.READ)
            self._read_base = base
            self._pool.mapped(self)
        return self._read_fd

    def _stop_reading(self) -> None:
        if self._read_fd >= 0:
            disk.close(self._read_fd)
            self._read_fd = -1

    @property
    def files(self) -> MappedFileQueue:
        """The files, for callers that read them directly."""
        return self._files

    def next_file_offset(self, queue_offset: int) -> int:
        size = self._files.file_size
        return (queue_offset * ENTRY_SIZE // size + 1) * size // ENTRY_SIZE

    def load(self) -> None:
        """Find the end of the entries in the files, which have their size."""
        files = self._files
        missing = files.missing()
        if missing is None:
            missing = next((base for base in files.bases[:-1] if not self._is_full(base)), None)
        if missing is not None:
            # Entries after a missing or zeroed file cannot be reached; recovery rebuilds them.
            files.remove_from(missing)
        known: dict[int, QueueEntry] = {}
        end = self._find_end(known)
        self.move_to(end)
        self._known = known
        self.flushed_offset = end
        if end and not self.position:
            self._active_base -= files.file_size
            self.position = files.file_size
        self.last_end = self._end_of(end - 1) if end > self.first_offset else 0

    def forget_known(self) -> None:
        """Read all entries from their files from now on."""
        self._known = _NOTHING

    def _find_end(self, known: dict[int, QueueEntry]) -> int:
        """Return the queue offset after the last valid entry; keep what a start needs in ``known``.

        Unwritten space is zero, so a binary search finds the end. If a crash has left a hole among
        the entries, it may find the hole: recovery compares queues with the log.
        """
        for base in reversed(self._files.bases):
            used = self._used(base, known)
            if used:
                return base // ENTRY_SIZE + used
        return self._files.bases[0] // ENTRY_SIZE if self._files.bases else 0

    def _is_full(self, base: int) -> bool:
        """Return whether a file that others follow has its last entry, and is not zeroed."""
        with disk.opened(self._files.path(base)) as fd:
            return _is_written(fd, self._files.file_size // ENTRY_SIZE - 1)

    def _used(self, base: int, known: dict[int, QueueEntry]) -> int:
        """Return how many entries a file holds; binary search, because most of it is a hole."""
        places = range(self._files.file_size // ENTRY_SIZE)
        with disk.opened(self._files.path(base)) as fd:
            head = disk.pread(fd, _HEAD_BYTES, 0)

            def at(place: int) -> QueueEntry:
                entry = head[place * ENTRY_SIZE : (place + 1) * ENTRY_SIZE]
                return unpack_entry(entry or disk.pread(fd, ENTRY_SIZE, place * ENTRY_SIZE))

            used = min(len(head) // ENTRY_SIZE, len(places))
            low, high = (0, used) if not at(used - 1).is_valid else (used, len(places))
            used = bisect_left(places, True, low, high, key=lambda place: not at(place).is_valid)
            if used:
                known[base // ENTRY_SIZE] = at(0)
                known[base // ENTRY_SIZE + used - 1] = at(used - 1)
            return used

    def find_physical(self, physical_offset: int) -> int:
        """Return the first queue offset whose record lies at or after ``physical_offset``."""
        first = self.first_offset
        # Usually all or none, and a start asks each of thousands of queues.
        if 0 < self.last_end <= physical_offset:
            return self.next_offset
        if first < self.next_offset and self.start_of(first) >= physical_offset:
            return first
        return first + bisect_left(
            range(self.next_offset - first),
            True,
            key=lambda index: self.start_of(first + index) >= physical_offset,
        )

    def start_of(self, queue_offset: int) -> int:
        """Return the physical offset of an entry; for a blank one, that of the entry before.

        -1 if there is none before.
        """
        first = self.first_offset
        while (entry := self.entry(queue_offset)) == PRE_BLANK:
            if queue_offset == first:
                return -1
            queue_offset -= 1
        return entry.physical_offset

    def first_at_or_after(self, physical_offset: int, start: int = 0) -> int:
        """Return the first queue offset whose record lies at ``physical_offset`` or after it.

        It is ``start`` and ``min_offset`` at least. Any thread may call this. Files are read one
        after the other and not mapped: the first files of a queue are rarely in memory, and only a
        read lets other threads run meanwhile.
        """
        files = self._files
        end, low = self.next_offset, max(self.min_offset, start)
        if 0 < self.last_end <= physical_offset:  # read after ``end``: entries may be added
            return max(end, low)
        per_file = files.file_size // ENTRY_SIZE
        while low < end:
            base = files.base_of(low * ENTRY_SIZE)
            high = min(base // ENTRY_SIZE + per_file, end)
            try:
                fd = disk.open_file(files.path(base), disk.READ)
            except FileNotFoundError:
                low = high
                continue
            try:
                low = _first_after(fd, base, range(low, high), physical_offset)
            finally:
                disk.close(fd)
            if low < high:
                break
        return low

    @property
    def has_obsolete_files(self) -> bool:
        """Whether files before the begin are left, by a deletion that a crash interrupted."""
        files = self._files
        begin = min(self.min_offset * ENTRY_SIZE, self._active_base)
        return len(files.bases) > 1 and files.bases[0] + files.file_size <= begin

    def begin_at(self, queue_offset: int) -> list[Path]:
        """Begin the queue at an offset; return its files without an entry from there on.

        They do not belong to the queue any more; the caller deletes them in this order.
        """
        self.min_offset = max(self.min_offset, queue_offset)
        files = self._files
        # The file that is appended to always stays.
        gone = files.forget_before(min(self.min_offset * ENTRY_SIZE, self._active_base))
        if self._read_base in gone:
            self._stop_reading()
        return [files.path(base) for base in gone]

    @property
    def is_changed(self) -> bool:
        """Whether ``sync`` has something to flush."""
        return self.flushed_offset != self.next_offset or not self._end_durable

    def sync(self) -> bool:
        """Flush new entries; called by the maintenance thread. Return whether there were any.

        Recovery trusts the entries that the checkpoint covers, so the names of their files and
        directories must be on disk as well.

        Files are opened again, so that threads share no map or descriptor.
        """
        if not self.is_changed:
            return False
        names_durable = self._names_durable
        with self.flushing() as end:
            self._sync(self.flushed_offset, end, names=not names_durable)
        return True

    @contextmanager
    def flushing(self) -> Iterator[int]:
        """Take what a ``with`` block flushes as durable: all up to the queue offset it is given."""
        end = self.next_offset
        self._end_durable = self._names_durable = True  # first: a change during the flush resets it
        try:
            yield end
        except OSError:
            self._end_durable = self._names_durable = False
            raise
        self.flushed_offset = end

    def _sync(self, start: int, end: int, *, names: bool) -> None:
        files = self._files
        first = files.base_of(min(start, end) * ENTRY_SIZE)
        for base in range(first, end * ENTRY_SIZE + 1, files.file_size):
            try:
                fd = disk.open_file(files.path(base), disk.WRITE)
            except FileNotFoundError:
                continue  # retention has deleted it
            try:
                disk.sync_data(fd)
            finally:
                disk.close(fd)
        if names and files.bases:
            queue = files.directory
            for directory in (queue, queue.parent, queue.parent.parent):
                disk.sync_directory(directory)

    def close(self) -> None:
        """Close the files; they are opened again when the queue is used."""
        _unmap(self.map)
        self.map = _CLOSED
        self._fresh_from = self._files.file_size
        self._stop_reading()
        self.limit = 0
        self._pool.forget(self)
