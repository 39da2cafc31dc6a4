"""The simulated disk of the broker: real files, and the content that a power cut would leave.

During a simulation, ``halfmq.store.files.disk``, through which the store and the broker's tables
access files, calls this. It has four properties:

* **Durable is what was synced.** A sync records the content of its file, a sync of a directory its
  names. ``power_cut`` rebuilds the directory from that, and from a part of what was not synced:
  changed pages survive or not, one by one, some torn at a sector; names created, replaced and
  removed since then survive up to some point in time, as in journals of file systems.
* **A sync can fail**, a disk can be full for a while, and any call that changes something can be
  refused. After a failed sync the kernel marks pages as clean that it has not written: they can be
  read until the power fails, and no later sync writes them unless they are changed again. If it was
  a sync of the whole file system, the next sync of each file concerned fails as well (errseq_t).
* **A process can die at any of these calls**: before it, after it, or during a write.
* **A dead process changes nothing.** Its stack unwinds through ``except`` and ``finally`` blocks
  that would clean up; every call they make is refused.

Writes through maps are not seen here, but their effect is: a file's content is read when it is
needed. Files are identified by inode, because each new process finds its directory under a new
path; the old path is left to the dead process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

from halfmq.store.files import disk as door

from .loop import Killed, Process, SimulationLoop

PAGE: Final = 4096
SECTOR: Final = 512
SYNC_S_MAX: Final = 0.02  # how long a sync may take


class RealCalls:
    """The calls as they were before the simulation replaced them."""

    NAMES: Final = (
        "open_file", "close", "pwrite", "ftruncate", "truncate", "posix_fallocate", "mkdir",
        "unlink", "replace", "link", "write_zeros",
    )  # fmt: skip

    def __init__(self) -> None:
        for name in self.NAMES:
            setattr(self, name, getattr(door, name))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(name)


real: Final = RealCalls()


def _content(fd: int, size: int) -> bytes:
    """Return what is in a file that may be open for writing only."""
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    try:
        return os.pread(own, size, 0)
    finally:
        os.close(own)


class Journal:
    """A change of a directory's names that may not be durable yet."""

    __slots__ = ("change", "directory")

    def __init__(self, directory: int, change: dict[str, int | None]) -> None:
        self.directory = directory
        self.change = change  # name: the inode it has now, None for none


class Disk:
    """The disk of one machine."""

    def __init__(self, loop: SimulationLoop, chance: random.Random, base: Path) -> None:
        self.loop = loop
        self.chance = chance
        self._base = base
        self._generation = 0
        self.root = base / "0"
        self.root.mkdir()
        self._durable: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {self._inode(self.root): {}}
        self._directories: dict[int, None] = {self._inode(self.root): None}
        self._journal: list[Journal] = []
        self._sized: dict[int, int] = {}  # by inode: the size that was set when it was made
        self._syncs: dict[int, int] = {}  # inode: number of the newest sync that is recorded
        self._sync_number = 0
        self.writes = 0
        self.die_at_write = -1
        self.on_write_of_death: Callable[[], None] = lambda: None
        self.descriptors: dict[int, Process] = {}
        self.sync_s = SYNC_S_MAX
        self.over = False  # the run is: no call has an effect any more
        self._stuck: dict[int, dict[int, bytes]] = {}
        """By inode and position: pages that are in memory alone, and that no sync will write."""
        self._unreported: set[int] = set()  # inodes whose next sync reports an earlier failure
        self.syncs = 0
        self.fail_at_sync = -1
        self.fail_at_write = -1
        self.full_until = 0.0  # time until which no more space is to be had
        self.on_fault: Callable[[str, Process], None] = lambda _kind, _process: None
        self.on_create: Callable[[Path], None] = lambda _path: None
        self.on_unlink: Callable[[Path], None] = lambda _path: None  # before the file is gone
        self._page_chance = 0.0  # with which a changed page survives the power cut under way

    # --- calls of a process

    def _acting(self) -> Process | None:
        """Return the process of this disk that acts; None when it is the test itself."""
        process = self.loop.process
        if self.over:
            raise Killed
        if process is None or process.disk is not self:
            return None
        if process.dead:
            raise Killed
        return process

    def _changes(self, *, takes_space: bool = False) -> bool:
        """Count a change; True if the process is to die in the middle of it.

        Raises:
            OSError: The change is refused.
        """
        process = self._acting()
        if process is None:
            return False
        self.writes += 1
        if self.writes == self.fail_at_write:
            self._fail(process, "i/o error", errno.EIO)
        self._check_space(process, takes_space=takes_space)
        return self._dies()

    def _check_space(self, process: Process, *, takes_space: bool = True) -> None:
        if takes_space and self.loop.now < self.full_until and self.chance.random() < 0.7:
            self._fail(process, "no space", errno.ENOSPC)

    def _fail(self, process: Process, kind: str, number: int) -> NoReturn:
        self.loop.record_event("fails", kind)
        self.on_fault(kind, process)
        raise OSError(number, os.strerror(number))

    def stop_faults(self) -> None:
        """Let no call fail from now on."""
        self.die_at_write = self.fail_at_write = self.fail_at_sync = -1
        self.full_until = 0.0

    def _dies(self) -> bool:
        if self.writes != self.die_at_write:
            return False
        if self.chance.random() < 0.4:
            self._die()
        return True

    def _die(self) -> None:
        self.on_write_of_death()
        raise Killed

    def open_file(self, path: Any, flags: int, mode: int = 0o777) -> int:
        process = self._acting()
        if process is None:
            return int(real.open_file(path, flags, mode))
        creates = flags & os.O_CREAT and not os.path.lexists(path)
        dies = bool(creates or flags & os.O_TRUNC) and self._changes(takes_space=True)
        fd = int(real.open_file(path, flags, mode))
        self.descriptors[fd] = process
        inode = os.fstat(fd).st_ino
        if creates:
            self._created(Path(path), inode)
        if flags & os.O_TRUNC:
            self._stuck.pop(inode, None)
        if dies:
            self._die()
        return fd

    def close(self, fd: int) -> None:
        process = self.loop.process
        if self.over or (process is not None and process.dead and process.disk is self):
            return  # its descriptors are closed for it
        self.descriptors.pop(fd, None)
        real.close(fd)

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        dies = self._changes(takes_space=True)
        self._write_to(fd, offset, len(data))
        if dies:
            # The kernel looks for a fatal signal between two pages.
            ends = [*range(PAGE - offset % PAGE, len(data), PAGE), len(data)]
            real.pwrite(fd, data[: self.chance.choice(ends)], offset)
            self._die()
        return int(real.pwrite(fd, data, offset))

    def write_zeros(self, fd: int, start: int, end: int) -> None:
        self.pwrite(fd, bytes(end - start), start)

    def _write_to(self, fd: int, offset: int, size: int) -> None:
        """Note that pages are written to: the next sync will write them."""
        stuck = self._stuck.get(os.fstat(fd).st_ino)
        if stuck:
            for start in range(offset - offset % PAGE, offset + size, PAGE):
                stuck.pop(start, None)

    def ftruncate(self, fd: int, size: int) -> None:
        dies = self._changes()
        real.ftruncate(fd, size)
        self._sized[os.fstat(fd).st_ino] = size
        if dies:
            self._die()

    def truncate(self, path: Any, size: int) -> None:
        dies = self._changes()
        real.truncate(path, size)
        if dies:
            self._die()

    def posix_fallocate(self, fd: int, offset: int, size: int) -> None:
        process = self._acting()
        if process is not None:
            self._check_space(process)
        real.posix_fallocate(fd, offset, size)

    def sync(self, fd: int) -> None:
        """Record what is durable now: a file's content, or the names in a directory."""
        self._sync([fd])

    def sync_file_system(self, _fd: int) -> None:
        """Record all files and directories as durable, in one call."""
        with contextlib.ExitStack() as opened:
            fds = []
            for path in [self.root, *sorted(self.root.rglob("*"))]:
                fds.append(int(real.open_file(path, os.O_RDONLY)))
                opened.callback(real.close, fds[-1])
            self._sync(fds)

    def _sync(self, fds: list[int]) -> None:
        process = self._acting()
        if process is None:
            return
        self.syncs += 1
        self.writes += 1
        fails = self.syncs == self.fail_at_sync or self.writes == self.fail_at_write
        dies = self._dies()
        states = {fd: os.fstat(fd) for fd in fds}
        files = {fd: one for fd, one in states.items() if not stat.S_ISDIR(one.st_mode)}
        contents = {one.st_ino: _content(fd, one.st_size) for fd, one in files.items()}
        if len(fds) == 1 and contents.keys() & self._unreported:
            self._unreported -= contents.keys()
            fails = True
        if fails:
            for inode, content in contents.items():
                self._lose(inode, content)
            if len(fds) > 1:
                self._unreported |= {inode for inode in contents if self._stuck.get(inode)}
            self._fail(process, "sync failed", errno.EIO)
        for fd in states.keys() - files.keys():
            self._sync_names(states[fd].st_ino, os.readlink(f"/proc/self/fd/{fd}"))  # noqa: PTH115
        if contents:
            self._sync_number += 1
            number = self._sync_number
            reaching = {
                inode: self._reaching(inode, content, self._durable)
                for inode, content in contents.items()
            }
            # Written before the sync began, so it must be there; later writes may be as well.
            self.loop.wait_like_a_thread(self.chance.random() ** 2 * self.sync_s)
            for inode, content in reaching.items():
                if self._syncs.get(inode, -1) < number:
                    self._syncs[inode] = number
                    self._durable[inode] = content
        if dies:
            self._die()

    def _lose(self, inode: int, content: bytes) -> None:
        """Write some of the pages of a failing sync; the others are never written."""
        durable = bytearray(self._durable.get(inode, b"").ljust(len(content), b"\0"))
        stuck = self._stuck.setdefault(inode, {})
        reaching = self._reaching(inode, content, self._durable)
        for start in range(0, len(content), PAGE):
            page = reaching[start : start + PAGE]
            if page != durable[start : start + PAGE]:
                if self.chance.random() < 0.3:
                    durable[start : start + PAGE] = page
                else:
                    stuck[start] = page
        self._durable[inode] = bytes(durable)

    def _reaching(self, inode: int, content: bytes, durable: dict[int, bytes]) -> bytes:
        """Return what of a content a sync writes: not the pages that the kernel takes for clean."""
        stuck = self._stuck.get(inode)
        if not stuck:
            return content
        reaching = bytearray(content)
        old = durable.get(inode, b"").ljust(len(content), b"\0")
        for start, page in list(stuck.items()):
            end = start + len(page)
            if content[start:end] == page:
                reaching[start:end] = old[start:end]
            else:
                del stuck[start]  # it was written to, through a map
        return bytes(reaching)

    def mkdir(self, path: Any, *args: Any, **named: Any) -> None:
        if self._acting() is None:
            real.mkdir(path, *args, **named)
            return
        dies = self._changes(takes_space=True)
        real.mkdir(path, *args, **named)
        inode = self._inode(Path(path))
        self._names[inode] = {}
        self._directories[inode] = None
        self._log(Path(path), {Path(path).name: inode})
        if dies:
            self._die()

    def unlink(self, path: Any, **named: Any) -> None:
        if self._acting() is None:
            real.unlink(path, **named)
            return
        dies = self._changes()
        self.on_unlink(Path(path))
        real.unlink(path, **named)
        self._log(Path(path), {Path(path).name: None})
        if dies:
            self._die()

    def replace(self, source: Any, target: Any, **named: Any) -> None:
        if self._acting() is None:
            real.replace(source, target, **named)
            return
        dies = self._changes()
        inode = self._inode(Path(source))
        real.replace(source, target, **named)
        assert Path(source).parent == Path(target).parent
        self._log(Path(target), {Path(source).name: None, Path(target).name: inode})
        if dies:
            self._die()

    def link(self, source: Any, target: Any, **named: Any) -> None:
        if self._acting() is None:
            real.link(source, target, **named)
            return
        dies = self._changes(takes_space=True)
        real.link(source, target, **named)
        self._log(Path(target), {Path(target).name: self._inode(Path(target))})
        if dies:
            self._die()

    def _created(self, path: Path, inode: int) -> None:
        self._durable.pop(inode, None)
        self._log(path, {path.name: inode})
        self.on_create(path)

    def _log(self, path: Path, change: dict[str, int | None]) -> None:
        directory = self._inode(path.parent)
        self._journal.append(Journal(directory, change))

    def _sync_names(self, inode: int, path: str) -> None:
        with os.scandir(path) as entries:
            self._names[inode] = {entry.name: entry.inode() for entry in entries}
        self._journal = [one for one in self._journal if one.directory != inode]

    @staticmethod
    def _inode(path: Path) -> int:
        return path.stat().st_ino

    # --- what crashes leave

    def release(self, process: Process) -> None:
        """Close the descriptors of a dead process."""
        for fd, owner in list(self.descriptors.items()):
            if owner is process:
                del self.descriptors[fd]
                real.close(fd)

    def release_all(self) -> None:
        """Close all descriptors, at the end of a run."""
        for fd in self.descriptors:
            real.close(fd)
        self.descriptors.clear()
        self.on_write_of_death = lambda: None

    def process_killed(self) -> None:
        """Move the files to a new path, with the content of the page cache."""
        new = self._next_root()
        self.root.rename(new)
        self.root = new

    def power_cut(self, *, worst: bool = False) -> None:
        """Replace the files by their content on disk; with ``worst``, only what was synced."""
        new = self._next_root()
        present = {self._inode(path): path for path in self.root.rglob("*") if path.is_file()}
        names = {inode: dict(entries) for inode, entries in self._names.items()}
        survived = len(self._journal)
        mode = 0.0 if worst else self.chance.random()
        if mode < 0.4:
            survived = 0
        elif mode < 0.8:
            survived = self.chance.randrange(len(self._journal) + 1)
        for change in self._journal[:survived]:
            entries = names.setdefault(change.directory, {})
            for name, inode in change.change.items():
                if inode is None:
                    entries.pop(name, None)
                else:
                    entries[name] = inode
        self._page_chance = 0.0 if worst else self.chance.choice((0.0, 0.0, 0.5, 0.9, 1.0))
        root = self._inode(self.root)
        written: dict[int, Path] = {}
        self._durable, old = {}, self._durable
        old_directories, self._directories = self._directories, {}
        self._names = {}
        self._build(new, root, names, present, old, old_directories, written)
        self._journal = []
        self._syncs = {}
        self._stuck = {}
        self._unreported.clear()
        shutil.rmtree(self.root)
        self.root = new

    def _build(
        self,
        target: Path,
        directory: int,
        names: dict[int, dict[str, int]],
        present: dict[int, Path],
        durable: dict[int, bytes],
        directories: dict[int, None],
        written: dict[int, Path],
    ) -> None:
        real.mkdir(target)
        own = self._inode(target)
        self._directories[own] = None
        entries = self._names[own] = {}
        for name, inode in sorted(names.get(directory, {}).items()):
            path = target / name
            if inode in directories:
                self._build(path, inode, names, present, durable, directories, written)
            elif inode in written:
                real.link(written[inode], path)
            else:
                content = self._left_of(inode, durable, present.get(inode))
                path.write_bytes(content)
                written[inode] = path
                self._durable[self._inode(path)] = content
            entries[name] = self._inode(path)

    def _left_of(self, inode: int, contents: dict[int, bytes], path: Path | None) -> bytes:
        """Return what is on disk of a file: its durable content and some of what came later."""
        durable, size = contents.get(inode, b""), self._sized.get(inode)
        if path is None:  # removed since, but not durably
            return durable.ljust(size or 0, b"\0")
        current = self._reaching(inode, path.read_bytes(), contents)
        if current == durable:
            return durable
        chance = self.chance
        # A size that is set when a file is made is in the same transaction of the journal as its
        # name; that of a file that grows as it is written is not.
        left_size = chance.choice((len(durable), len(current))) if size is None else len(current)
        longest = max(len(durable), len(current))
        old, new = durable.ljust(longest, b"\0"), current.ljust(longest, b"\0")
        left = bytearray(old)
        for start in range(0, longest, PAGE):
            end = min(start + PAGE, longest)
            if old[start:end] != new[start:end] and chance.random() < self._page_chance:
                if chance.random() < 0.2:
                    end = min(end, start + SECTOR * chance.randrange(1, PAGE // SECTOR))
                left[start:end] = new[start:end]
        return bytes(left[:left_size])

    def _next_root(self) -> Path:
        self._generation += 1
        return self._base / str(self._generation)
