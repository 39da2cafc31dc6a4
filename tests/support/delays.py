"""Waiting messages over a real store, which a test stops, kills and starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from halfmq.broker.delay.delivery import DelayService
from halfmq.broker.delay.levels import DEFAULT_LEVELS, DelayLevels, parse_delay_levels
from halfmq.broker.delay.timer_records import TimerRule
from halfmq.broker.loop.fetches import Fetch
from halfmq.remoting.recall_handle import RecallHandle
from halfmq.store.files.page_cache import NotInMemoryError
from halfmq.store.format.record import Record
from halfmq.store.log.append_request import AppendRequest
from halfmq.store.message_store import MessageStore
from tests.support.broker_doubles import START_MS
from tests.support.stores import append_durably, crash, draft, everything, flush, small_config

LEVELS = parse_delay_levels(DEFAULT_LEVELS)
DAY_MS = 86_400_000
MAX_DELAY_MS = 40 * DAY_MS
HALF_ID = "7F00000100002A9F000000000000004D"


class Clocks:
    """A wall clock and a monotonic one."""

    def __init__(self, now: int = START_MS) -> None:
        self.wall, self.monotonic = now, 1_000

    def wall_ms(self) -> int:
        return self.wall

    def monotonic_ms(self) -> int:
        return self.monotonic

    def advance(self, ms: int) -> None:
        self.wall += ms
        self.monotonic += ms


def fetch_nothing(missing: NotInMemoryError, _on_fetched: Callable[[bool], None]) -> None:
    """For tests in which everything is in memory."""
    raise missing


class Rig:
    """A store and the messages that wait in it."""

    def __init__(
        self,
        root: Path,
        clocks: Clocks | None = None,
        *,
        levels: tuple[int, ...] = LEVELS,
        fetch: Fetch = fetch_nothing,
        **settings: object,
    ) -> None:
        self.root, self.clocks = root, clocks or Clocks()
        self.levels = DelayLevels(levels)
        self.rule = TimerRule(MAX_DELAY_MS, now_ms=self.clocks.wall_ms)
        self._settings = {"delay_levels_ms": levels, **settings}
        self._fetch = fetch
        self._generation = 0
        self.gone: set[str] = set()  # topics that cannot be created
        self.queues = 4  # of each topic
        self.wakes = 0
        self.start()

    def start(self) -> None:
        self.store = MessageStore(
            small_config(self.root, **self._settings),
            now_ms=self.clocks.wall_ms,
            on_append=self._appended,
        )
        self.store.open()
        self.delays = delay_service(
            self.store,
            self.root,
            self.clocks,
            self.levels,
            fetch=self._fetch,
            queue_of=self._queue_of,
            wake=self._woken,
        )
        self.delays.load()

    def _appended(self, group: Sequence[AppendRequest]) -> None:
        for one in group:
            self.delays.on_stored(one)

    def _queue_of(self, topic: str, queue_id: int) -> int | None:
        return None if topic in self.gone else min(queue_id, self.queues - 1)

    def _woken(self) -> None:
        self.wakes += 1

    def kill(self, damaged: range = range(0)) -> None:
        """Start again from what a killed process leaves, with some bytes of its log damaged."""
        self._generation += 1
        copy = crash(self.root, self.root.with_name(f"killed-{self._generation}"))
        self.store.close(clean=False)
        self.root = copy
        with (copy / "commitlog" / f"{0:020}").open("r+b") as log:
            log.seek(damaged.start)
            log.write(b"?" * len(damaged))
        self.start()

    def stop(self) -> None:
        self.store.close()
        self.delays.persist()

    def restart(self) -> None:
        self.stop()
        self.start()

    def send(self, body: str, name: str, value: int) -> RecallHandle | None:
        """Send a message with a time of delivery; None if it is delivered at once."""
        message = draft("orders", 1, body.encode(), properties={"UNIQ_KEY": body, name: str(value)})
        waiting = self.rule.waiting(message, name, str(value))
        if waiting is None:
            append_durably(self.store, message)
            return None
        (stored,) = append_durably(self.store, waiting.request)
        return RecallHandle("orders", "broker-a", 0, body, stored.queue_offset)

    def delay(self, body: str, level: str | int, topic: str = "orders", queue_id: int = 1) -> None:
        """Send a message with a delay level."""
        append_durably(self.store, self.levels.delayed(delayed(body, level, topic, queue_id)))

    def commit(self, body: str, name: str, value: int) -> None:
        """Store the final message of a transaction with a delay, as its commit does."""
        append_durably(self.store, self.rule.after_commit(final(f"{name}\x01{value}", body)))

    def copy_forward(self, end: int) -> bool:
        """Store again what waits before an offset of the log, and let the index know."""
        copied = self.delays.copy_forward(end)
        flush(self.store)
        while self.store.tick():
            pass
        return copied

    def run(self) -> None:
        """Deliver all that is due."""
        while self.delays.tick() == 0:
            flush(self.store)
        flush(self.store)

    def after(self, ms: int) -> None:
        """Let time pass, and deliver all that is due then."""
        self.clocks.advance(ms)
        self.run()

    def records(self, topic: str = "orders") -> list[Record]:
        """Return what consumers get, in the order of the log."""
        return [one for one in everything(self.store) if one.topic == topic]

    def bodies(self, topic: str = "orders") -> list[str]:
        return [one.body.decode() for one in self.records(topic)]

    def delivered(self) -> dict[str, int]:
        """Return the store times of what consumers get, by body; each body comes once."""
        counts = Counter(self.bodies())
        assert set(counts.values()) <= {1}, counts
        return {one.body.decode(): one.store_timestamp for one in self.records()}


def delay_service(
    store: MessageStore,
    root: Path,
    clocks: Clocks,
    levels: DelayLevels,
    *,
    fetch: Fetch = fetch_nothing,
    queue_of: Callable[[str, int], int | None] = lambda _topic, queue_id: queue_id,
    wake: Callable[[], None] = lambda: None,
) -> DelayService:
    """Return the waiting messages of a store; they are not loaded yet."""
    return DelayService(
        store,
        levels,
        root / "config",
        scan=store.reader.scan,
        now_ms=clocks.wall_ms,
        monotonic_ms=clocks.monotonic_ms,
        fetch=fetch,
        queue_of=queue_of,
        wake=wake,
    )


def delayed(body: str, level: str | int, topic: str = "orders", queue_id: int = 1) -> AppendRequest:
    """Return a message that requests a delay level."""
    return draft(
        topic,
        queue_id,
        body.encode(),
        properties={"TAGS": "x", "DELAY": str(level), "KEYS": "k"},
        born_timestamp=START_MS - 5,
    )


def final(delay: str, body: str = "late") -> AppendRequest:
    """Return the final message of a half at offset 77 that requests a delay."""
    properties = f"TAGS\x01x\x02{delay}\x02TRANSACTION_HALF_ID\x01{HALF_ID}\x02"
    made = draft("orders", 3, body.encode(), properties=properties.encode(), sys_flag=0x8)
    made.prepared_transaction_offset = 77
    return made


def at(ms: int) -> tuple[str, int]:
    """Return a time of delivery after the start of a test."""
    return "TIMER_DELIVER_MS", START_MS + ms


def after(ms: int) -> tuple[str, int]:
    """Return a delay."""
    return "TIMER_DELAY_MS", ms
