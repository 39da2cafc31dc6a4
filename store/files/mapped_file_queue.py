"""A sequence of files of equal size, addressed by one offset.

Each file is named by the offset of its first byte in 20 digits, so that the file of an offset is
found by arithmetic. Source: RocketMQ ``MappedFileQueue.java``.
"""

import logging
from bisect import insort
from pathlib import Path
from typing import Final

from attrs import define, field

from ..errors import UnusableFileError
from . import disk
from .mapped_file import create_file

logger = logging.getLogger(__name__)

NAME_DIGITS: Final = 20


@define(eq=False, repr=False)
class MappedFileQueue:
    """The names of the files; callers open them."""

    _directory: str = field(converter=str)  # a Path takes five times as much; there may be 100,000
    file_size: int
    # Ascending offsets of first bytes, usually contiguous.
    bases: list[int] = field(factory=list, init=False)

    @property
    def directory(self) -> Path:
        """Where the files lie."""
        return Path(self._directory)

    def load(self) -> dict[Path, int]:
        """Find the existing files; return the sizes in bytes of those without ``file_size``.

        An empty last file was being created when the machine stopped, and is removed.

        Raises:
            UnusableFileError: The name of a file is not valid here.
        """
        sizes = disk.file_sizes(self._directory)
        last = next(reversed(sizes), None)
        if last is not None and not sizes[last]:
            logger.warning("event=empty_file_removed path=%s", self.directory / last)
            disk.unlink(self.directory / last)
            del sizes[last]
        self.bases = [self._checked(name) for name in sizes]
        wrong = {name: size for name, size in sizes.items() if size != self.file_size}
        return {self.directory / name: size for name, size in wrong.items()}

    def _checked(self, name: str) -> int:
        if not (name.isascii() and name.isdigit()):
            reason = "is no data file, and nothing else may lie here"
            raise UnusableFileError(self.directory / name, reason)
        base = int(name)
        if len(name) != NAME_DIGITS or base % self.file_size:
            reason = f"is not named by a multiple of {self.file_size} bytes"
            raise UnusableFileError(self.directory / name, reason)
        return base

    def path(self, base: int) -> Path:
        """Return the path of the file whose first byte has the offset ``base``."""
        return Path(f"{self._directory}/{base:0{NAME_DIGITS}d}")

    def base_of(self, offset: int) -> int:
        """Return the first offset of the file that ``offset`` falls into."""
        return offset - offset % self.file_size

    def missing(self) -> int | None:
        """Return the first offset of the first missing file; None if none is missing."""
        for base, following in zip(self.bases, self.bases[1:], strict=False):
            if base + self.file_size != following:
                return base + self.file_size
        return None

    def create(self, base: int) -> None:
        """Create the file and add it; the directory is not flushed.

        Raises:
            DiskFullError: There is no space for its name.
        """
        create_file(self.path(base), self.file_size)
        self.add(base)

    def add(self, base: int) -> None:
        insort(self.bases, base)

    def forget_before(self, offset: int) -> list[int]:
        """Drop the files that end at or before ``offset`` from the list, but never the last one.

        Return their offsets, oldest first; the caller deletes them in this order.
        """
        gone = [base for base in self.bases[:-1] if base + self.file_size <= offset]
        del self.bases[: len(gone)]
        return gone

    def remove_from(self, offset: int) -> list[int]:
        """Delete the files that begin at or after ``offset``; return their offsets.

        The newest is deleted first, so that a crash or an error leaves no file missing in between.
        """
        removed = [base for base in self.bases if base >= offset]
        for base in reversed(removed):
            disk.remove(self.path(base))
        if removed:
            del self.bases[-len(removed) :]
            disk.sync_directory(self.directory)
        return removed
