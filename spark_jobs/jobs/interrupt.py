"""Ctrl-C: one line, exit code 130, and no process left running.

Python would raise ``KeyboardInterrupt`` wherever it is: inside an import, in a callback of Py4J,
while a JVM starts, each with another trace. So the handler ends the process itself. This module
imports nothing slow, so that the handler is in place early.
"""

import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

INTERRUPTED: Final = 130  # what a shell reports for Ctrl-C
_PATIENCE: Final = 5.0  # seconds in which a JVM can remove its temporary files
_PAUSE: Final = 0.02  # seconds

_process = os.getpid()


def end_on_interrupt() -> None:
    """Make SIGINT end this process and its children."""
    signal.signal(signal.SIGINT, _end)


def _end(*_: object) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.getpid() != _process:
        os._exit(INTERRUPTED)  # a fork that is about to become the JVM; the parent prints the line
    with suppress(OSError):
        sys.stderr.write("\r\x1b[Kinterrupted\n" if sys.stderr.isatty() else "interrupted\n")
        sys.stderr.flush()
    _end_children()
    os._exit(INTERRUPTED)


def _end_children() -> None:
    """End the JVM and its Python workers; without /proc they end when our pipe to them does."""
    family = list(_descendants(os.getpid()))
    _send(family, signal.SIGTERM)
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end and any(map(_is_alive, family)):
        time.sleep(_PAUSE)
    _send({*family, *_descendants(os.getpid())}, signal.SIGKILL)


def _descendants(process: int) -> Iterator[int]:
    with suppress(OSError):
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            for child in map(int, children.read_text().split()):
                yield child
                yield from _descendants(child)


def _is_alive(process: int) -> bool:
    with suppress(ChildProcessError):
        os.waitpid(
            process, os.WNOHANG
        )  # or it stays a zombie; no child of ours may be a grandchild
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _send(processes: Iterable[int], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)
