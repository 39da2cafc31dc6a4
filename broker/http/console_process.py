"""The console as a child process, with lower priority, so that it cannot slow the broker."""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from ..loop.child_process import ChildProcess

NICENESS: Final = 10
"""How much less of a processor it gets than the broker when both need it."""

STOP_S: Final = 5.0
"""Seconds until it is killed when the broker stops."""


def console_process(
    host: str, port: int, *, namesrv: Callable[[], str], trusted: Path | None
) -> ChildProcess:
    """Return what keeps ``halfmq console`` running.

    ``namesrv`` returns the broker's address, ``trusted`` is its certificate.
    """
    command = [
        *(sys.executable, "-m", "halfmq.command", "console"),
        *("--host", host, "--port", str(port)),
        *([] if trusted is None else ["--ca", str(trusted)]),
    ]
    return ChildProcess(
        "console",
        lambda: [*command, "--namesrv", namesrv()],
        stop_s=STOP_S,
        before_run=partial(os.nice, NICENESS),
    )
