"""What can go wrong before or while a commit log is read by Spark.

SparkJobsError
├── LogDirectoryError    the directory holds no commit log that could be read
├── PlaceError           a file, directory or database that a job was given cannot be used
├── OptionError          an option or column that does not exist, or has a wrong value
├── CorruptLogError      with mode FAILFAST: bytes that are no whole record
├── DataLossError        a stream needs a part of the log that is no longer there
├── JavaNotFoundError    no Java that this Spark can run on
└── SparkFailedError     Spark could not do what it was asked
"""

import re
from collections.abc import Callable
from functools import wraps
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# The lines in the traces of Java and Python that say what happened; the last is the root cause.
_RAISED: Final = re.compile(
    r"^(?:: |Caused by: )?(?:[\w$]+\.)*[\w$]+(?:Error|Exception): (?!Traceback)(.+)$", re.MULTILINE
)


class SparkJobsError(Exception):
    """Catch this to catch everything that these jobs raise on purpose."""

    def __str__(self) -> str:
        return ": ".join(map(str, self.args))


class LogDirectoryError(SparkJobsError):
    """A directory holds no commit log that could be read; its path, and the reason."""


class PlaceError(SparkJobsError):
    """A place that a job was given cannot be used; its path or URL, and the reason."""


class OptionError(SparkJobsError):
    """An option or a column is unknown, or a value is not what it takes."""


class CorruptLogError(SparkJobsError):
    """At ``offset`` there are ``size`` bytes that are no record; the reader was told to stop."""

    def __init__(self, path: str, offset: int, size: int, reason: str) -> None:
        super().__init__(path, offset, size, reason)
        self.path, self.offset, self.size, self.reason = path, offset, size, reason

    def __str__(self) -> str:
        return f"{self.path}: {self.size} bytes at offset {self.offset}: {self.reason}"


class DataLossError(SparkJobsError):
    """What a stream has to read next, from ``start`` to ``end``, is not in the log any more."""

    def __init__(self, path: str, start: int, end: int, reason: str) -> None:
        super().__init__(path, start, end, reason)
        self.path, self.start, self.end, self.reason = path, start, end, reason

    def __str__(self) -> str:
        return (
            f"{self.path}: the stream needs offsets {self.start} to {self.end}, but {self.reason};"
            " failOnDataLoss=false goes on with what is there"
        )


class JavaNotFoundError(SparkJobsError):
    """There is no Java on which Spark could run."""


class SparkFailedError(SparkJobsError):
    """Spark could not do what it was asked; says what a worker or Spark itself told of it."""


def in_one_sentence(step: Callable[P, T]) -> Callable[P, T]:
    """Have an error of ours leave a data source without the way that it took.

    Spark puts the whole traceback of a worker into the message that its user sees.
    """

    @wraps(step)
    def told(*arguments: P.args, **named: P.kwargs) -> T:
        try:
            return step(*arguments, **named)
        except SparkJobsError as error:
            raise error.with_traceback(None) from None

    return told


def root_cause(error: Exception) -> str:
    """Return what a Spark worker or Java raised first, from the traces in Spark's message."""
    raised = _RAISED.findall(str(error))
    return raised[-1] if raised else str(error).strip().partition("\n")[0]
