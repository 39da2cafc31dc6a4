"""The exceptions of the store.

StoreError
├── CorruptRecordError       the bytes at an offset are not a valid record (the disk's fault)
├── RecordTooLargeError      a record is larger than a file of the log (the caller's fault)
├── PropertiesTooLongError   its properties do not fit their length field (the caller's fault)
├── DiskFullError            no space for a file (the machine's fault)
├── WriteFailedError         the system refused to write to the log
├── DirectoryLostError       the directory is gone or another broker's; the store has stopped
├── FlushFailedError         a flush failed; the store has stopped
├── StoreClosedError         the store is not open
├── DirectoryInUseError      another broker holds the directory
├── ArchiveFailedError       the object store of old files cannot be read or written
├── ArchiveRefusedError      the archive has another log; nothing more is uploaded
├── DamagedTableError        a table and its backup cannot be read; both stay unchanged
└── UnusableFileError        a file or directory that the store cannot use; it stays unchanged
    └── NotPromotableError   a directory that is no complete copy of a master's store

After ``DiskFullError`` and ``WriteFailedError`` nothing of the group was stored, and a later append
may succeed, unless undoing the write failed as well. After ``FlushFailedError`` only a restart
helps: the kernel may have dropped the pages it could not write, and a second fdatasync would report
success for data that is lost.
"""

from pathlib import Path

from .format.errors import CorruptRecordError, StoreError

__all__ = [
    "ArchiveFailedError",
    "ArchiveRefusedError",
    "CorruptRecordError",
    "DamagedTableError",
    "DirectoryInUseError",
    "DirectoryLostError",
    "DiskFullError",
    "FlushFailedError",
    "NotPromotableError",
    "PropertiesTooLongError",
    "RecordTooLargeError",
    "StoreClosedError",
    "StoreError",
    "UnusableFileError",
    "WriteFailedError",
]


class RecordTooLargeError(StoreError):
    """A record or a batch is larger than a file of the log holds; all sizes in bytes."""

    def __init__(self, what: str, size: int, size_max: int) -> None:
        super().__init__(what, size, size_max)
        self.what = what
        self.size = size
        self.size_max = size_max

    def __str__(self) -> str:
        return f"{self.what} of {self.size} bytes exceeds the limit of {self.size_max}"


class PropertiesTooLongError(StoreError):
    """The property string of a message is too long for its int16 length field."""

    def __init__(self, size: int, size_max: int) -> None:
        super().__init__(size, size_max)
        self.size = size
        self.size_max = size_max

    def __str__(self) -> str:
        return f"properties of {self.size} bytes exceed the limit of {self.size_max}"


class DiskFullError(StoreError):
    """There is no space left for ``path``."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"no space for {self.path}: {self.reason}"


class WriteFailedError(StoreError):
    """A write failed for another reason than a full disk; nothing of the group was stored."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"the log cannot be written: {self.reason}"


class FlushFailedError(StoreError):
    """A flush failed; records that were not durable before may be lost."""

    def __init__(self, durable_offset: int, reason: str) -> None:
        super().__init__(durable_offset, reason)
        self.durable_offset = durable_offset
        self.reason = reason

    def __str__(self) -> str:
        return f"flush failed after offset {self.durable_offset}: {self.reason}"


class DirectoryLostError(StoreError):
    """The store's directory, or its lock file, is no longer the one that was opened."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        return f"{self.path} was removed, renamed or replaced, so another broker may use the store"


class StoreClosedError(StoreError):
    """The store was not opened, or was closed."""

    def __str__(self) -> str:
        return "the store is closed"


class DirectoryInUseError(StoreError):
    """Another broker uses the directory; ``holder`` is what it wrote into the lock file."""

    def __init__(self, root: Path, holder: str) -> None:
        super().__init__(root, holder)
        self.root = root
        self.holder = holder

    def __str__(self) -> str:
        return f"{self.root} is in use by another broker ({self.holder})"


class ArchiveFailedError(StoreError):
    """An object store could not be reached, or refused; a later attempt may succeed."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return f"archive {self.name}: {self.reason}"


class ArchiveRefusedError(StoreError):
    """The archive was written by a broker with another log than this one."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(offset, reason)
        self.offset = offset
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"the archive is not of this log at offset {self.offset}: {self.reason}. Nothing is "
            "uploaded or deleted; give this store an archiveUrl of its own"
        )


class DamagedTableError(StoreError):
    """Neither the table at ``path`` nor its ``.bak`` can be read; ``remedy`` says what to do."""

    def __init__(self, path: Path, reason: str, remedy: str = "") -> None:
        super().__init__(path, reason, remedy)
        self.path = path
        self.reason = reason
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.path} and its .bak cannot be read: {self.reason}" + (
            f". {self.remedy}" if self.remedy else ""
        )


class UnusableFileError(StoreError):
    """The store cannot be opened with the file at ``path`` as it is."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class NotPromotableError(UnusableFileError):
    """The directory is no complete copy of a master's store."""
