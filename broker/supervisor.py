"""Several brokers under one command (`brokers=N`): a process each, started and supervised here.

This process serves no requests. It holds the listening socket of the name-server port, on which all
brokers accept: while one of them is away, the others answer. A broker that dies is started again;
one that was drained stays ended. If this process ends in any way, the brokers stop in order: each
reads a pipe that ends with it.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Final

from .config import BrokerConfig
from .loop.child_process import ChildProcess
from .members import member_names, prepare_new_members
from .net.connection import address_text
from .net.server import bind

logger = logging.getLogger(__name__)

MEMBER_OPTION: Final = "--member"
"""Number of the broker among those of the command, and descriptor of the name-server socket."""

KILLED: Final = 1
"""Exit code if a broker was killed before all were ready."""


class Supervisor:
    """Runs the brokers of one command."""

    def __init__(
        self, config: BrokerConfig, arguments: Sequence[str], stop_requested: asyncio.Event
    ) -> None:
        """Wire it; ``arguments`` are those of the command, which the brokers get too."""
        self._config, self._arguments = config, arguments
        self._names = member_names(config)
        self._stop_requested = stop_requested
        self._ready: dict[int, dict[str, str]] = {}  # the fields of their ready lines
        self._all_ready = asyncio.Event()
        self._drained: set[int] = set()
        self._exit_code = 0

    async def run(self) -> int:
        """Print the ready line when all serve; stop them when asked to. Return the exit code.

        Raises:
            BrokerConfigError: The settings do not fit several brokers, or what is stored.
            StoreError: The directory of all cannot be used.
            AddressTakenError: The name-server port is in use.
        """
        started = time.monotonic()
        config, network = self._config, self._config.network
        prepare_new_members(config)
        with bind(network.bind_address, network.namesrv_listen_port, "namesrvListenPort") as shared:
            children = [
                ChildProcess(
                    name,
                    partial(self._command, number, shared.fileno()),
                    partial(self._ended, number),
                    on_line=partial(self._read_line, number),
                    inherited=[shared.fileno()],
                )
                for number, name in enumerate(self._names)
            ]
            try:
                for child in children:
                    await child.start()
                await self._wait_until_ready()
                if self._all_ready.is_set():
                    address = address_text(network.bind_address, shared.getsockname()[1])
                    print(self._ready_line(address, started), flush=True)  # noqa: T201
                await self._stop_requested.wait()
                logger.info("event=stopping")
            finally:
                await asyncio.gather(*(child.stop() for child in children))
        codes = [child.exit_code for child in children]
        logger.info("event=stopped exit_codes=%s", codes)
        return self._exit_code or next((_exit_code(code) for code in codes if code), 0)

    def _command(self, number: int, descriptor: int) -> list[str]:
        own = [MEMBER_OPTION, str(number), str(descriptor)]
        return [sys.executable, "-m", "halfmq.broker", *self._arguments, *own]

    async def _wait_until_ready(self) -> None:
        waits = [
            asyncio.create_task(event.wait()) for event in (self._all_ready, self._stop_requested)
        ]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _read_line(self, number: int, line: str) -> None:
        word, *fields = line.split() or [""]
        if word == "ready":
            self._ready[number] = dict(field.partition("=")[::2] for field in fields)
            if len(self._ready) == len(self._names):
                self._all_ready.set()

    def _ready_line(self, namesrv: str, started: float) -> str:
        first = self._ready[0]
        recovery_ms = max(int(one["recovery_ms"]) for one in self._ready.values())
        return (
            f"ready listen={first['listen']} namesrv={namesrv}"
            f" store={self._config.store.root} flush={first['flush']} recovery_ms={recovery_ms}"
            f" start_ms={(time.monotonic() - started) * 1_000:.0f}"
            + (f" http={first['http']}" if "http" in first else "")
            + f" brokers={len(self._names)}"
        )

    def _ended(self, number: int, code: int) -> bool:
        """Return whether to start a broker again that has ended unasked."""
        if not self._all_ready.is_set():
            logger.error("event=start_failed broker=%s exit_code=%d", self._names[number], code)
            self._exit_code = self._exit_code or _exit_code(code) or KILLED
            self._stop_requested.set()
        elif not code:
            self._drained.add(number)
            if len(self._drained) == len(self._names):
                self._stop_requested.set()
        return self._all_ready.is_set() and code != 0


def _exit_code(code: int) -> int:
    return KILLED if code < 0 else code  # below 0: the number of a signal
