"""Look-up by message key: all index files of a store.

The index is derived from the log, so a damaged index never fails a start. After a stop that was not
clean, or if a file is damaged, ``recover`` keeps the certain part and returns the log offset from
which records must be put again. Items are certain if they are older than the last flush (newer ones
may have reached the disk in any order) and plausible. Their slots are rewritten, because a slot may
have reached the disk without its item. A record that is put twice is indexed once.

Source: RocketMQ ``IndexService.java``. RocketMQ deletes the newest file after a crash and
re-indexes only the end of the log; this keeps all keys.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import Final

from ..errors import UnusableFileError
from ..files import disk
from ..files.mapped_file import create_file, make_directory
from ..format.index import (
    HashedKeys,
    KeyedRecord,
    hashed_keys,
    index_file_name,
    index_file_size,
    index_key,
    index_key_hash,
    is_index_file_name,
    item_position,
)
from .index_file import NEVER_FLUSHED, IndexFile

logger = logging.getLogger(__name__)

QUERY_COUNT_MAX: Final = 64  # RocketMQ's maxMsgsNumBatch: hits of one look-up


class IndexService:
    """All index files of one store.

    Call ``recover`` first. Only one thread may call ``put_group`` and ``forget_before``; any thread
    may call ``query`` and ``flush``.
    """

    def __init__(
        self, directory: Path, max_slots: int, max_items: int, *, now_ms: Callable[[], int]
    ) -> None:
        if max_slots < 1 or max_items < 2:
            raise ValueError("an index file has at least one slot and two item numbers")
        self._directory = directory
        self._max_slots, self._max_items = max_slots, max_items
        self._now_ms = now_ms
        self._files: list[IndexFile] = []
        self._names_unflushed = True  # the previous run may have been killed before its flush
        self._end_offset = -1  # of the newest record; -1 so that offset 0 is after it

    def recover(
        self,
        *,
        clean: bool,
        log_end: int,
        index_timestamp: int,
        has_keys: Callable[[int, int], bool] = lambda _after, _before: False,
    ) -> int:
        """Open the files and keep the certain items; damaged content never raises an error.

        ``log_end`` is the end of the log: items of records after it are dropped.
        ``index_timestamp`` is the last result of ``flush`` that the checkpoint holds; it counts
        only if the stop was not clean. ``has_keys`` tells whether the log has keys after one
        offset and before another; if it does between two files, one in between is missing.

        Returns:
            The physical offset from which on all records of the log must be put again. 0 means
            from the beginning, whether or not the log still reaches that far back.
        """
        make_directory(self._directory)
        whole = self._open_files()
        durable_ms = NEVER_FLUSHED if clean else index_timestamp
        whole = self._rebuild_uncertain(log_end, durable_ms) and whole
        self._drop_from(log_end)
        whole = self._drop_after_gap(has_keys) and whole
        last_offset = self._last_offset()
        if clean and whole:
            self._end_offset = last_offset
            return last_offset + 1
        # Some keys of the last record may be missing, perhaps in a file that is lost.
        self._drop_from(last_offset)
        self._end_offset = self._last_offset()
        logger.info(
            "event=index_recovered files=%d last_offset=%d put_again_from=%d",
            len(self._files),
            self._end_offset,
            max(last_offset, 0),
        )
        return max(last_offset, 0)

    def _open_files(self) -> bool:
        """Open all files up to the first unusable one; return whether all were usable.

        Files after an unusable one are deleted: records are put in log order only, so the gap
        could not be filled.
        """
        found = disk.files(self._directory)
        paths = [path for path in found if is_index_file_name(path.name)]
        for position, path in enumerate(paths):
            try:
                self._files.append(self._open_file(path, is_newest=path == paths[-1]))
            except UnusableFileError as error:
                logger.warning("event=index_file_set_aside path=%s reason=%r", path, error.reason)
                for newer in reversed(paths[position + 1 :]):
                    disk.unlink(newer)
                disk.replace(path, path.with_name(path.name + ".bad"))
                disk.sync_directory(self._directory)
                return False
        return True

    def _open_file(self, path: Path, *, is_newest: bool) -> IndexFile:
        file = IndexFile(path, self._max_slots, self._max_items)
        if file.is_empty and not is_newest:
            file.close()
            raise UnusableFileError(path, "is empty, and others follow")
        return file

    def _rebuild_uncertain(self, log_end: int, durable_ms: int) -> bool:
        """Rebuild the files that may be incomplete; return whether nothing was lost."""
        for position, file in enumerate(self._files):
            if file.needs_check or file.header.end_timestamp > durable_ms:
                if file.rebuild(log_end=log_end, durable_ms=durable_ms):
                    continue
                self._delete(self._files[position + 1 :])
                return False
        return True

    def _drop_after_gap(self, has_keys: Callable[[int, int], bool]) -> bool:
        """Delete the files that follow a missing one; return whether none is missing."""
        end = -1
        for position, file in enumerate(self._files):
            if has_keys(end, file.header.begin_physical_offset):
                logger.warning("event=index_file_missing before=%s", file.path)
                self._delete(self._files[position:])
                return False
            end = file.header.end_physical_offset
        return True

    def _drop_from(self, physical_offset: int) -> None:
        """Remove the items of records at or after an offset from all files."""
        while self._files:
            newest = self._files[-1]
            if not newest.is_empty:
                if newest.header.end_physical_offset < physical_offset:
                    return
                newest.drop_from(physical_offset)
                if not newest.is_empty:
                    return
            self._delete([newest])

    def _last_offset(self) -> int:
        offsets = (f.header.end_physical_offset for f in reversed(self._files) if not f.is_empty)
        return next(offsets, -1)

    def put_group(self, records: Sequence[KeyedRecord]) -> None:
        """Index records under their ``UNIQ_KEY`` and ``KEYS``, in log order.

        A record is (topic, properties, physical offset, store timestamp, sys_flag). Records
        that are indexed already are ignored, so any part of the log may be put again.

        Raises:
            DiskFullError: Nothing of the group was indexed; put it again later.
        """
        self._append(hashed_keys(records, after=self._end_offset))

    def _append(self, keys: HashedKeys) -> None:
        """Append to the newest file and to as many new ones as needed; all or nothing."""
        if not len(keys.hashes):
            return
        plan = self._plan(len(keys.hashes))
        start = 0
        for file, count in plan:
            if not self._files or file is not self._files[-1]:
                if self._files:
                    file.begin_after(self._files[-1].header)
                self._files.append(file)
            file.append(keys.part(start, start + count))
            start += count
        self._end_offset = int(keys.physical_offsets[-1])

    def _plan(self, count: int) -> list[tuple[IndexFile, int]]:
        """Distribute ``count`` items over files and reserve the space; return items per file."""
        plan: list[tuple[IndexFile, int]] = []
        created: list[IndexFile] = []
        try:
            if self._files and self._files[-1].room > 0:
                file = self._files[-1]
                plan.append((file, min(count, file.room)))
                file.prepare(plan[-1][1])
                count -= plan[-1][1]
            while count > 0:
                file = self._create_file(created)
                plan.append((file, min(count, file.room)))
                file.prepare(plan[-1][1])
                count -= plan[-1][1]
        except BaseException:
            for file in created:
                disk.unlink(file.path)
                file.close()
            raise
        return plan

    def _create_file(self, created: list[IndexFile]) -> IndexFile:
        newest = (*self._files[-1:], *created[-1:])[-1:]
        name = index_file_name(self._now_ms(), after=newest[0].path.name if newest else "")
        path = self._directory / name
        create_file(path, index_file_size(self._max_slots, self._max_items))
        self._names_unflushed = True
        created.append(IndexFile(path, self._max_slots, self._max_items))
        return created[-1]

    def search(self, topic: str, key: str, begin_ms: int, end_ms: int) -> Iterator[int | None]:
        """Yield the physical offsets of records with a key, newest first; None for other items.

        Yields at most 64. Only hashes are compared, so the caller must check the keys of the
        records. Times have a resolution of a second. May wait for the disk.
        """
        key_hash = index_key_hash(index_key(topic, key))
        count = 0
        for file in reversed(self._files):
            if file.overlaps(begin_ms, end_ms):
                for offset in file.offsets(key_hash, begin_ms, end_ms):
                    yield offset
                    count += offset is not None
                    if count >= QUERY_COUNT_MAX:
                        return
            if file.header.begin_timestamp < begin_ms:
                break

    def query(self, topic: str, key: str, max_count: int, begin_ms: int, end_ms: int) -> list[int]:
        """Return what ``search`` yields, the newest ``max_count``, in log order."""
        found = (one for one in self.search(topic, key, begin_ms, end_ms) if one is not None)
        return sorted(islice(found, max_count))

    @property
    def last_update(self) -> tuple[int, int]:
        """Store timestamp and physical offset of the newest record in the index; zeros if none."""
        if not self._files:
            return 0, 0
        header = self._files[-1].header
        return header.end_timestamp, header.end_physical_offset

    def flush(self) -> int:
        """Flush everything put so far; waits for the disk, so for one helper thread.

        Returns:
            The index timestamp for the checkpoint, in ms: ``recover`` assumes that all records
            stored up to it are indexed.
        """
        files = list(self._files)
        if not files:
            return 0
        # More records with the millisecond of the last one may come after this flush.
        durable_ms = max(files[-1].header.end_timestamp - 1, 0)
        for file in files:
            file.flush()
            if file is not files[-1]:
                file.unmap()
        if self._names_unflushed:
            self._names_unflushed = False  # before the call: a file made during it sets it again
            try:
                disk.sync_directory(self._directory)
            except OSError:
                self._names_unflushed = True
                raise
        return durable_ms

    def extents(self) -> list[tuple[Path, int]]:
        """Return the files, oldest first, and the bytes used in each; any thread.

        Ends with the first file that is not flushed: a power cut may take what comes after.
        """
        extents: list[tuple[Path, int]] = []
        for file in self._files:
            extents.append((file.path, item_position(file.header.next_item, file.slots)))
            if not file.is_flushed:
                break
        return extents

    def forget_before(self, log_start: int) -> list[IndexFile]:
        """Drop the oldest files whose records are all gone from the log; never the newest.

        The caller deletes them and drops the objects on a thread that may wait: dropping the last
        reference closes a file and frees hundreds of megabytes.
        """
        expired = list(
            takewhile(lambda file: file.header.end_physical_offset < log_start, self._files[:-1])
        )
        self._files = self._files[len(expired) :]
        return expired

    def _delete(self, files: Sequence[IndexFile]) -> None:
        """Delete files during recovery, durably; otherwise they might reappear after newer ones."""
        for file in reversed(list(files)):  # the newest first: no gap if this is interrupted
            self._files.remove(file)
            file.close()
            disk.unlink(file.path)
            logger.info("event=index_file_deleted path=%s reason=uncertain", file.path)
        disk.sync_directory(self._directory)

    def close(self) -> None:
        """Flush and close all files; no other method may be called afterwards."""
        try:
            self.flush()
        finally:
            for file in self._files:
                file.close()
            self._files = []
