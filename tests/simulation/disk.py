"""The disk beneath the broker: real files, and beside them what would be left without power.

While a simulation runs, the calls of ``os`` that change files go through here. Three things come
of that:

* **Durable is what was synced.** A sync records the content of its file, a sync of a directory its
  names. ``power_cut`` rebuilds the directory from that, and from a part of what was not synced:
  changed pages survive or not, one by one, some torn at a sector; names made, replaced and removed
  since then survive up to some point in time, as journals of file systems have it.
* **A process can die at any of these calls**, before it, behind it, or in the middle of a write.
* **A dead process changes nothing.** Its stack unwinds through ``except`` and ``finally`` blocks
  that would tidy up; every call they make is refused.

Writes through maps are not seen here, but what they did is: a file's content is read when it is
needed. Files are told apart by inode, since a new incarnation finds its directory under a new
path: the old path is left to whatever the dead one might still do.
"""

from __future__ import annotations

import io
import os
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from .loop import Killed, Process, SimulationLoop

PAGE: Final = 4096
SECTOR: Final = 512
SYNC_S_MAX: Final = 0.02  # how long a sync may take


class RealCalls:
    """The calls as they were before the simulation replaced them."""

    NAMES: Final = (
        "open", "close", "pwrite", "ftruncate", "fsync", "fdatasync", "posix_fallocate", "mkdir",
        "unlink", "rename", "replace", "link",
    )  # fmt: skip

    def __init__(self) -> None:
        for name in self.NAMES:
            setattr(self, name, getattr(os, name))
        self.io_open = io.open

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(name)


real: Final = RealCalls()


def _content(fd: int, size: int) -> bytes:
    """Return what is in a file that may be open for writing only."""
    own = real.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    try:
        return os.pread(own, size, 0)
    finally:
        real.close(own)


class Journal:
    """A change of a directory's names that is not known to be durable."""

    __slots__ = ("change", "directory")

    def __init__(self, directory: int, change: dict[str, int | None]) -> None:
        self.directory = directory
        self.change = change  # name: the inode it has now, None for none


class Disk:
    """What one machine has on its disk."""

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

    def _changes(self) -> bool:
        """Count a change; True if the process is to die in the middle of it."""
        if self._acting() is None:
            return False
        self.writes += 1
        if self.writes != self.die_at_write:
            return False
        if self.chance.random() < 0.4:
            self._die()
        return True

    def _die(self) -> None:
        self.on_write_of_death()
        raise Killed

    def open(self, path: Any, flags: int, mode: int = 0o777, **named: Any) -> int:
        process = self._acting()
        if process is None:
            return int(real.open(path, flags, mode, **named))
        creates = flags & os.O_CREAT and not os.path.lexists(path)
        dies = bool(creates) and self._changes()
        fd = int(real.open(path, flags, mode, **named))
        self.descriptors[fd] = process
        if creates:
            self._created(Path(path), os.fstat(fd).st_ino)
        if dies:
            self._die()
        return fd

    def io_open(self, file: Any, mode: str = "r", *args: Any, **named: Any) -> Any:
        process = self._acting() if not isinstance(file, int) else None
        if process is None or not set(mode) & set("wax+"):
            return real.io_open(file, mode, *args, **named)
        creates = not os.path.lexists(file)
        dies = self._changes()
        opened = real.io_open(file, mode, *args, **named)
        if creates:
            self._created(Path(file), os.fstat(opened.fileno()).st_ino)
        if dies:
            self._die()
        return opened

    def close(self, fd: int) -> None:
        process = self.loop.process
        if self.over or (process is not None and process.dead and process.disk is self):
            return  # its descriptors are closed for it
        self.descriptors.pop(fd, None)
        real.close(fd)

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        if self._changes():
            # The kernel looks for a fatal signal between two pages.
            ends = [*range(PAGE - offset % PAGE, len(data), PAGE), len(data)]
            real.pwrite(fd, data[: self.chance.choice(ends)], offset)
            self._die()
        return int(real.pwrite(fd, data, offset))

    def ftruncate(self, fd: int, size: int) -> None:
        dies = self._changes()
        real.ftruncate(fd, size)
        self._sized[os.fstat(fd).st_ino] = size
        if dies:
            self._die()

    def posix_fallocate(self, fd: int, offset: int, size: int) -> None:
        self._acting()
        real.posix_fallocate(fd, offset, size)

    def sync(self, fd: int) -> None:
        """Record what is durable now: a file's content, or the names in a directory."""
        if self._acting() is None:
            return
        dies = self._changes()
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            self._sync_names(status.st_ino, os.readlink(f"/proc/self/fd/{fd}"))  # noqa: PTH115
        else:
            self._sync_number += 1
            number = self._sync_number
            content = _content(fd, status.st_size)
            # Written before the sync began, so it must be there; later writes may be as well.
            self.loop.wait_like_a_thread(self.chance.random() ** 2 * self.sync_s)
            if self._syncs.get(status.st_ino, -1) < number:
                self._syncs[status.st_ino] = number
                self._durable[status.st_ino] = content
        if dies:
            self._die()

    def mkdir(self, path: Any, *args: Any, **named: Any) -> None:
        if self._acting() is None:
            real.mkdir(path, *args, **named)
            return
        dies = self._changes()
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
        dies = self._changes()
        real.link(source, target, **named)
        self._log(Path(target), {Path(target).name: self._inode(Path(target))})
        if dies:
            self._die()

    def _created(self, path: Path, inode: int) -> None:
        self._durable.pop(inode, None)
        self._log(path, {path.name: inode})

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
        """Close what a dead process had open."""
        for fd, owner in list(self.descriptors.items()):
            if owner is process:
                del self.descriptors[fd]
                real.close(fd)

    def release_all(self) -> None:
        """Close what any process has left open, at the end of a run."""
        for fd in self.descriptors:
            real.close(fd)
        self.descriptors.clear()
        self.on_write_of_death = lambda: None

    def process_killed(self) -> None:
        """Hand the files, as the page cache has them, to the next process under a new path."""
        new = self._next_root()
        real.rename(self.root, new)
        self.root = new

    def power_cut(self, *, worst: bool = False) -> None:
        """Put in place of the files what the disk has of them; at worst, only what was synced."""
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
                content = self._left_of(
                    durable.get(inode, b""), present.get(inode), size=self._sized.get(inode)
                )
                with real.io_open(path, "wb") as file:
                    file.write(content)
                written[inode] = path
                self._durable[self._inode(path)] = content
            entries[name] = self._inode(path)

    def _left_of(self, durable: bytes, path: Path | None, *, size: int | None) -> bytes:
        """Return what is on disk of a file: its durable content and some of what came later."""
        if path is None:  # removed since, but not durably
            return durable.ljust(size or 0, b"\0")
        with real.io_open(path, "rb") as file:
            current = file.read()
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
