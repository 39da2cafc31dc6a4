"""The real broker in this process, its loop watched: ``REPORT -- ARGUMENTS``.

A timer of the loop comes back every few milliseconds and notes how late it is, and how much of that
time the loop's thread computed. The rest it waited: for the disk, for the interpreter, or for a
processor. Every pass of background work is timed, and so are named parts of store and
broker, in the loop or beside it (*spans*), each by the wall and by its thread's processor time.

The report is written when the broker serves, and again when it stops. Times are those of
``time.monotonic``, which all processes of a machine share.
"""

import asyncio
import functools
import gc
import importlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import msgspec

from halfmq.broker import cli
from halfmq.broker.loop.ticker import Ticker
from halfmq.broker.service import Broker
from halfmq.store.recovery.recovery import RecoveryReport

BEAT_S: Final = 0.002
"""Seconds between two beats; the loop counts in milliseconds."""
KEPT_S: Final = 0.001
"""Shorter pauses and spans are not kept."""
BACKGROUND: Final = "background"
"""How names of spans of background work begin; that of the ticker, or the function, follows."""

TRACED: Final = (
    ("store.log.commit_log", "CommitLog", ("_roll", "_look_up", "_create", "prepare_ahead")),
    ("store.files.mapped_file", "LogFile", ("__init__", "make_ready", "close")),
    ("store.log.group_commit", "Flusher", ("_flush",)),
    ("store.files.maintenance", "Maintenance", ("_round",)),
    ("store.message_store", "MessageStore", ("_recover", "_flush_derived", "tick", "read_cold")),
    ("store.queue.consume_queue", "ConsumeQueue", ("grow", "entries", "sync", "begin_at")),
    ("store.index.index_file", "IndexFile", ("prepare", "append", "unmap", "close", "flush")),
    (
        "store.index.index_file",
        "IndexService",
        ("_append", "_create_file", "forget_before", "recover"),
    ),
    ("store.index.index_builder", "IndexBuilder", ("work", "recover")),
    ("store.retention", "Retention", ("work", "_round")),
    ("store.integrity.verification", "Integrity", ("work", "before_index")),
    ("store.recovery.recovery", "Recovery", ("run", "_scan_from", "_cut_log")),
    ("store.log.log_reader", "LogReader", ("read", "record_bytes")),
    ("broker.tables.table_file", "", ("save_table",)),
    ("broker.net.group_append", "GroupAppend", ("append_staged",)),
    ("broker.net.reply_release", "ReplyRelease", ("release",)),
    ("broker.net.server", "ClientConnection", ("data_received",)),
    ("broker.transaction.service", "TransactionService", ("tick", "rebuild")),
    ("broker.transaction.replay.snapshot", "Snapshots", ("tick",)),
    ("broker.net.long_polling", "LongPolling", ("_look",)),
    ("broker.net.peer_requests", "PeerRequestExpiry", ("_scan",)),
)
"""Module below ``halfmq``, class, and what of it is timed. A name that is gone is passed over."""
_BACKGROUND_FUNCTIONS: Final = frozenset({"LongPolling._look", "PeerRequestExpiry._scan"})
"""Background work that no ticker calls."""


class Pause(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A beat that came late."""

    end: float
    seconds: float  # by which it was late
    processor: float  # that the loop's thread has computed since the beat before


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One call of a traced function."""

    start: float
    end: float
    name: str
    in_loop: bool
    processor: float  # seconds of it that the thread has computed


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
        tick = Ticker._tick  # noqa: SLF001 - all housekeeping of the broker goes through it
        Ticker._tick = self._timed(_ticker_name, tick)  # type: ignore[method-assign]  # noqa: SLF001
        for module_name, class_name, names in TRACED:
            module = importlib.import_module(f"halfmq.{module_name}")
            owner = getattr(module, class_name, None) if class_name else module
            for name in names:
                function = vars(owner).get(name) if owner is not None else None
                told = f"{class_name or module_name}.{name}"
                if told in _BACKGROUND_FUNCTIONS:
                    told = f"{BACKGROUND} {told}"
                if function is None:
                    self.missing.append(told)
                else:
                    setattr(owner, name, self._timed(_always(told), function))

    def _timed(
        self, name: Callable[[Any], str], function: Callable[..., Any]
    ) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            began, computed = time.monotonic(), time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                self._note(name(arguments[0] if arguments else None), began, computed)

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


def _always(name: str) -> Callable[[Any], str]:
    return lambda _owner: name


def _ticker_name(ticker: Ticker) -> str:
    return f"{BACKGROUND} {ticker._name}"  # noqa: SLF001


class Heartbeat:
    """Beats on the running loop and notes when it is late."""

    def __init__(self, call_later: Callable[..., object]) -> None:
        self.beats = 0
        self.pauses: list[Pause] = []
        self._call_later = call_later
        self._last = (0.0, 0.0)

    def start(self) -> None:
        """Begin, with the next turn of the loop."""
        self._last = time.monotonic(), time.thread_time()
        self._call_later(BEAT_S, self._beat)

    def _beat(self) -> None:
        self.beats += 1
        before, now = self._last, (time.monotonic(), time.thread_time())
        late = now[0] - before[0] - BEAT_S
        if late >= KEPT_S:
            self.pauses.append(Pause(now[0], late, now[1] - before[1]))
        self._last = now
        self._call_later(BEAT_S, self._beat)


def main(arguments: Sequence[str]) -> int:
    """Run the broker as its own command would."""
    at = arguments.index("--")
    (report,) = arguments[:at]
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
            heart = Heartbeat(asyncio.get_running_loop().call_later)
            hearts.append(heart)
            heart.start()
            return found

    with patch.object(cli, "Broker", WatchedBroker):
        code = cli.main(arguments[at + 1 :])
    write()
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
