"""Logs: one line per event on standard error, `time level logger event=… key=value …`."""

from __future__ import annotations

import logging
import sys
import time


class LineFormatter(logging.Formatter):
    """Writes UTC time with milliseconds and keeps every record on one line, tracebacks included."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        """Return one line; the line breaks of a traceback are shown as backslash and n."""
        return super().format(record).replace("\n", "\\n")


def configure_logging(level: str) -> None:
    """Send the log of the whole process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
