"""The real broker in this process, its loop watched: ``REPORT [--stacks] -- ARGUMENTS``.

A timer of the loop comes back every few milliseconds. When it is late, the loop was in one piece of
work, or it waited: for the disk, for the interpreter, for a processor. What it was shows in figures
taken at each beat without letting go of the interpreter (the wall, the thread's processor time, and
how long it and others were in the queue for a processor: a thread that has the interpreter and no
processor stops the loop as well; and on which core the loop is) and in the *spans*: how long named
parts took, in the loop or beside it. With ``--stacks`` a late beat also writes down where all
threads are, to standard error.

The report is written when the broker serves, and again when it stops. Times are those of
``time.monotonic``, which all processes of a machine share.
"""

import asyncio
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import msgspec

from halfmq.broker import cli
from halfmq.broker.service import Broker
from halfmq.store.recovery import RecoveryReport

BEAT_S: Final = 0.002
"""Seconds between two beats; the loop counts in milliseconds."""
KEPT_S: Final = 0.001
"""Shorter pauses and spans are not kept."""
STACKS_AFTER_S: Final = 0.015
"""Seconds without a beat after which stacks are written."""
_SCHEDSTAT_SIZE: Final = 128  # bytes; three numbers
_THREADS_EVERY: Final = 250  # beats; threads come and go

TRACED: Final = (
    ("store.commit_log", "CommitLog", ("_roll", "_look_up", "_create", "prepare_ahead")),
    ("store.mapped_file", "LogFile", ("__init__", "make_ready", "close")),
    ("store.flush", "Flusher", ("_flush",)),
    ("store.janitor", "Janitor", ("_round",)),
    ("store.message_store", "MessageStore", ("_recover", "_flush_derived", "tick", "read_cold")),
    ("store.consume_queue", "ConsumeQueue", ("grow", "entries", "sync", "begin_at")),
    ("store.index_file", "IndexFile", ("prepare", "append", "unmap", "close", "flush")),
    ("store.index_file", "IndexService", ("_append", "_create_file", "forget_before", "recover")),
    ("store.key_indexing", "KeyIndexing", ("work", "recover")),
    ("store.retention", "Retention", ("work", "_round")),
    ("store.integrity", "Integrity", ("work", "before_index")),
    ("store.recovery", "Recovery", ("run", "_scan_from", "_cut_log")),
    ("store.log_reader", "LogReader", ("read", "record_bytes")),
    ("broker.tables", "", ("save_table",)),
    ("broker.release", "ReplyRelease", ("release",)),
    ("broker.server", "ClientConnection", ("data_received",)),
    ("broker.transaction.service", "TransactionService", ("tick", "rebuild")),
    ("broker.transaction.snapshot", "Snapshots", ("tick",)),
    ("broker.disk_guard", "DiskGuard", ("tick",)),
    ("broker.retention", "RetentionSchedule", ("tick",)),
    ("broker.long_polling", "LongPolling", ("_look",)),
)
"""Module below ``halfmq``, class, and what of it is timed. A name that is gone is passed over."""


class Pause(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A beat that came late."""

    end: float
    seconds: float  # by which it was late
    processor: float  # of them the loop's thread has computed
    queued: float  # of them it has waited for a processor
    others_queued: float = 0.0  # of them the thread that waited longest did
    cores: tuple[int, ...] = ()  # that the loop's thread was on before and behind it, if known


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One call of a traced function."""

    start: float
    end: float
    name: str
    in_loop: bool
    processor: float = 0.0  # seconds of it that the thread has computed


class Observed(msgspec.Struct, frozen=True):
    """Everything that was noted."""

    beats: int
    pauses: list[Pause]
    spans: list[Span]
    missing: list[str]  # names of ``TRACED`` that are no more


class Tracer:
    """Times the calls of named functions."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.missing: list[str] = []
        self._loop_thread = threading.get_ident()
        self._collection_began = (0.0, 0.0)

    def install(self) -> None:
        """Put a clock around each function; before anything of the broker is built."""
        for module_name, class_name, names in TRACED:
            module = importlib.import_module(f"halfmq.{module_name}")
            owner = getattr(module, class_name, None) if class_name else module
            for name in names:
                function = vars(owner).get(name) if owner is not None else None
                told = f"{class_name or module_name}.{name}"
                if function is None:
                    self.missing.append(told)
                else:
                    setattr(owner, name, self._timed(told, function))

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: object, **named: object) -> object:
            began, computed = time.monotonic(), time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                self._note(name, began, computed)

        return timed

    def _note(self, name: str, began: float, computed: float) -> None:
        ended = time.monotonic()
        if ended - began >= KEPT_S:
            in_loop = threading.get_ident() == self._loop_thread
            computed = time.thread_time() - computed
            self.spans.append(Span(began, ended, name, in_loop, computed))

    def collected(self, phase: str, _info: object) -> None:
        """Time a garbage collection; one of ``gc.callbacks``."""
        if phase == "start":
            self._collection_began = time.monotonic(), time.thread_time()
        else:
            self._note("garbage collection", *self._collection_began)


class Queueing:
    """How long the threads of this process have been ready to run and had no processor."""

    def __init__(self) -> None:
        # ``os.pread`` would let go of the interpreter, and wait until it gets it back.
        self._pread = ctypes.PyDLL(None).pread
        self._text = ctypes.create_string_buffer(_SCHEDSTAT_SIZE)
        self._files: dict[int, int] = {}  # descriptors by thread
        self._looks = 0

    def look(self) -> dict[int, bytes]:
        """Return what the system says of each thread now; nothing where it does not."""
        if self._looks % _THREADS_EVERY == 0:
            self._find_threads()
        self._looks += 1
        said = {}
        for thread, fd in self._files.items():
            size = self._pread(fd, self._text, _SCHEDSTAT_SIZE, ctypes.c_long(0))
            said[thread] = self._text.raw[: max(size, 0)]
        return said

    def _find_threads(self) -> None:
        try:
            threads = {int(path.name) for path in Path("/proc/self/task").iterdir()}
        except OSError:
            return
        for gone in self._files.keys() - threads:
            os.close(self._files.pop(gone))
        for found in threads - self._files.keys():
            with contextlib.suppress(OSError):
                path = f"/proc/self/task/{found}/schedstat"
                self._files[found] = os.open(path, os.O_RDONLY)


def queued_s(before: dict[int, bytes], now: dict[int, bytes]) -> dict[int, float]:
    """Return the seconds for which each thread waited for a processor between two looks."""
    seconds = {}
    for thread in before.keys() & now.keys():
        first, last = before[thread].split(), now[thread].split()
        if len(first) > 1 and len(last) > 1:
            seconds[thread] = (int(last[1]) - int(first[1])) / 1e9
    return seconds


class Heartbeat:
    """Beats on the running loop and notes when it is late."""

    def __init__(self, call_later: Callable[..., object], *, stacks: bool) -> None:
        self.beats = 0
        self.pauses: list[Pause] = []
        self._call_later = call_later
        self._stacks = stacks
        self._queueing = Queueing()
        self._core = ctypes.PyDLL(None).sched_getcpu  # keeps the interpreter, as ``_pread``
        self._thread = threading.get_native_id()
        self._last = self._now()

    def start(self) -> None:
        """Begin, with the next turn of the loop."""
        self._last = self._now()
        self._call_later(BEAT_S, self._beat)

    def _now(self) -> tuple[float, float, dict[int, bytes], int]:
        return time.monotonic(), time.thread_time(), self._queueing.look(), self._core()

    def _beat(self) -> None:
        self.beats += 1
        before, now = self._last, self._now()
        late = now[0] - before[0] - BEAT_S
        if late >= KEPT_S:
            queued = queued_s(before[2], now[2])
            own = queued.pop(self._thread, 0.0)
            others = max(queued.values(), default=0.0)
            cores = tuple({before[3], now[3]})
            self.pauses.append(Pause(now[0], late, now[1] - before[1], own, others, cores))
        if self._stacks:
            faulthandler.dump_traceback_later(BEAT_S + STACKS_AFTER_S)
        self._last = now
        self._call_later(BEAT_S, self._beat)


def main(arguments: Sequence[str]) -> int:
    """Run the broker as its own command would."""
    at = arguments.index("--")
    report, *flags = arguments[:at]
    tracer = Tracer()
    tracer.install()
    gc.callbacks.append(tracer.collected)
    hearts: list[Heartbeat] = []

    def write() -> None:
        observed = Observed(
            beats=sum(heart.beats for heart in hearts),
            pauses=[pause for heart in hearts for pause in heart.pauses],
            spans=tracer.spans,
            missing=tracer.missing,
        )
        Path(report).write_bytes(msgspec.json.encode(observed))

    class WatchedBroker(Broker):
        """Whose loop has a heartbeat as soon as requests are answered."""

        async def start(self) -> RecoveryReport:
            found = await super().start()
            write()  # what a start is made of, for those who kill it now
            heart = Heartbeat(asyncio.get_running_loop().call_later, stacks="--stacks" in flags)
            hearts.append(heart)
            heart.start()
            return found

    with patch.object(cli, "Broker", WatchedBroker):
        code = cli.main(arguments[at + 1 :])
    faulthandler.cancel_dump_traceback_later()
    write()
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
