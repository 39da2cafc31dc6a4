"""Logs: one line per event on standard error, `time level logger event=… key=value …`.

A faulty client may cause ten thousand errors per second. So of lines that differ only in their
values, only the first ones in each second are written. The number of omitted lines is logged before
the next line of any kind.

Values may be texts of clients: they are cut, those with blanks or quotes are quoted, and control
characters of a line are escaped.
"""

from __future__ import annotations

import copy
import logging
import re
import sys
import time
from collections.abc import Callable
from typing import Final, TextIO

from halfmq.remoting.shown_text import VALUE_MAX, shown

ALIKE_PER_SECOND_MAX: Final = 100
"""Lines of one kind written in a second: enough for a diagnosis, and a millisecond of work."""

LINE_MAX: Final = 16_384
"""Characters of a line; most have 200, and a traceback of thirty functions 4,000."""

EACH: Final = {"each": True}
"""``extra`` of a line that is always written: an operator's action, or what needs one."""

logger = logging.getLogger(__name__)


class LineFormatter(logging.Formatter):
    """Formats each record as one line that begins with the time in UTC, to the millisecond."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        """Return one line; the line breaks of a traceback are shown as backslash and n."""
        args = record.args
        if isinstance(args, tuple):
            record = copy.copy(record)  # other handlers get the same one
            record.args = _values(str(record.msg), tuple(map(_cut, args)))
        return shown(super().format(record), LINE_MAX)


_CONVERSION: Final = re.compile(r"(=?)%[-+ #0-9.]*([a-zA-Z%])")
_AMBIGUOUS: Final = re.compile(r"^$|[\s'\"]")  # a text that needs quotes to be one value


def _values(template: str, args: tuple[object, ...]) -> tuple[object, ...]:
    """Return the values of a template, in quotes where it has ``key=%s`` and that is ambiguous."""
    conversions = [found for found in _CONVERSION.finditer(template) if found[2] != "%"]
    if len(conversions) != len(args):
        return args  # the error is reported with the line
    return tuple(
        _quoted(text)
        if found[1] and found[2] == "s" and _AMBIGUOUS.search(text := str(value))
        else value
        for found, value in zip(conversions, args, strict=True)
    )


def _quoted(text: str) -> str:
    mark = '"' if "'" in text else "'"
    return mark + text.replace(mark, f"\\{mark}") + mark


def _cut(value: object) -> object:
    return shown(value) if isinstance(value, str) and len(value) > VALUE_MAX else value


class BoundedHandler(logging.StreamHandler[TextIO]):
    """Writes at most ``ALIKE_PER_SECOND_MAX`` lines of one kind in a second, but all of DEBUG."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._clock = clock
        self._second = clock()  # when it began
        self._alike: dict[tuple[str, str], int] = {}  # lines of this second by logger and template

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, unless too many of its kind were written in this second."""
        now = self._clock()
        if now - self._second >= 1:
            self._second = now
            self._log_omitted()
        if record.levelno > logging.DEBUG and not hasattr(record, "each"):
            kind = (record.name, str(record.msg))
            count = self._alike[kind] = self._alike.get(kind, 0) + 1
            if count > ALIKE_PER_SECOND_MAX:
                return
        super().emit(record)

    def _log_omitted(self) -> None:
        alike, self._alike = self._alike, {}
        for (name, template), count in alike.items():
            if count > ALIKE_PER_SECOND_MAX:
                super().emit(
                    logger.makeRecord(
                        logger.name,
                        logging.WARNING,
                        __file__,
                        0,
                        "event=lines_left_out count=%d logger=%s like=%r",
                        (count - ALIKE_PER_SECOND_MAX, name, template.partition(" ")[0]),
                        None,
                    )
                )


def configure_logging(level: str) -> None:
    """Send the log of the whole process to standard error."""
    handler = BoundedHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
