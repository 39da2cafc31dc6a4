"""Processes that look at the log ahead of a recovery, one file each at a time.

To find records and check their CRCs takes two thirds of a recovery, and of one file it does not
depend on any other. So with gigabytes to scan, processes of their own, the *scouts*, walk through
the files and send what they find: runs with their queue entries, and descriptions of other records
(``log_scan``), up to the first place in a file where no record begins. The recovery takes what is
theirs where it would look at the same place; else, and when a scout is lost or cannot be started,
it looks itself. What counts, and what the queues are to hold, it alone decides.

A scout sends frames: four bytes of length, then a marshalled tuple. Only this very interpreter
reads them.

After a power cut nothing of the log is in memory, and to keep gigabytes of it there costs as much
processor time as to look at them. So of files that were not, scouts keep no more than the recovery
reads, and what consumers are about to: the two in which the log ends.
"""

import json
import logging
import marshal
import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from struct import Struct
from typing import Any, Final, TypeAlias

from . import disk
from .log_run import Run
from .log_scan import SCAN_CHUNK, Found, LogScan
from .mapped_file_queue import MappedFileQueue
from .residence import Residence

logger = logging.getLogger(__name__)

SCOUTED_BYTES_MIN: Final = 1 << 30  # less is scanned in the time that some processes take to start
SCOUTS_MAX: Final = 4  # more would only wait for who takes what they find
# Of a scout, that nobody has taken yet: what it finds in a GiB of records of 1 KiB is 20 MB.
UNSENT_BYTES_MAX: Final = 64 << 20
FORGOTTEN_AT_ONCE: Final = 16 << 20  # bytes of a file: one call for many chunks, and little kept
_LENGTH: Final = Struct("<I")
_BEFORE_ALL: Final = -1  # a position before any record of a file

# Where its chunk begins, where it begins in there, and the fields of a run or of records.
_Frame: TypeAlias = tuple[int, int, bool, Any]


@contextmanager
def scouting(files: MappedFileQueue, start: int, *, check_crc: bool) -> Iterator["Scouts | None"]:
    """Have the files from ``start`` on looked at ahead; None where that is not worth while."""
    bases = [base for base in files.bases if base + files.file_size > start]
    count = min(os.cpu_count() or 1, len(bases), SCOUTS_MAX)
    # The log ends in one of the last two, so they may hold next to nothing.
    size = (len(bases) - 2) * files.file_size
    if count < 2 or size < SCOUTED_BYTES_MIN or sys.platform == "win32" or not sys.executable:
        yield None
        return
    scouts = Scouts(files)
    try:
        yield scouts if scouts.start(bases, count, check_crc=check_crc) else None
    finally:
        scouts.close()


class Scouts:
    """The scouts of one scan."""

    def __init__(self, files: MappedFileQueue) -> None:
        self._files = files
        self._scout_of: dict[int, _Scout] = {}
        self._scouts: list[_Scout] = []

    def start(self, bases: Sequence[int], count: int, *, check_crc: bool) -> bool:
        """Start ``count`` of them; each takes every so-manieth file. Return whether that went."""
        try:
            for number in range(count):
                scout = _Scout(self._files, bases[number::count], check_crc=check_crc)
                self._scouts.append(scout)
                self._scout_of.update(dict.fromkeys(bases[number::count], scout))
        except OSError as error:  # too many processes, or no memory for one more
            logger.warning("event=scouts_not_started error=%r", str(error))
            return False
        return True

    def run_at(self, chunk_offset: int, at: int) -> Run | None:
        """Return the run that begins at a position of the chunk that begins at an offset.

        None if its scout has found none there. Ask in the order of the log.
        """
        frame = self._frame_at(chunk_offset, at)
        return Run._make(frame[3]) if frame is not None and frame[2] else None

    def records_at(self, chunk_offset: int, at: int) -> list[Found]:
        """Return the records that are no run, in the same way."""
        frame = self._frame_at(chunk_offset, at)
        return frame[3] if frame is not None and not frame[2] else []

    def _frame_at(self, chunk_offset: int, at: int) -> _Frame | None:
        scout = self._scout_of.get(self._files.base_of(chunk_offset))
        return None if scout is None else scout.frame_at(chunk_offset, at)

    def close(self) -> None:
        """End them, whatever they do."""
        for scout in self._scouts:
            scout.close()


class _Scout:
    """One of the processes, seen from the recovery."""

    def __init__(self, files: MappedFileQueue, bases: Sequence[int], *, check_crc: bool) -> None:
        job = {
            "directory": str(files.directory),
            "file_size": files.file_size,
            "bases": bases,
            "kept_from": files.bases[-2],
            "check_crc": check_crc,
        }
        self._process = subprocess.Popen(  # noqa: S603  nothing in it comes from outside
            [sys.executable, "-P", "-m", __name__, json.dumps(job)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the broker, which ends them
        )
        self._next: _Frame | None = None

    def frame_at(self, chunk_offset: int, at: int) -> _Frame | None:
        """Return the frame about a position, which may be asked for again; None without one."""
        wanted = (chunk_offset, at)
        while self._next is None or self._next[:2] < wanted:
            self._next = self._read()
        return self._next if self._next[:2] == wanted else None

    def _read(self) -> _Frame:
        stdout = self._process.stdout
        assert stdout is not None
        head = stdout.read(_LENGTH.size)
        if len(head) == _LENGTH.size:
            (length,) = _LENGTH.unpack(head)
            content = stdout.read(length)
            if len(content) == length:  # less where a scout was killed amid a frame
                frame: _Frame = marshal.loads(content)  # noqa: S302  from a process of our own
                return frame
        logger.warning("event=scout_lost code=%s", self._process.wait())
        return sys.maxsize, 0, False, []

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


# The process itself -----------------------------------------------------------------------------


class _Outbox:
    """Frames on their way to whoever reads them, perhaps late."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._frames: deque[memoryview] = deque()
        self._size = 0

    def add(self, frame: _Frame) -> None:
        """Send a frame as soon as it is taken; wait while too many are not."""
        content = marshal.dumps(frame)
        self._frames.append(memoryview(_LENGTH.pack(len(content)) + content))
        self._size += _LENGTH.size + len(content)
        self.send(leave=UNSENT_BYTES_MAX)

    def send(self, *, leave: int) -> None:
        """Send what is taken at once, and wait until at most so many bytes are left."""
        while self._frames:
            os.set_blocking(self._fd, self._size > leave)
            frame = self._frames[0]
            try:
                sent = os.write(self._fd, frame)
            except BlockingIOError:
                return
            self._size -= sent
            if sent < len(frame):
                self._frames[0] = frame[sent:]
            else:
                self._frames.popleft()


class _Trail:
    """What the walk over one file leaves in memory."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._start = 0  # position in the file; what lies before it is as it should be

    def pass_run(self, chunk_at: int) -> None:
        """Note a run in the chunk at a position: nobody reads it any more."""
        if chunk_at - self._start >= FORGOTTEN_AT_ONCE:
            self._forget(chunk_at)

    def pass_records(self, chunk_at: int) -> None:
        """Note other records: the recovery reads their chunk itself."""
        if chunk_at > self._start:
            self._forget(chunk_at)
        self._start = chunk_at + SCAN_CHUNK

    def _forget(self, end: int) -> None:
        disk.need_no_more(self._fd, self._start, end - self._start)
        self._start = end


def main(job: str) -> None:
    """Look at files, and send what is in them."""
    settings = json.loads(job)
    files = MappedFileQueue(Path(settings["directory"]), settings["file_size"])
    files.bases = settings["bases"]
    outbox = _Outbox(sys.stdout.fileno())
    residence = Residence()
    for base in files.bases:
        with disk.opened(files.path(base)) as fd:
            cached = residence.cached(fd, 0, files.file_size)
            is_cold = cached is not None and cached < files.file_size // 2
            trail = _Trail(fd) if is_cold and base < settings["kept_from"] else None
            _look(files, base, outbox, trail, settings["check_crc"])
    outbox.send(leave=0)


def _look(
    files: MappedFileQueue, base: int, outbox: _Outbox, trail: _Trail | None, check_crc: bool
) -> None:
    """Send what is in the file that begins at ``base``."""
    end = base + files.file_size
    for chunk_offset, _, block in LogScan(
        files, base, end, check_crc=check_crc, search=False
    ).blocks():
        if isinstance(block, Run):
            outbox.add((chunk_offset, block.at, True, tuple(block)))
            if trail is not None:
                trail.pass_run(chunk_offset - base)
        else:
            outbox.add((chunk_offset, block[0][0], False, block))
            if trail is not None:
                trail.pass_records(chunk_offset - base)
    outbox.add((end, _BEFORE_ALL, False, []))  # nothing more is to be waited for


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except BrokenPipeError:
        sys.exit(1)  # nobody is there any more
