"""A child process that is started again when it ends, later each time that it ends soon."""

import asyncio
import logging
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from attrs import define, field

logger = logging.getLogger(__name__)

RESTART_S: Final = 1.0
RESTART_S_MAX: Final = 60.0
"""Seconds until it is started again. The first time it is at once; then they double each time up to
the maximum, until it has run for as long as that."""


@define(eq=False, repr=False)
class ChildProcess:
    """Keeps a process running.

    Its standard input is a pipe that nothing is written to: it ends with this process.
    """

    name: str
    _command: Callable[[], Sequence[str]]
    _again: Callable[[int], bool] = lambda _code: True
    """Takes its exit code; returns whether to start it again."""
    _on_line: Callable[[str], None] | None = None
    """Gets the lines of its standard output; None: nobody reads that."""
    _inherited: Sequence[int] = ()
    """Descriptors that it gets under the same numbers."""
    _stop_s: float | None = None
    """Seconds until it is killed when it is to stop; None: it may take its time."""
    _before_run: Callable[[], object] | None = None
    """Called in the new process before the command is run there."""
    exit_code: int = field(default=0, init=False)
    """Of its latest end."""
    _task: asyncio.Task[None] | None = field(default=None, init=False)

    async def start(self) -> None:
        """Start the process; return before it runs."""
        self._task = asyncio.create_task(self._keep_running())

    async def stop(self) -> None:
        """End it by SIGTERM, and return when it has ended."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _keep_running(self) -> None:
        pause = 0.0
        while True:
            started = time.monotonic()
            await self._run()
            code = self.exit_code
            if not self._again(code):
                logger.info("event=child_stays_ended child=%s exit_code=%d", self.name, code)
                return
            if time.monotonic() - started >= RESTART_S_MAX:
                pause = 0.0
            logger.warning(
                "event=child_ended child=%s exit_code=%d restart_s=%.0f", self.name, code, pause
            )
            await asyncio.sleep(pause)
            pause = min(max(2 * pause, RESTART_S), RESTART_S_MAX)

    async def _run(self) -> None:
        process = await asyncio.create_subprocess_exec(
            *self._command(),
            stdin=PIPE,
            stdout=DEVNULL if self._on_line is None else PIPE,
            pass_fds=self._inherited,
            preexec_fn=self._before_run,
            start_new_session=True,  # what ends this process by its group asks it to stop the child
        )
        logger.info("event=child_started child=%s pid=%d", self.name, process.pid)
        try:
            if process.stdout is not None and self._on_line is not None:
                async for line in process.stdout:
                    self._on_line(line.decode(errors="replace"))
            await process.wait()
        except asyncio.CancelledError:
            await self._end(process)
            raise
        finally:
            self.exit_code = await process.wait()

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        with suppress(ProcessLookupError):
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), self._stop_s)
            except TimeoutError:
                process.kill()
