"""Processes that look at the log ahead of a recovery, one file each at a time.

To find records and check their CRCs takes two thirds of a recovery, and of one file it does not
depend on any other. So with gigabytes to scan, processes of their own, the *scouts*, walk through
the files and send portions (``portion``): which queue entries records make that follow each other.
They stop at the first place in a file where no record begins. The recovery takes what is theirs;
what they leave out, and all of it when a scout is lost or cannot be started, it looks at itself.
What counts, and what the queues are to hold, it alone decides.

A portion is sent as four bytes of length and a marshalled tuple. Only this very interpreter reads
it.

After a power cut nothing of the log is in memory, and to keep gigabytes of it there costs as much
processor time as to look at them. So of files that were not, scouts keep no more than the recovery
reads, and what consumers are about to: the two in which the log ends.
"""

import gc
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
from typing import Final

from . import disk
from .gathering import Gathering
from .log_scan import LogScan
from .mapped_file_queue import MappedFileQueue
from .portion import Portion
from .residence import Residence

logger = logging.getLogger(__name__)

SCOUTED_BYTES_MIN: Final = 1 << 30  # less is scanned in the time that some processes take to start
SCOUTS_MAX: Final = 4  # more would only wait for who takes what they find
# Of a scout, that nobody has taken yet: what it finds in a GiB of records of 1 KiB is 20 MB.
UNSENT_BYTES_MAX: Final = 64 << 20
FORGOTTEN_AT_ONCE: Final = 16 << 20  # bytes of a file: one call for many chunks, and little kept
_LENGTH: Final = Struct("<I")


def _nothing_before(offset: int) -> Portion:
    """Return what says that there is no portion before a physical offset."""
    return Portion(offset, offset, offset, 0, 0, 0, [])


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

    def next_from(self, offset: int) -> Portion | None:
        """Return the first portion in a file that begins at an offset or behind it.

        None if its scout has found none there. Ask in the order of the log.
        """
        scout = self._scout_of.get(self._files.base_of(offset))
        return None if scout is None else scout.next_from(offset)

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
        self._next: Portion | None = None

    def next_from(self, offset: int) -> Portion | None:
        """Return the first portion that begins at an offset or behind it; None without one."""
        while self._next is None or self._next.start < offset:
            self._next = self._read()
        return self._next if self._next.length else None

    def _read(self) -> Portion:
        stdout = self._process.stdout
        assert stdout is not None
        head = stdout.read(_LENGTH.size)
        if len(head) == _LENGTH.size:
            (length,) = _LENGTH.unpack(head)
            content = stdout.read(length)
            if len(content) == length:  # less where a scout was killed amid a frame
                return Portion._make(marshal.loads(content))  # noqa: S302  of a process of our own
        logger.warning("event=scout_lost code=%s", self._process.wait())
        return _nothing_before(sys.maxsize)

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

    def add(self, portion: Portion) -> None:
        """Send a portion as soon as it is taken; wait while too many are not."""
        content = marshal.dumps(tuple(portion))
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
        self._passed = 0  # behind the last portion

    def pass_portion(self, start: int, end: int, *, is_read: bool) -> None:
        """Note a portion of the file, and whether somebody reads it soon.

        What lies between two portions, the recovery looks at itself.
        """
        if start > self._passed:
            self._forget(self._passed)
            self._start = start
        self._passed = end
        if is_read:
            self._forget(start)
            self._start = end
        elif end - self._start >= FORGOTTEN_AT_ONCE:
            self._forget(end)

    def _forget(self, end: int) -> None:
        if end > self._start:
            disk.need_no_more(self._fd, self._start, end - self._start)
            self._start = end


def main(job: str) -> None:
    """Look at files, and send what is in them."""
    gc.disable()  # nothing here is in a cycle, and it looks at a million of records for that
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

    def send(portion: Portion) -> None:
        outbox.add(portion)
        if trail is not None:
            is_read = portion.is_about_transactions  # by whoever makes the table of them
            trail.pass_portion(portion.start - base, portion.end - base, is_read=is_read)

    end = base + files.file_size
    gathering = Gathering(send)
    for chunk_offset, chunk, block in LogScan(
        files, base, end, check_crc=check_crc, search=False
    ).blocks():
        if isinstance(block, Portion):
            gathering.add_portion(block)
        else:
            gathering.add(chunk_offset, chunk, block)
    gathering.end()
    outbox.add(_nothing_before(end))  # so nothing more is waited for


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except BrokenPipeError:
        sys.exit(1)  # nobody is there any more
