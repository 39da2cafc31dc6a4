"""What can go wrong before or while a commit log is read by Spark.

SparkJobsError
├── LogDirectoryError         the directory holds no commit log that could be read
├── OffsetTableError          the offsets of consumer groups cannot be read
├── LedgerError               a ledger to compare with cannot be read
├── ExportError               an export cannot be begun or continued
├── OutputError               a place for results holds something else, or cannot be written
├── OptionError               a read option or column that does not exist, or has a wrong value
├── CorruptLogError           with mode FAILFAST: bytes that are no whole record
├── DataLossError             a stream needs a part of the log that is no longer there
├── CacheError                the cache of an audit cannot be read or written
├── MissingDependencyError    PySpark, PyArrow or numpy is not installed
├── JavaNotFoundError         no Java that this Spark can run on
└── SparkFailedError          Spark could not do what it was asked
"""


class SparkJobsError(Exception):
    """Catch this to catch everything that these jobs raise on purpose."""


class LogDirectoryError(SparkJobsError):
    """``directory`` holds no commit log that could be read."""

    def __init__(self, directory: str, reason: str) -> None:
        super().__init__(directory, reason)
        self.directory = directory
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.directory}: {self.reason}"


class OffsetTableError(SparkJobsError):
    """The file ``path`` and its backup are no table of consumer offsets."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class LedgerError(SparkJobsError):
    """A ledger, ``what`` says which or which part of it, cannot be read."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(what, reason)
        self.what = what
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}"


class ExportError(SparkJobsError):
    """The export in ``directory`` cannot be begun or continued."""

    def __init__(self, directory: str, reason: str) -> None:
        super().__init__(directory, reason)
        self.directory = directory
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.directory}: {self.reason}"


class OutputError(SparkJobsError):
    """Results cannot be written to ``place``."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(place, reason)
        self.place = place
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


class OptionError(SparkJobsError):
    """A read option or a column is unknown, or a value is not what the option takes."""


class CorruptLogError(SparkJobsError):
    """At ``offset`` there are ``size`` bytes that are no record; the reader was told to stop."""

    def __init__(self, path: str, offset: int, size: int, reason: str) -> None:
        super().__init__(path, offset, size, reason)
        self.path = path
        self.offset = offset
        self.size = size
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.size} bytes at offset {self.offset}: {self.reason}"


class DataLossError(SparkJobsError):
    """What a stream has to read next, from ``start`` to ``end``, is not in the log any more."""

    def __init__(self, path: str, start: int, end: int, reason: str) -> None:
        super().__init__(path, start, end, reason)
        self.path = path
        self.start = start
        self.end = end
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"{self.path}: the stream needs offsets {self.start} to {self.end}, but {self.reason};"
            " failOnDataLoss=false goes on with what is there"
        )


class CacheError(SparkJobsError):
    """The cache in ``directory`` cannot be read or written."""

    def __init__(self, directory: str, reason: str) -> None:
        super().__init__(directory, reason)
        self.directory = directory
        self.reason = reason

    def __str__(self) -> str:
        return f"cache {self.directory}: {self.reason}"


class MissingDependencyError(SparkJobsError):
    """A package of the extra ``spark`` is not installed."""

    def __init__(self, package: str) -> None:
        super().__init__(package)
        self.package = package

    def __str__(self) -> str:
        return f"{self.package} is not installed: run  pip install 'halfmq[spark]'"


class JavaNotFoundError(SparkJobsError):
    """There is no Java on which Spark could run."""


class SparkFailedError(SparkJobsError):
    """Spark could not do what it was asked; says what a worker or Spark itself told of it."""
