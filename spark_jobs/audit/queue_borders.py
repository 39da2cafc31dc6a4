"""What the splits of a log say about queues, put side by side; runs on the driver."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from halfmq.store.format.topics import LIGHT_QUEUE_PREFIX, is_system_topic

from .judge import Kind, LogBounds
from .queues import (
    FAULTS_PER_QUEUE_MAX,
    Covered,
    Edge,
    QueueFault,
    QueueFiles,
    is_written,
    out_of_order,
)


class Log(NamedTuple):
    """What is known of the log as a whole."""

    bounds: LogBounds
    end_offset: int
    was_closed: bool  # its broker stopped in order, so that the consume queues are complete


def across_splits(
    edges: Iterable[Edge], log: Log, files: QueueFiles | None
) -> Iterator[QueueFault]:
    """Check every queue over the borders of splits, and its consume queue beside the log.

    While a broker runs, and after a crash, the consume queues may lag behind the log or be ahead
    of it; its next start makes that good.
    """
    by_queue = _by_queue(edges)
    for runs in by_queue.values():
        for run in runs:
            yield from _disorder(run)
            yield from _gaps(run, log.bounds)
    if files is None:
        return
    for (topic, _), runs in by_queue.items():
        if files.has(topic):
            yield from _not_listed(runs[-1], log)
    for topic, queue in files.queues():
        if files.has(topic) and not topic.startswith(LIGHT_QUEUE_PREFIX):
            known = by_queue.get((topic, queue), [])
            yield from _lead_nowhere(topic, queue, known, files, log)


def restarts(edges: Iterable[Edge]) -> dict[tuple[str, int], int]:
    """Say of queues that began again where, in the log, they did so for the last time."""
    return {
        queue: runs[-1][0].first_at for queue, runs in _by_queue(edges).items() if len(runs) > 1
    }


def _by_queue(edges: Iterable[Edge]) -> dict[tuple[str, int], list[list[Edge]]]:
    """Put together what is about one run of a queue; all in log order."""
    by_queue: dict[tuple[str, int], list[list[Edge]]] = defaultdict(list)
    for edge in sorted(edges, key=lambda edge: edge.first_at):
        runs = by_queue[edge.topic, edge.queue]
        if edge.restarts or not runs or edge.first_slot == 0:
            runs.append([])
        runs[-1].append(edge)
    return by_queue


def _disorder(run: Sequence[Edge]) -> Iterator[QueueFault]:
    for before, after in pairwise(run):
        if after.first_slot < before.end_slot:
            topic, queue, last = before.topic, before.queue, before.end_slot - 1
            yield out_of_order(topic, queue, before.last_at, last, after.first_at, after.first_slot)


def _gaps(run: Sequence[Edge], bounds: LogBounds) -> Iterator[QueueFault]:
    covered = sorted(Covered(*part) for edge in run for part in edge.covered)
    before = covered[0]
    for after in covered[1:]:
        around = sorted((before.last_at, after.first_at))
        if after.first > before.end and not bounds.hides(*around):
            topic, queue = run[0].topic, run[0].queue
            detail = (
                f"queue {queue} of {topic} has no record with the offsets from {before.end}"
                f" to {after.first - 1}"
            )
            yield QueueFault(Kind.QUEUE_GAP, topic, queue, around, detail)
        if after.end > before.end:
            before = after


def _not_listed(run: Sequence[Edge], log: Log) -> Iterator[QueueFault]:
    """Find records without an entry, in front of others that have one or for good."""
    listed = max(edge.listed for edge in run)
    for edge in run:
        for first, last, at in edge.missing:
            if log.was_closed or last < listed:
                detail = (
                    f"queue {edge.queue} of {edge.topic} has no entries from {first} to {last}:"
                    " consumers do not get these messages"
                )
                yield QueueFault(Kind.MISSING_QUEUE_ENTRY, edge.topic, edge.queue, [at], detail)


def _lead_nowhere(
    topic: str, queue: int, runs: Sequence[Sequence[Edge]], files: QueueFiles, log: Log
) -> Iterator[QueueFault]:
    """Find entries beyond the records of a queue, before its first and behind its last."""
    covered = [Covered(*part) for edge in runs[-1] for part in edge.covered] if runs else []
    low = min((part.first for part in covered), default=0)
    high = max((part.end for part in covered), default=0)
    left = FAULTS_PER_QUEUE_MAX
    for first, content in files.all(topic, queue):
        slots = first + np.arange(len(content))
        named = content["physical_offset"]
        candidates = is_written(content) & ((slots < low) | (slots >= high))
        candidates &= (named < 0) | (named >= log.bounds.first_offset)
        for place in np.flatnonzero(candidates):
            at, size = int(content["physical_offset"][place]), int(content["size"][place])
            behind = at >= log.end_offset
            if (behind and not log.was_closed) or (not behind and log.bounds.hides(at, at + size)):
                continue
            left -= 1
            if left < 0:
                return
            detail = (
                f"entry {slots[place]} of queue {queue} of {topic} says offset {at}, size {size};"
                " the log has no such record"
            )
            yield QueueFault(Kind.WRONG_QUEUE_ENTRY, topic, queue, [at], detail)


# --- topics


def unknown_queues(edges: Iterable[Edge], known: Mapping[str, int]) -> Iterator[QueueFault]:
    """Find records in topics or queues that the broker does not know: nobody reads them."""
    for (topic, queue), runs in _by_queue(edges).items():
        seen = [edge for run in runs for edge in run]
        count = known.get(topic)
        if is_system_topic(topic) or (count is not None and queue < count):
            continue
        has = "is not known" if count is None else f"has {count} queues"
        records = sum(edge.records for edge in seen)
        detail = f"{records} records in queue {queue} of {topic}, but the topic {has}"
        offsets = sorted({seen[0].first_at, seen[-1].last_at})
        yield QueueFault(Kind.UNKNOWN_QUEUE, topic, queue, offsets, detail)
