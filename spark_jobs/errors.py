"""Errors raised before or while Spark reads a commit log.

SparkJobsError
├── LogDirectoryError    the directory holds no commit log that could be read
├── PlaceError           a file, directory or database in the options of a job cannot be used
├── OptionError          an option or column that does not exist, or has a wrong value
├── CorruptLogError      with mode FAILFAST: bytes that are no whole record
├── DataLossError        a stream needs a part of the log that no longer exists
├── JavaNotFoundError    no Java that this Spark can run on
└── SparkFailedError     Spark raised an error
"""

import re
from collections.abc import Callable
from functools import wraps
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# The lines with the errors in traces of Java and Python; the last is the root cause.
_RAISED: Final = re.compile(
    r"^(?:: |Caused by: )?(?:[\w$]+\.)*[\w$]+(?:Error|Exception): (?!Traceback)(.+)$", re.MULTILINE
)


class SparkJobsError(Exception):
    """Base class of all errors of this package."""

    def __str__(self) -> str:
        return ": ".join(map(str, self.args))


class LogDirectoryError(SparkJobsError):
    """A directory has no readable commit log: its path, and the reason."""


class PlaceError(SparkJobsError):
    """A file, directory or database cannot be used: its path or URL, and the reason."""


class OptionError(SparkJobsError):
    """An option or column is unknown, or has a wrong value."""


class CorruptLogError(SparkJobsError):
    """Bytes of a file are no record, and the mode is FAILFAST: its path, which, and the reason."""


class DataLossError(SparkJobsError):
    """The log of a path no longer has what a stream reads next: which offsets, and the reason."""


class JavaNotFoundError(SparkJobsError):
    """No Java was found on which Spark can run."""


class SparkFailedError(SparkJobsError):
    """Spark raised an error: the message of its root cause."""


def in_one_sentence(step: Callable[P, T]) -> Callable[P, T]:
    """Drop the traceback of an error of this package that leaves a data source.

    Spark puts the whole traceback of a worker into the message that the user sees.
    """

    @wraps(step)
    def call(*arguments: P.args, **named: P.kwargs) -> T:
        try:
            return step(*arguments, **named)
        except SparkJobsError as error:
            raise error.with_traceback(None) from None

    return call


def root_cause(error: Exception) -> str:
    """Return the message of the first error in a worker or Java, from the traces in Spark's."""
    raised = _RAISED.findall(str(error))
    return raised[-1] if raised else str(error).strip().partition("\n")[0]
