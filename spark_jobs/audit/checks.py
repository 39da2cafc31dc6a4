"""What an audit has compared and what it noticed, beside the anomalies."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Final, NamedTuple

from ..log.segments import LogExtent
from ..log.store_files import StoreFiles
from ..source.options import DELAY_LEVELS_MS
from .digests import digest_of
from .rules.model import CHECKS_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """What an audit checks, and its limits."""

    crc: bool = True  # read every body
    queues: bool = True  # compare the consume queues with the log
    pending_age: timedelta | None = None  # undecided for longer is an anomaly; None: never
    as_of_ms: int | None = None  # when ages are counted; None: when the last record was stored
    delay_levels: tuple[int, ...] = DELAY_LEVELS_MS  # ms, as in the broker's messageDelayLevel
    checks_max: int = CHECKS_MAX  # transactionCheckMax of the RocketMQ broker that wrote the log

    @property
    def levels(self) -> str:
        """The delay levels as an option of the sources."""
        return " ".join(f"{level}ms" for level in self.delay_levels)


DEFAULT_CHECKS: Final = Checks()


class Check(NamedTuple):
    """One thing that an audit can look at."""

    what: str  # crc, queues, digests or tail
    checked: bool
    why: str | None = None  # it was not; or what limits it


class Remark(NamedTuple):
    """Something worth knowing that is no anomaly: it leaves the exit code alone."""

    kind: str  # clock_step or deleted_topic
    offsets: list[int]  # physical; may be empty
    detail: str


def checks_of(extent: LogExtent, store: StoreFiles, *, crc: bool, queues: bool) -> list[Check]:
    """List what is checked and what is not; ``crc`` and ``queues`` were asked for or not."""
    no_queues = no_tail = None
    if not queues:
        no_queues = "was not asked for"
    elif store.consume_queues is None:
        no_queues = (
            "there is no folder consumequeue: whether consumers get all messages is not known"
        )
    if not store.was_closed:
        no_tail = "no orderly stop is known: entries at the end of consume queues may still come"
    return [
        Check("crc", crc, None if crc else "was not asked for: bodies were not read"),
        Check("queues", no_queues is None, no_queues),
        _digests(extent, store),
        Check("tail", no_tail is None, no_tail),
    ]


def _digests(extent: LogExtent, store: StoreFiles) -> Check:
    segments = extent.segments if store.is_root else ()
    count = sum(digest_of(segment) is not None for segment in segments)
    if not count:
        none = "there are none: a flipped bit in properties or a topic goes unseen"
        return Check("digests", checked=False, why=none)
    why = None if count == len(segments) else f"{count} of {len(segments)} segments have one"
    return Check("digests", checked=True, why=why)
