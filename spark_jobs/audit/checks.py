"""What an audit has compared and what it noticed, beside the anomalies; no Spark in here."""

from typing import NamedTuple

from ..log.digests import digest_of
from ..log.segments import LogExtent
from ..log.store_files import StoreFiles


class Check(NamedTuple):
    """One thing that an audit can look at."""

    what: str  # crc, queues, digests or tail
    checked: bool
    why: str | None = None  # it was not; or what limits it


class Remark(NamedTuple):
    """Something worth knowing that is no anomaly: it leaves the exit code alone."""

    kind: str  # clock_step
    offsets: list[int]  # physical
    detail: str


def checks_of(extent: LogExtent, store: StoreFiles, *, crc: bool, queues: bool) -> list[Check]:
    """Say what of a log is compared with what; ``crc`` and ``queues`` say what was asked for."""
    return [
        Check("crc", crc, None if crc else "was not asked for: bodies were not read"),
        _queues(store, asked=queues),
        _digests(extent),
        _tail(store),
    ]


def _queues(store: StoreFiles, *, asked: bool) -> Check:
    if not asked:
        return Check("queues", checked=False, why="was not asked for")
    if store.consume_queues is None:
        why = "there is no folder consumequeue: whether consumers get all messages is not known"
        return Check("queues", checked=False, why=why)
    return Check("queues", checked=True)


def _digests(extent: LogExtent) -> Check:
    count = sum(digest_of(segment) is not None for segment in extent.segments)
    if not count:
        none = "there are none: a flipped bit in properties or a topic goes unseen"
        return Check("digests", checked=False, why=none)
    all_of_them = len(extent.segments)
    why = None if count == all_of_them else f"{count} of {all_of_them} segments have one"
    return Check("digests", checked=True, why=why)


def _tail(store: StoreFiles) -> Check:
    if store.was_closed:
        return Check("tail", checked=True)
    why = "no orderly stop is known: entries at the end of consume queues may still come"
    return Check("tail", checked=False, why=why)
