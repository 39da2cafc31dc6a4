"""Run the broker in this process and trace it: ``traced_broker REPORT -- ARGUMENTS``.

A probe measures the lag of the event loop: a timer fires every few milliseconds and notes how late
it is, and how much of that time the loop's thread computed. The rest of the time the thread waited
for the disk, the interpreter or a processor. Every pass of background work is timed, and so are
calls of named functions of store and broker, on the loop's thread or another (*spans*), in wall
time and in processor time of the thread.

The report is written when the broker is ready and when it stops. Times are those of
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

PROBE_INTERVAL_S: Final = 0.002
"""Seconds between two probes; the loop counts in milliseconds."""
KEPT_S: Final = 0.001
"""Shorter pauses and spans are not kept."""
BACKGROUND: Final = "background"
"""Prefix of the names of spans of background work; the ticker's or function's name follows."""

TRACED: Final = (
    ("store.log.commit_log", "CommitLog", ("_roll", "_make_room", "_create", "prepare_ahead")),
    ("store.files.mapped_file", "LogFile", ("__init__", "make_ready", "close")),
    ("store.log.flusher", "Flusher", ("_flush",)),
    ("store.files.worker", "Maintenance", ("_round",)),
    ("store.message_store", "MessageStore", ("_recover", "_flush_derived", "tick")),
    ("store.queue.consume_queue", "ConsumeQueue", ("grow", "entries", "sync", "begin_at")),
    ("store.index.index_file", "IndexFile", ("prepare", "append", "unmap", "close", "flush")),
    (
        "store.index.index_service",
        "IndexService",
        ("_append", "_create_file", "forget_before", "recover"),
    ),
    ("store.index.index_builder", "IndexBuilder", ("work", "recover")),
    ("store.deletion", "Deletion", ("work", "_round")),
    ("store.integrity.verification", "Integrity", ("work", "before_index")),
    ("store.recovery.recovery", "Recovery", ("run", "_scan_from", "_cut_log")),
    ("store.log.log_reader", "LogReader", ("read", "record_bytes", "read_cold")),
    ("broker.tables.table_file", "", ("save_table",)),
    ("broker.net.group_append", "GroupAppend", ("append_staged",)),
    ("broker.net.reply_release", "ReplyRelease", ("release",)),
    ("broker.net.connection", "ClientConnection", ("data_received",)),
    ("broker.transaction.transaction_service", "TransactionService", ("tick", "rebuild")),
    ("broker.transaction.replay.snapshot", "Snapshots", ("tick",)),
    ("broker.net.long_polling", "LongPolling", ("_run_slice",)),
    ("broker.net.peer_requests", "PeerRequestExpiry", ("_scan",)),
)
"""Module in ``halfmq``, class, functions to time. Names that no longer exist are reported."""
_BACKGROUND_FUNCTIONS: Final = frozenset({"LongPolling._run_slice", "PeerRequestExpiry._scan"})
"""Background work that no ticker calls."""


class Pause(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A probe that was late."""

    end: float
    seconds: float  # the lag
    processor: float  # seconds that the loop's thread computed since the probe before


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One call of a traced function."""

    start: float
    end: float
    name: str
    in_loop: bool
    processor: float  # seconds that the thread computed in it


class Trace(msgspec.Struct, frozen=True):
    """The report of one run."""

    probes: int
    pauses: list[Pause]
    spans: list[Span]
    missing: list[str]  # names of ``TRACED`` that no longer exist


class Tracer:
    """Times the calls of named functions."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.missing: list[str] = []
        self._loop_thread = threading.get_ident()
        self._collection_began = (0.0, 0.0)

    def install(self) -> None:
        """Wrap each function in a timer; call it before a part of the broker is created."""
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

    def on_collection(self, phase: str, _info: object) -> None:
        """Time a garbage collection; one of ``gc.callbacks``."""
        if phase == "start":
            self._collection_began = time.monotonic(), time.thread_time()
        else:
            self._note("garbage collection", *self._collection_began)


def _always(name: str) -> Callable[[Any], str]:
    return lambda _owner: name


def _ticker_name(ticker: Ticker) -> str:
    return f"{BACKGROUND} {ticker._name}"  # noqa: SLF001


class LagProbe:
    """Measures the lag of the running event loop."""

    def __init__(self, call_later: Callable[..., object]) -> None:
        self.count = 0
        self.pauses: list[Pause] = []
        self._call_later = call_later
        self._last = (0.0, 0.0)

    def start(self) -> None:
        """Start with the next iteration of the loop."""
        self._last = time.monotonic(), time.thread_time()
        self._call_later(PROBE_INTERVAL_S, self._probe)

    def _probe(self) -> None:
        self.count += 1
        before, now = self._last, (time.monotonic(), time.thread_time())
        late = now[0] - before[0] - PROBE_INTERVAL_S
        if late >= KEPT_S:
            self.pauses.append(Pause(now[0], late, now[1] - before[1]))
        self._last = now
        self._call_later(PROBE_INTERVAL_S, self._probe)


def main(arguments: Sequence[str]) -> int:
    """Run the broker as its own command would."""
    at = arguments.index("--")
    (report,) = arguments[:at]
    tracer = Tracer()
    tracer.install()
    gc.callbacks.append(tracer.on_collection)
    probes: list[LagProbe] = []

    def write() -> None:
        trace = Trace(
            probes=sum(probe.count for probe in probes),
            pauses=[pause for probe in probes for pause in probe.pauses],
            spans=tracer.spans,
            missing=tracer.missing,
        )
        Path(report).write_bytes(msgspec.json.encode(trace))

    class TracedBroker(Broker):
        """A broker whose loop is probed as soon as it answers requests."""

        async def start(self) -> RecoveryReport:
            found = await super().start()
            write()  # the spans of the start, for callers that kill the process now
            probe = LagProbe(asyncio.get_running_loop().call_later)
            probes.append(probe)
            probe.start()
            return found

    with patch.object(cli, "Broker", TracedBroker):
        code = cli.main(arguments[at + 1 :])
    write()
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
