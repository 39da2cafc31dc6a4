"""The console as a child process, with lower priority, so that it cannot slow the broker."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

NICENESS: Final = 10
"""How much less of a processor it gets than the broker when both need it."""

RESTART_S: Final = 1.0
RESTART_S_MAX: Final = 60.0
"""Seconds until it is started again after its end; they double each time up to the maximum."""

STOP_S: Final = 5.0
"""Seconds until it is killed when the broker stops."""


class ConsoleProcess:
    """Keeps ``halfmq console`` running."""

    def __init__(
        self, host: str, port: int, *, namesrv: Callable[[], str], trusted: Path | None
    ) -> None:
        """Wire it; ``namesrv`` returns the broker's address, ``trusted`` is its certificate."""
        self._command = [
            *(sys.executable, "-m", "halfmq.command", "console"),
            *("--host", host, "--port", str(port)),
            *([] if trusted is None else ["--ca", str(trusted)]),
        ]
        self._namesrv = namesrv
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process; return before it serves."""
        self._task = asyncio.create_task(self._keep_running())

    async def _keep_running(self) -> None:
        pause = RESTART_S
        while True:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                *("--namesrv", self._namesrv()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,  # the ready line is the broker's own
                preexec_fn=lambda: os.nice(NICENESS),
            )
            logger.info("event=console_started pid=%d", process.pid)
            try:
                code = await process.wait()
            except asyncio.CancelledError:
                await _end(process)
                raise
            logger.warning("event=console_ended exit_code=%d restart_s=%.0f", code, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, RESTART_S_MAX)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()
