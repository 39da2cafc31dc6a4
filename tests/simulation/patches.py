"""Replace the machine during a run: clocks, randomness, threads and system calls."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from halfmq.broker import service as broker_service
from halfmq.broker.disk import retention_policy as broker_retention
from halfmq.broker.net.connection import ClientConnection
from halfmq.broker.transaction import transaction_service
from halfmq.broker.transaction.replay import snapshot
from halfmq.client.net import connection as client_connection
from halfmq.store import message_store
from halfmq.store.files import disk as door
from halfmq.store.files.page_cache import CachedReads
from halfmq.store.queue import queue_table

from .disk import Disk, RealCalls
from .loop import EPOCH_S, Killed, SimulatedThread, SimulationLoop

_PID: Final = 4242
_USERS_FAULTS: Final = ("event=check_timed_out", "event=user_function_failed")
"""Errors that checkers of users make, and that are logged as theirs."""
_UNFENCED_FAULT: Final = "event=decision_refused"
"""Logged if a checker without a fence returned ROLLBACK before the row was committed."""


class ErrorLog(logging.Handler):
    """Records errors that production code logs: a simulated run must not cause any."""

    def __init__(self, loop: SimulationLoop, *, fenced: bool) -> None:
        super().__init__(logging.ERROR)
        self._loop = loop
        self._users_faults = _USERS_FAULTS if fenced else (*_USERS_FAULTS, _UNFENCED_FAULT)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith(self._users_faults):
            return
        process = self._loop.process
        if process is not None and (process.dead or process.faulty):
            return
        error = record.exc_info[1] if record.exc_info else None
        name = process.name if process else "world"
        self._loop.errors.append(f"t={self._loop.now:.6f} {name}: {text} {error!r}")
        if self._loop.trace is not None:
            self._loop.note("error", name, text, repr(error))


def _numbered() -> Callable[[Any], int]:
    """Return a ``__hash__`` that does not depend on the object's address."""
    numbers = itertools.count()

    def number_of(owner: Any) -> int:
        number: int | None = owner.__dict__.get("_simulation_number")
        if number is None:
            number = owner.__dict__["_simulation_number"] = next(numbers)
        return number

    return number_of


def _forgetful(
    is_gone: Callable[[], bool],
) -> Callable[[CachedReads, int, Sequence[memoryview | bytearray], int], int]:
    """Return a ``CachedReads.read_into`` that sometimes finds nothing in memory."""
    read_into = CachedReads.read_into

    def read(
        reads: CachedReads, fd: int, targets: Sequence[memoryview | bytearray], position: int
    ) -> int:
        return -1 if is_gone() else read_into(reads, fd, targets, position)

    return read


@contextlib.contextmanager
def installed(
    loop: SimulationLoop,
    disk: Disk,
    chance: random.Random,
    *,
    fenced: bool = True,
    is_gone: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Put everything in place, and back in the end.

    `fenced` is the scenario's; `is_gone` returns whether the next read finds nothing in memory.
    """
    numbered = _numbered()

    def wall_ns() -> int:
        ahead_s = loop.clocks.get(loop.process.address, 0.0) if loop.process else 0.0
        return int((EPOCH_S + loop.now + ahead_s) * 1e9)

    own_thread, sleep = threading.get_ident(), time.sleep

    def no_sleep(seconds: float) -> None:
        if threading.get_ident() != own_thread:
            sleep(seconds)  # a thread that another test has left, of Spark's for one
            return
        raise AssertionError("a call blocks the event loop")

    replaced: list[tuple[Any, str, Any]] = [
        (time, "monotonic", loop.time),
        (time, "monotonic_ns", lambda: int(loop.now * 1e9)),
        (time, "perf_counter", loop.time),
        (time, "time", lambda: wall_ns() / 1e9),
        (time, "time_ns", wall_ns),
        (time, "sleep", no_sleep),
        (os, "urandom", chance.randbytes),
        (random, "_urandom", chance.randbytes),
        (transaction_service, "Random", lambda: random.Random(chance.random())),
        (os, "getpid", lambda: _PID),
        (threading, "Thread", SimulatedThread),
        (door, "fsync", disk.sync),
        (door, "fdatasync", disk.sync),
        (door, "sync_file_system", disk.sync_file_system),
        *((door, name, getattr(disk, name)) for name in RealCalls.NAMES),
        (ClientConnection, "__hash__", numbered),
        (client_connection.BrokerConnection, "__hash__", numbered),
        (CachedReads, "read_into", _forgetful(is_gone)),
        # Housekeeping that is only there to be prompt; a run spends less on it this way.
        (broker_service, "INDEX_TICK_S", 0.25),
        (client_connection, "SWEEP_INTERVAL", 0.25),
        (queue_table, "SYNCED_SINGLY_MAX", 5),  # so that queues are flushed in both ways
        (message_store, "FLUSH_EVERY", 1.0),
        # Snapshots are taken, and old files looked for, within the seconds of a run.
        (snapshot, "INTERVAL_MS", 1_000),
        (broker_retention, "FIRST_SCAN_S", 0.3),
        (broker_retention, "SCAN_S", 0.4),
    ]
    missing = object()
    before = [(owner, name, vars(owner).get(name, missing)) for owner, name, _ in replaced]
    state = random.getstate()
    random.seed(chance.random())
    log = logging.getLogger("halfmq")
    level, propagate = log.level, log.propagate
    errors = ErrorLog(loop, fenced=fenced)
    SimulatedThread.loop = loop
    collecting = gc.isenabled()
    gc.disable()
    hook = sys.unraisablehook
    try:
        for owner, name, replacement in replaced:
            setattr(owner, name, replacement)
        log.setLevel(logging.ERROR)
        log.propagate = False
        log.addHandler(errors)
        # As asyncio's own loops do in `run_forever`, which this loop does not use.
        asyncio._set_running_loop(loop)
        yield
    finally:
        asyncio._set_running_loop(None)
        _release_objects(loop, disk)
        for owner, name, old in before:
            if old is missing:
                delattr(owner, name)
            else:
                setattr(owner, name, old)
        random.setstate(state)
        log.removeHandler(errors)
        log.setLevel(level)
        log.propagate = propagate
        sys.unraisablehook = hook
        if collecting:
            gc.enable()


def _release_objects(loop: SimulationLoop, disk: Disk) -> None:
    """Drop all objects of a run, while their destructors have no effect."""
    sys.unraisablehook = lambda _unraisable: None
    loop.over = True
    disk.over = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of coroutines that were killed before their first step
        loop.close()
        gc.collect()
        gc.collect()  # coroutines that ended in the first one have let go of more


__all__ = ["Killed", "installed"]
