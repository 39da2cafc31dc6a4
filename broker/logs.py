"""Logs: one line per event on standard error, `time level logger event=… key=value …`, or as JSON.

A faulty client may cause ten thousand errors per second. So of lines that differ only in their
values, only the first ones in each second are written. The number of omitted lines is logged before
the next line of any kind.

Values may be texts of clients: they are cut, those with blanks or quotes are quoted, and control
characters of a line are escaped.
"""

import copy
import json
import logging
import re
import sys
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Final, TextIO

from halfmq.remoting.shown_text import VALUE_MAX, shown

ALIKE_PER_SECOND_MAX: Final = 100
"""Lines of one kind written in a second: enough for a diagnosis, and a millisecond of work."""

LINE_MAX: Final = 16_384
"""Characters of a line; most have 200, and a traceback of thirty functions 4,000."""

EACH: Final = {"each": True}
"""``extra`` of a line that is always written: an operator's action, or what needs one."""

logger = logging.getLogger(__name__)


class LogLevel(StrEnum):
    """The least level that is logged."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"


class LogFormat(StrEnum):
    """How a line is written."""

    TEXT = "TEXT"
    JSON = "JSON"


class LineFormatter(logging.Formatter):
    """Formats each record as one line that begins with the time in UTC, to the millisecond."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self, process: str = "") -> None:
        """``process`` is the name of this process among several that write to one log."""
        mark = f" process={process}" if process else ""
        super().__init__(f"%(asctime)s %(levelname)s %(name)s{mark} %(message)s")
        self.converter = time.gmtime
        self._process = {"process": process} if process else {}

    def format(self, record: logging.LogRecord) -> str:
        """Return one line; the line breaks of a traceback are shown as backslash and n."""
        args = record.args
        if isinstance(args, tuple):
            record = copy.copy(record)  # other handlers get the same one
            record.args = _values(str(record.msg), tuple(map(_cut, args)))
        return shown(super().format(record), LINE_MAX)


class JsonFormatter(LineFormatter):
    """Formats each record as one JSON object with a field for each of the line's; numbers stay."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line; a line of a library has the field ``message``."""
        line: dict[str, object] = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            **self._process,
        }
        line |= _fields(record) or {"message": shown(record.getMessage())}
        if record.exc_info:
            line["exception"] = shown(self.formatException(record.exc_info), LINE_MAX)
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """Return the fields of a line ``event=… key=value …``; none of a line of another form."""
    template, args = str(record.msg), record.args or ()
    conversions = [found for found in _CONVERSION.finditer(template) if found[2] != "%"]
    if not template.startswith("event=") or len(conversions) != len(args):
        return {}
    left, fields = list(args), dict[str, object]()
    for key, text in _FIELD.findall(template):
        own = [left.pop(0) for found in _CONVERSION.finditer(text) if found[2] != "%"]
        is_value = len(own) == 1 and _CONVERSION.fullmatch(text)
        if is_value and isinstance(own[0], int | float | None):
            fields[key] = own[0]
        else:
            fields[key] = shown(str(own[0]) if is_value else text.strip("'") % tuple(own))
    return fields


_FIELD: Final = re.compile(r"([\w.]+)=('[^']*'|[^\s']+)")
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
                        "event=lines_left_out count=%d of=%s like=%r",
                        (count - ALIKE_PER_SECOND_MAX, name, template.partition(" ")[0]),
                        None,
                    )
                )


def configure_logging(level: LogLevel, form: LogFormat, process: str = "") -> None:
    """Send the log of the whole process to standard error, of libraries from WARNING on.

    Each line names the ``process``, if there are several.
    """
    handler = BoundedHandler(sys.stderr)
    formatter = JsonFormatter if form is LogFormat.JSON else LineFormatter
    handler.setFormatter(formatter(process))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    set_level(level)


def set_level(level: LogLevel) -> None:
    """Log from this level on."""
    logging.getLogger("halfmq").setLevel(level)
