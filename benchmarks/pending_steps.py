"""The steps of ``benchmarks.pending``, each in a process of its own so that each has a fresh heap.

A step prints one JSON object. Steps that leave a store behind end with SIGKILL, for what is
measured next is a start after that.
"""

import gc
import json
import os
import signal
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Final, cast

from halfmq.broker.config import TransactionConfig
from halfmq.broker.ports import Connection
from halfmq.broker.transaction.deciding import DecisionRequest, PlannedDecision
from halfmq.broker.transaction.destination import Destinations
from halfmq.broker.transaction.half import half_request
from halfmq.broker.transaction.state.state_machine import TransactionEvent
from halfmq.broker.transaction.transaction_service import TransactionService
from halfmq.store.config import FlushMode, StoreConfig
from halfmq.store.files.page_cache import NotInMemoryError
from halfmq.store.format.ids import pack_host
from halfmq.store.format.properties import encode_properties
from halfmq.store.log.append_request import AppendRequest
from halfmq.store.message_store import MessageStore

GROUP: Final = "benchmark-producers"
SNAPSHOT_FILE: Final = "config/halfmqTransactions"
_HOST: Final = pack_host("127.0.0.1", 10911)
_APPENDED_AT_ONCE: Final = 200
_SNAPSHOT_SECONDS: Final = 300.0
_CONFIG: Final = TransactionConfig(
    timeout_ms=3_600_000,  # questions are another benchmark's business
    check_interval_ms=3_600_000,
)


class Nobody:
    """A producer group without members, and a connection that is gone."""

    name = "nobody"
    subject: object = None
    closed = True
    writable = False
    acknowledges = False

    def producers_of(self, _group: str) -> list[Connection]:
        return []

    def has_left(self, _group: str, _connection: Connection) -> bool:
        return False

    def send_request(self, _code: int, _header: object, _body: bytes = b"") -> bool:
        return False

    def ask(self, *_arguments: object) -> bool:
        return False


def now_ms() -> int:
    """The broker's clock."""
    return time.time_ns() // 1_000_000


def anonymous_bytes(pid: int | None = None) -> int:
    """Memory of a process that is no file's: pages of the log count as the kernel's cache."""
    status = Path(f"/proc/{pid or 'self'}/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def processor_seconds(pid: int) -> float:
    """User and system time of a process so far, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return sum(int(ticks) for ticks in fields[11:13]) / os.sysconf("SC_CLK_TCK")


def message(number: int, body: bytes) -> tuple[AppendRequest, str]:
    """A transactional message as a producer sends it, and its unique key."""
    key = f"7F000001{number:024X}"
    properties = {"UNIQ_KEY": key, "TRAN_MSG": "true", "PGROUP": GROUP, "KEYS": f"o-{number}"}
    return AppendRequest(
        topic="orders",
        queue_id=number % 4,
        body=body,
        properties=encode_properties(properties),
        born_timestamp=now_ms(),
        born_host=_HOST,
        store_host=_HOST,
        tags_code=0,
    ), key


def fetch_at_once(missing: NotInMemoryError, on_fetched: Callable[[bool], None]) -> None:
    """Wait for what is not in memory: there is no event loop that must not."""
    missing.fetch()
    on_fetched(True)


class AsPrepared(Destinations):
    """Stores messages where they were prepared for."""

    def __init__(self) -> None:
        pass  # no topics

    def resolve(self, final: AppendRequest) -> AppendRequest:
        """Return it unchanged."""
        return final

    def ensure_parked_topic(self) -> None:
        """Do nothing: the store needs no topics."""


class Bench:
    """A store and the transactions on it, as the broker builds them."""

    def __init__(self, root: Path) -> None:
        config = StoreConfig(root=root, flush_mode=FlushMode.ASYNC_FLUSH)
        self.store = MessageStore(config, now_ms=now_ms)
        self.store.open()
        self.service = TransactionService(
            self.store,
            Nobody(),
            AsPrepared(),
            _CONFIG,
            broker_name="broker-a",
            store_host=_HOST,
            now_ms=now_ms,
            monotonic_ms=lambda: time.monotonic_ns() // 1_000_000,
            snapshot_path=root / SNAPSHOT_FILE,
            record_size_max=config.record_size_max,
            fetch=fetch_at_once,
            snapshot_log_bytes=0,  # one is due at once, however small the log
        )

    def fill(self, first: int, count: int, body: bytes) -> None:
        """Append halves that the service does not hear of."""
        for start in range(first, first + count, _APPENDED_AT_ONCE):
            numbers = range(start, min(start + _APPENDED_AT_ONCE, first + count))
            self.store.append([half_request(*message(number, body)) for number in numbers])
            self.store.tick()
        self.settle()

    def settle(self) -> None:
        """Wait until everything is on disk."""
        end = self.store.write_offset
        while self.store.durable_offset < end:
            self.store.request_flush()
            self.store.tick()
            time.sleep(0.01)


def fill(root: Path, count: int, body_size: int) -> dict[str, float]:
    """Write a log of undecided halves and nothing else."""
    bench = Bench(root)
    began = time.perf_counter()
    bench.fill(0, count, b"x" * body_size)
    return {"seconds": time.perf_counter() - began, "log_bytes": bench.store.write_offset}


def snapshot(root: Path, behind: int, body_size: int) -> dict[str, float]:
    """Take a snapshot while the loop would run; then write on, half of it decided."""
    bench = Bench(root)
    service = bench.service
    service.rebuild()
    gc.collect()
    gc.freeze()  # as the broker does once it has started
    count = service.metrics()["pending"]
    slices, began = [], time.perf_counter()
    while not service.metrics()["snapshots_taken"]:
        assert time.perf_counter() - began < _SNAPSHOT_SECONDS, "no snapshot is taken"
        slice_began = time.thread_time()  # what others do to the machine does not count
        wait = service.tick()
        slices.append(time.thread_time() - slice_began)
        time.sleep(min(wait, 0.01))
    taken = time.perf_counter() - began
    body = b"x" * body_size
    gone = cast("Connection", Nobody())
    for number in range(count, count + behind):
        (half,) = service.prepares.prepare_group([message(number, body)], GROUP, gone)
        if number % 2:
            planned = service.decisions.plan(
                DecisionRequest(
                    half.physical_offset, half.queue_offset, GROUP, TransactionEvent.ROLLBACK
                )
            )
            assert isinstance(planned, PlannedDecision)
            service.decisions.carry_out(planned)
        bench.store.tick()
    bench.settle()
    return {
        "seconds": taken,
        "mean_slice_ms": sum(slices) / len(slices) * 1_000,
        "longest_slice_ms": max(slices) * 1_000,
        "file_bytes": (root / SNAPSHOT_FILE).stat().st_size,
    }


def heap(root: Path, count: int, body_size: int) -> dict[str, float]:
    """Count the bytes of the Python heap after a start from the log."""
    bench = Bench(root)
    bench.fill(0, count, b"x" * body_size)
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    bench.service.rebuild()
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    return {"bytes": after - before, "pending": bench.service.metrics()["pending"]}


STEPS: Final[dict[str, Callable[[Path, int, int], dict[str, float]]]] = {
    "fill": fill,
    "snapshot": snapshot,
    "heap": heap,
}


def main(name: str, root: str, count: str, body_size: str) -> None:
    """Run one step, print its figures, and die without closing anything."""
    print(json.dumps(STEPS[name](Path(root), int(count), int(body_size))), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
