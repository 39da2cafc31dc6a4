"""Upload the full files of a store into its archive.

A log file that is full never changes, and neither do the full queue files whose last entry leads
into it. So they are uploaded together, as they are and under the names that they have in the store:

1. ``manifest/OFFSET.json`` with the checksum of the log file's digest is created, which succeeds
   once. Whoever finds it there goes on if its own file has the same checksum. So everyone who
   uploads anything of this step uploads the same bytes, even if it was replaced meanwhile.
2. The digests and the queue files are uploaded, and the log file as the last one.

A log file that is in the archive ends its step: nothing else has to be remembered, and after a kill
an upload begins again. Each block is compared with its digest on its way.

Files stay in the store until they are in the archive, and the newest one that is there stays too: a
start compares it, to continue the archive of this log and of no other.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from attrs import define, field

from ..errors import ArchiveFailedError, ArchiveRefusedError, StoreError
from ..files import disk
from ..files.mapped_file_queue import NAME_DIGITS, MappedFileQueue
from ..files.worker import WorkerFactory
from ..format.queue_entry import ENTRY_SIZE, unpack_entry
from ..integrity.file_digest import Block, Digest, digest_of
from ..queue.queue_table import QueueTable

if TYPE_CHECKING:
    from .objects import Objects

logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0  # seconds between two looks for a full file
RETRY_S: Final = 10.0  # seconds after a failure
QUEUES_AT_ONCE: Final = 256  # that are looked at before others get the interpreter
PAUSE_S: Final = 0.005  # seconds after those


def log_name(base: int) -> str:
    """Return the name of a log file, by the offset of its first byte."""
    return f"commitlog/{base:0{NAME_DIGITS}d}"


def digest_name(name: str) -> str:
    """Return the name of the digest of a file."""
    return f"digests/{name}"


def _manifest_name(base: int) -> str:
    return f"manifest/{base:0{NAME_DIGITS}d}.json"


class WrittenLog(Protocol):
    """How far the log reaches; see ``MessageStore``."""

    @property
    def write_offset(self) -> int: ...

    @property
    def durable_offset(self) -> int: ...


@define(eq=False, repr=False, slots=False)
class Archiver:
    """Uploads on a thread of its own; other threads read the attributes."""

    _objects: "Objects"
    _root: Path
    _log: WrittenLog
    _files: MappedFileQueue  # of the log
    _queues: QueueTable
    # Begin of the log at which all queues begin where they should.
    _queues_begin_for: Callable[[], int]
    _worker_factory: WorkerFactory = field(alias="worker")

    def __attrs_post_init__(self) -> None:
        self.is_open = False  # the archive was compared with the log
        self.begin = self.end = 0  # physical offsets: the archive has the log in between
        self.queue_begins: dict[str, int] = {}  # by topic/id; of those that do not begin at 0
        self.failure = "not opened yet"  # of the last attempt; empty after a good one
        self._stopping = False
        self._worker = self._worker_factory("store-archive", self._round, LOOK_S)

    def start(self) -> None:
        self._worker.start()

    def stop(self) -> None:
        """End the thread; an upload ends with its present request, and begins again later."""
        self._stopping = True
        self._worker.stop()

    @property
    def deletable_end(self) -> int:
        """Physical offset up to which files of the log may be deleted."""
        return self.end - self._files.file_size if self.is_open else 0

    @property
    def _first(self) -> int:
        return self._files.bases[0] if self._files.bases else 0

    def metrics(self) -> dict[str, int]:
        """Return gauges by name."""
        full = self._files.base_of(self._log.durable_offset)
        return {
            "end_offset": self.end,
            "lag_bytes": max(full - (self.end if self.is_open else self._first), 0),
            "failing": int(bool(self.failure)),
        }

    def _round(self, _woken: bool) -> float | None:
        try:
            if not self.is_open:
                self._open()
            while self.end + self._files.file_size <= self._log.durable_offset:
                if self.end == self.begin and self._queues_begin_for() != self._first:
                    break  # a deletion is about to move the begins of queues
                self._upload(self.end)
                self.end += self._files.file_size
                logger.info("event=archived end_offset=%d", self.end)
        except ArchiveRefusedError as error:
            self.failure = str(error)
            logger.critical("event=archive_refused error=%r", self.failure)
            return None  # until the next start
        except (OSError, StoreError) as error:
            if self._stopping:
                return None
            if str(error) != self.failure:  # once, as long as it is the same
                logger.error("event=archive_failed error=%r", str(error))  # noqa: TRY400
            self.failure = str(error)
            return RETRY_S
        self.failure = ""
        return LOOK_S

    def _open(self) -> None:
        """Find what the archive has, and check that it is of this log.

        Raises:
            ArchiveRefusedError: It is of another log.
            ArchiveFailedError: It cannot be read.
        """
        size, first = self._files.file_size, self._first
        bases = [int(name) for name in self._objects.names("commitlog")]
        begin = end = bases[-1] + size if bases else first
        if bases:
            if not first < end <= self._log.write_offset:
                written = self._log.write_offset
                raise ArchiveRefusedError(end, f"the log here has {first} to {written}")
            self._claim(end - size, self._digest(self._files.path(end - size), size))
            manifests = self._objects.names("manifest")
            self.queue_begins = json.loads(self._objects.get(f"manifest/{manifests[0]}"))["begins"]
        while bases and bases.pop() == begin - size:
            begin -= size
        if self._objects.is_directory and begin < end:
            end -= size  # it may have been lost before it was flushed: it is uploaded again
        self.begin, self.end, self.is_open = begin, end, True

    def _claim(self, base: int, digest: Digest) -> None:
        """Make sure that the archive's file is this one, for all time.

        Raises:
            ArchiveRefusedError: It is another one.
        """
        begins = {
            f"{topic}/{queue_id}": queue.min_offset
            for (topic, queue_id), queue in list(self._queues.items())
            if queue.min_offset and base == self.begin
        }
        sha256 = hashlib.sha256(digest.pack()).hexdigest()
        content = json.dumps({"digest_sha256": sha256, "begins": begins}).encode()
        if not self._objects.create(_manifest_name(base), content):
            content = self._objects.get(_manifest_name(base))
        manifest = json.loads(content)
        if manifest["digest_sha256"] != sha256:
            raise ArchiveRefusedError(base, "its file that begins there is another one")
        if base == self.begin:
            self.queue_begins = manifest["begins"]

    def _upload(self, base: int) -> None:
        path, name = self._files.path(base), log_name(base)
        digest = self._digest(path, self._files.file_size)
        self._claim(base, digest)
        for queue_path in self._queue_files(base):
            queue_name = "/".join(("consumequeue", *queue_path.parts[-3:]))
            try:
                queue_digest = self._digest(queue_path, disk.size_of(queue_path))
                self._put(queue_name, queue_path, queue_digest)
            except FileNotFoundError:
                continue  # its topic was deleted
        self._put(name, path, digest)
        self._objects.flush()

    def _queue_files(self, base: int) -> Iterator[Path]:
        """Yield the full queue files whose last entry leads into the log file at ``base``."""
        for number, queue in enumerate(list(self._queues.values())):
            if number % QUEUES_AT_ONCE == 0:
                time.sleep(PAUSE_S)
            for queue_base in list(queue.files.bases):
                end = queue_base + queue.files.file_size
                if end <= queue.next_offset * ENTRY_SIZE and not queue.is_deleted:
                    path = queue.files.path(queue_base)
                    last = _last_entry(path, queue.files.file_size)
                    if last is not None and base <= last < base + self._files.file_size:
                        yield path

    def _digest(self, path: Path, size: int) -> Digest:
        """Return the digest of a full file; one is made if the store has none."""
        digest = digest_of(self._root, path)
        if digest is None or digest.end != size:
            digest = Digest()
            with disk.opened(path) as fd:
                digest.extend(fd, size)
        return digest

    def _put(self, name: str, path: Path, digest: Digest) -> None:
        with disk.opened(path) as fd:
            self._objects.put(digest_name(name), iter((digest.pack(),)))
            self._objects.put(name, self._sound_blocks(name, digest.blocks(fd)))

    def _sound_blocks(self, name: str, blocks: Iterator[Block]) -> Iterator[bytes]:
        for block in blocks:
            if self._stopping:
                raise ArchiveFailedError(name, "the store is closed")
            if not block.is_sound:
                reason = f"byte {block.position} and after it differs from its digest"
                raise ArchiveFailedError(name, reason)
            yield block.content


def _last_entry(path: Path, size: int) -> int | None:
    """Return the physical offset of a queue file's last entry; None if the file is gone."""
    try:
        with disk.opened(path) as fd:
            return unpack_entry(disk.pread(fd, ENTRY_SIZE, size - ENTRY_SIZE)).physical_offset
    except FileNotFoundError:
        return None
