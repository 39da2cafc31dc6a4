"""The parameters that a seed draws for a run, and the records kept outside of all processes."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from halfmq.client import Decision
from halfmq.store.config import FlushMode

ROW: Final = "row"
TOMBSTONE: Final = "tombstone"
NEVER_S: Final = 1e9
HASH_SLOTS: Final = 64
"""Of an index file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Load, latencies and fault rates of a run."""

    flush_mode: FlushMode
    log_file_size: int
    queue_file_size: int
    timeout_ms: int
    interval_ms: int
    check_max: int
    producers: int
    consumers: int
    workers: int  # transactions under way at one time, of each producer
    transactions: int  # in all
    seconds: float  # of the phase in which things fail
    faults_per_s: float
    delay_s: float  # typical, of the network
    split: float  # share of writes that arrive in pieces
    sync_s: float  # of the disk, at most
    local_s: float  # of a local transaction, at most, as a rule
    impatience: float  # share of transactions that may be cancelled
    several: float  # share of transactions that have several messages
    skew_s: float  # how far the clients' clocks are off at first, at most
    clock_steps: int  # of a machine's wall clock, forward or back
    body_size: int  # bytes, at least
    giants: bool  # bodies that nearly fill a file of the log, or are too large for it
    fenced: bool  # the checker leaves a tombstone, as users should have it
    middle_box: bool
    operator: bool  # decides what is parked, all the time; else only in the end
    batches: float  # share of messages outside of transactions that come in batches
    refill_bytes: int  # of halves that a start reads to know them if they are sent again
    snapshot_bytes: int  # new bytes of the log after which a snapshot is taken
    power_cuts: int  # of the broker's machine, besides those that faults bring
    reserved_s: float  # age at which files of the log are deleted, unless there is a middle box

    @property
    def deletes(self) -> bool:
        """Whether files are deleted by age: a request repeated after that counts as new."""
        return not self.middle_box and self.reserved_s < NEVER_S

    @classmethod
    def drawn(cls, chance: random.Random) -> Scenario:
        """Draw a scenario; extreme values are as likely as usual ones."""
        return cls(
            flush_mode=chance.choice((FlushMode.SYNC_FLUSH, FlushMode.ASYNC_FLUSH)),
            log_file_size=chance.choice((8_192, 8_192, 16_384, 65_536)),
            queue_file_size=chance.choice((200, 1_000, 4_000)),
            timeout_ms=chance.choice((50, 300, 1_000, 6_000)),
            interval_ms=chance.choice((100, 500, 2_000)),
            check_max=chance.choice((2, 5, 15)),
            producers=chance.choice((1, 2, 2)),
            consumers=chance.choice((1, 1, 2)),
            workers=chance.choice((1, 3, 6)),
            transactions=chance.choice((10, 20, 40, 80)),
            seconds=chance.choice((2.0, 6.0, 15.0)),
            faults_per_s=chance.choice((0.2, 1.0, 3.0)),
            delay_s=chance.choice((0.0005, 0.005, 0.05)),
            split=chance.choice((0.0, 0.05, 0.5)),
            sync_s=chance.choice((0.0005, 0.01, 0.1)),
            local_s=chance.choice((0.05, 0.05, 0.5, 5.0)),
            impatience=chance.choice((0.0, 0.1, 0.5)),
            several=chance.choice((0.0, 0.3, 1.0)),
            skew_s=chance.choice((0.0, 0.0, 1.0, 86_400.0)),
            clock_steps=chance.choice((0, 0, 2, 5)),
            body_size=chance.choice((1, 300, 900, 1_800)),
            giants=chance.random() < 0.3,
            fenced=chance.random() < 0.85,
            middle_box=chance.random() < 0.2,
            operator=chance.random() < 0.5,
            batches=chance.choice((0.0, 0.5, 1.0)),
            refill_bytes=chance.choice((30_000, 100_000)),
            snapshot_bytes=chance.choice((3_000, 1 << 30)),
            power_cuts=chance.choice((2, 4, 6)),
            reserved_s=chance.choice((1.0, 4.0, 15.0, NEVER_S)),
        )


@dataclass(slots=True)
class Attempt:
    """One transaction as its producer saw it."""

    key: str
    bodies: list[str]  # of its messages: key/number
    half_ids: list[str] = field(default_factory=list)  # offset ids of the acknowledged halves
    ended: Decision | None = None
    accepted: bool = False  # the broker confirmed the decision
    delay_s: float = 0.0  # of the delivery, from the commit on
    row_at: float = 0.0  # when its row was written


@dataclass(slots=True)
class Records:
    """The events of a run, which no simulated process can lose."""

    ledger: dict[str, str] = field(default_factory=dict)  # by key: ROW or TOMBSTONE
    attempts: dict[str, Attempt] = field(default_factory=dict)
    delivered: Counter[str] = field(default_factory=Counter)  # by body
    half_ids: dict[str, set[str]] = field(default_factory=dict)  # that consumers saw, by body
    plain_sent: dict[str, None] = field(default_factory=dict)
    plain_due: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of delayed ones: when they were sent, and before when they must not be delivered."""
    plain_acknowledged: dict[str, None] = field(default_factory=dict)
    recall_tried: dict[str, None] = field(default_factory=dict)
    recalled: dict[str, int] = field(default_factory=dict)
    """Of messages whose recall was answered: the places where they waited, by key."""
    operator_rollbacks: dict[str, None] = field(default_factory=dict)
    resumed: dict[int, None] = field(default_factory=dict)
    """Offsets of parked halves that the operator has resumed."""
    events: Counter[str] = field(default_factory=Counter)
    archive: dict[int, bytes] = field(default_factory=dict)
    """Files of the log that were deleted by age, by offset: invariants are about all of it."""
    violations: list[str] = field(default_factory=list)
    power_cuts: int = 0
    clock_stepped_at: float = 0.0
    """When the clock of the broker's machine was set last."""
    started_at: float = 0.0
    """When the broker was ready last."""
    log_starts: list[int] = field(default_factory=list)
    """Where the log ended at each start of a broker, as far as power cuts have left that."""
