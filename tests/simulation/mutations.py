"""``python -m tests.simulation.mutations``: what the simulation finds if a protection is missing.

Each mutation removes one protection from the code, for its own process only, and runs seeds until
an invariant is violated. If no seed found it, nothing would prove that the protection works.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from typing import Any, Final, NamedTuple
from unittest import mock

from halfmq.broker.delay import find_waiting
from halfmq.broker.delay.done_file import DoneFile
from halfmq.broker.delay.waiting import DueTimes
from halfmq.broker.disk.retention_policy import RetentionPolicy
from halfmq.broker.handlers.messages import batch_units, send, sent_properties
from halfmq.broker.net.connection import ClientConnection
from halfmq.broker.pop.engine import PopEngine
from halfmq.broker.pop.order import OrderLocks
from halfmq.broker.transaction import prepares
from halfmq.broker.transaction.checks.checker import Checker
from halfmq.broker.transaction.deciding import Decisions
from halfmq.broker.transaction.deduplication import DuplicateFinder
from halfmq.broker.transaction.half_reader import HalfReader
from halfmq.broker.transaction.half_records import committed
from halfmq.broker.transaction.replay import snapshot_file
from halfmq.broker.transaction.replay.log_replay import LogReplay
from halfmq.broker.transaction.replay.snapshot import Snapshots
from halfmq.broker.transaction.state.state_machine import TransactionEvent
from halfmq.client import Decision, TransactionProducer, message
from halfmq.store.deletion import Deletion
from halfmq.store.files.page_cache import NotInMemoryError
from halfmq.store.format.properties import get_property
from halfmq.store.format.topics import HALF_TOPIC
from halfmq.store.log import log_scan
from halfmq.store.log.flusher import Flusher
from halfmq.store.queue.consume_queue import ConsumeQueue
from halfmq.store.recovery import recovery
from halfmq.store.recovery.recovery import Recovery

from .__main__ import fix_hashes
from .ledger import Ledger
from .scenario import ROW
from .world import run

SEEDS_MAX: Final = 3_000

MISTAKES: Final = ("AssertionError(", "AttributeError(", "NameError(", "TypeError(")
"""What a replacement raises that no longer fits the code: a violation with one proves nothing."""


class Patch(NamedTuple):
    """The replacement of one attribute."""

    owner: Any
    attribute: str
    without: Callable[[Any], Any]  # the original → its replacement


class Mutation(NamedTuple):
    """A protection, and how to remove it."""

    missing: str
    patches: tuple[Patch, ...]
    first_seed: int = 0
    """Where to begin: a seed that noticed it. Others do when the broker has changed since."""


def _returns(result: object = None) -> Callable[[Any], Any]:
    return lambda _original: lambda *_args, **_named: result


def _reply_at_once(*modules: str) -> Callable[[Any], Any]:
    """Reply at once where a handler of these modules would wait for the disk."""

    def without(original: Any) -> Any:
        def respond(self: Any, request: Any, reply: bytes, durable_at: int = 0) -> None:
            caller = sys._getframe(1).f_globals["__name__"].rpartition(".")[2]
            if caller in modules:
                original(self, request, reply)
                self._shared.release.request_flush()
            else:
                original(self, request, reply, durable_at)

        return respond

    return without


def _flush_reports_later_writes(_original: Any) -> Any:
    def flush(self: Any) -> None:
        start = self.durable_offset
        if start == self._log.write_offset:
            return
        end = self._log.write_offset
        for base in range(self._files.base_of(start), end, self._files.file_size):
            self._sync_file(base)
        self.durable_timestamp = self._log.last_store_timestamp
        self.durable_offset = self._log.write_offset  # more than was there when it began
        self._notify(self._on_durable, self.durable_offset)

    return flush


def _opposite_is_accepted(original: Any) -> Any:
    def answer(self: Any, offset: int, half: Any, event: TransactionEvent) -> Any:
        decision = self._lookup.find(self._table.transaction_of(offset), half)
        if (
            event is TransactionEvent.COMMIT
            and decision is not None
            and decision.state.name == "ROLLED_BACK"
        ):
            self._append((committed(self._final_at(offset)),))
        return original(self, offset, half, event)

    return answer


def _planned_is_forgotten(original: Any) -> Any:
    def plan(self: Any, *args: Any, **named: Any) -> Any:
        self._planned.clear()
        return original(self, *args, **named)

    return plan


def _acknowledgements_are_forgotten(original: Any) -> Any:
    def replay(self: Any, said: Any, *place: int) -> None:
        if said.is_checkpoint:
            original(self, said, *place)

    return replay


def _locks_do_not_end(_original: Any) -> Any:
    def is_blocked(self: Any, queue: Any, attempt_id: str | None, _now_ms: int) -> bool:
        held = self.get(queue)
        return held is not None and held.lock.attempt_id != attempt_id

    return is_blocked


def _any_handle_counts(_original: Any) -> Any:
    return lambda self, queue, handle: self._in_flight.get(queue, handle.offset) is not None


def _any_log_end(original: Any) -> Any:
    return lambda header, rows, log: original(header, rows._replace(log_end=0), log)


def _not_durable(original: Any) -> Any:
    class Log:
        def __init__(self, log: Any) -> None:
            self._log = log

        def __getattr__(self, name: str) -> Any:
            return getattr(self._log, "write_offset" if name == "durable_offset" else name)

    def take(self: Any, *, background: bool) -> Any:
        if not isinstance(self._log, Log):
            self._log = Log(self._log)
        return original(self, background=background)

    return take


def _newest_file(_original: Any) -> Any:
    return lambda files, _reader, _checkpoint: files.bases[-1] if files.bases else 0


def _name_is_not_synced(original: Any) -> Any:
    def create(self: Any, base: int) -> None:
        original(self, base)
        self._names_durable = True

    return create


def _failure_is_forgotten(_original: Any) -> Any:
    def one_round(self: Any, _woken: bool) -> float:
        with contextlib.suppress(OSError):
            self._flush()
        return float(self._interval)

    return one_round


def _halves_do_not_count(_original: Any) -> Any:
    return lambda self, wanted: self._log.deletion.delete_before(wanted)


def _deletion_does_not_wait(_original: Any) -> Any:
    def delete_before(self: Any, end: int) -> None:
        self._requests[1:] = [(end, 0)]  # as if nothing had been written

    return delete_before


def _all_or_none_are_read(original: Any) -> Any:
    def newest(self: Any, count_max: int, bytes_max: int) -> Any:
        log = self._log
        first, end = log.queues.bounds(HALF_TOPIC, 0)
        start = max(first, end - 256)
        found = log.queues.get(HALF_TOPIC, 0, start, max_count=256, max_bytes=1 << 62)
        if found.size <= bytes_max:
            yield from original(self, count_max, bytes_max)

    return newest


def _cold_is_unknown(original: Any) -> Any:
    def find(self: Any, *args: Any) -> Any:
        try:
            return original(self, *args)
        except NotInMemoryError:
            return None

    return find


def _block_decides(_original: Any) -> Any:
    """Roll back if a block ends by an exception, without asking the checker."""

    def check_and_finish(self: Any, transaction: Any) -> Any:
        return self.finish(transaction, Decision.ROLLBACK)

    return check_and_finish


def _wall_ms() -> int:
    return int(time.time() * 1_000)


def _first_by_timestamp(_original: Any) -> Any:
    def schedule_first(self: Any, entry: Any) -> None:
        wait_ms = self._first_wait_ms(entry) + entry.store_timestamp - _wall_ms()
        self._schedule(entry, self._monotonic_ms() + wait_ms)

    return schedule_first


def _age_may_be_negative(_original: Any) -> Any:
    def schedule_again(self: Any, entry: Any, age_ms: int, *, grace_ms: int = 0) -> None:
        wait_ms = max(self._first_wait_ms(entry) - age_ms, grace_ms)
        self._schedule(entry, self._monotonic_ms() + wait_ms)

    return schedule_again


def _by_wall_clock(_original: Any) -> Any:
    """Count delays by the wall clock."""
    return lambda self, wait_ms, place: self.add_at(_wall_ms() + wait_ms, place)


def _done_before_durable(original: Any) -> Any:
    """Save at once what was delivered, though its record is not on disk."""

    def mark(self: Any, places: Any, state: int, log_start: int, _log_end: int) -> None:
        original(self, places, state, log_start, 0)

    return mark


def _property_is_trusted(original: Any) -> Any:
    def half_message_id(record: Any) -> Any:
        value = get_property(record.properties, b"TRANSACTION_HALF_ID")
        return original(record) if value is None else value.decode()

    return half_message_id


def _checks_are_not_counted(original: Any) -> Any:
    def tick(self: Any, *args: Any) -> Any:
        self._counted = lambda: 0
        return original(self, *args)

    return tick


def _no_tombstone(original: Any) -> Any:
    def fence(self: Any, key: str) -> Any:
        records = self._world.records
        known = key in records.ledger
        decision = original(self, key)
        if not known and records.ledger.get(key) != ROW:
            records.ledger.pop(key, None)  # none is there if this scenario has no fence
        return decision

    return fence


_REPLY: Final = "respond"
MUTATIONS: Final = {
    "decisions": Mutation(
        "a decision is durable before it is confirmed",
        (Patch(ClientConnection, _REPLY, _reply_at_once("end", "end_batch")),),
        first_seed=34,
    ),
    "halves": Mutation(
        "a half is durable before it is acknowledged",
        (Patch(ClientConnection, _REPLY, _reply_at_once("send", "staged", "prepare")),),
    ),
    "tail": Mutation(
        "a start cuts what is torn off the log", (Patch(Recovery, "_cut_log", _returns(0)),)
    ),
    "replay": Mutation("a final message is a decision", (Patch(LogReplay, "_final", _returns()),)),
    "opposite": Mutation(
        "the opposite of a decision is refused",
        (Patch(Decisions, "_answer_decided", _opposite_is_accepted),),
    ),
    "snapshot": Mutation(
        "a snapshot is for a log that is durable up to its end",
        (
            Patch(snapshot_file, "_mismatch", _any_log_end),
            Patch(Snapshots, "_take", _not_durable),
        ),
    ),
    "finish": Mutation(
        "a start completes a commit that was cut off",
        (Patch(Decisions, "complete_commits", _returns()),),
        first_seed=231,
    ),
    "incomplete": Mutation(
        "a start rolls back a transaction without all of its halves",
        (Patch(Decisions, "roll_back_incomplete", _returns()),),
        first_seed=143,
    ),
    "planned": Mutation(
        "a decision that waits for its group is made",
        (Patch(Decisions, "plan", _planned_is_forgotten),),
        first_seed=36,
    ),
    "duplicates": Mutation(
        "a half that was sent twice is one",
        (Patch(DuplicateFinder, "find", _returns()),),
        first_seed=72,
    ),
    "cold": Mutation(
        "a half that was sent twice is one, also if the first has left memory",
        (Patch(DuplicateFinder, "find", _cold_is_unknown),),
    ),
    "refill": Mutation(
        "a start knows the newest halves that fit, if they are sent again",
        (Patch(HalfReader, "newest", _all_or_none_are_read),),
    ),
    "exception": Mutation(
        "a block that is left by an exception does not decide",
        (Patch(TransactionProducer, "check_and_finish", _block_decides),),
    ),
    "wait": Mutation(
        "a first check is due when its wait is over, whatever the clock",
        (Patch(Checker, "schedule_first", _first_by_timestamp),),
        first_seed=10,
    ),
    "age": Mutation(
        "after a start the check of a half is due within its wait, also if the clock was set back",
        (Patch(Checker, "schedule_again", _age_may_be_negative),),
    ),
    "ahead": Mutation(
        "a start delivers what waits within its delay, also if the clock was set back",
        (Patch(find_waiting, "_limited", lambda _original: lambda wait_ms, _delay_ms: wait_ms),),
        first_seed=37,
    ),
    "clocks": Mutation(
        "delays count on the monotonic clock",
        (Patch(DueTimes, "add_after", _by_wall_clock),),
        first_seed=36,
    ),
    "repeated": Mutation(
        "a start knows what was delivered before a kill",
        (Patch(find_waiting, "_read_log", _returns()),),
    ),
    "delivered": Mutation(
        "a delivery is done when it is durable",
        (Patch(DoneFile, "mark", _done_before_durable),),
        first_seed=320,
    ),
    "pop-acks": Mutation(
        "a start knows which popped messages were acknowledged",
        (Patch(PopEngine, "_replay_one", _acknowledgements_are_forgotten),),
    ),
    "pop-retries": Mutation(
        "a start knows which popped messages were stored again",
        (Patch(PopEngine, "_replay_retries", _returns()),),
    ),
    "pop-lock": Mutation(
        "a lock of messages in order ends with its time",
        (Patch(OrderLocks, "is_blocked", _locks_do_not_end),),
    ),
    "pop-handle": Mutation(
        "a handle that was changed does not count",
        (Patch(PopEngine, "_is_in_flight", _any_handle_counts),),
    ),
    "forged": Mutation(
        "properties that only the broker may set are removed, and not trusted",
        (
            Patch(
                send, "without_broker_properties", lambda _original: lambda properties: properties
            ),
            Patch(
                sent_properties,
                "without_broker_properties",
                lambda _original: lambda properties: properties,
            ),
            Patch(
                batch_units,
                "without_broker_properties",
                lambda _original: lambda properties: properties,
            ),
            Patch(message, "half_message_id", _property_is_trusted),
        ),
    ),
    "room": Mutation(
        "a half is refused that its decision has no room for",
        (Patch(prepares, "require_room", _returns()),),
        first_seed=247,
    ),
    "counts": Mutation(
        "a snapshot is taken for counted checks alone",
        (Patch(Snapshots, "tick", _checks_are_not_counted),),
    ),
    "flush": Mutation(
        "durable is what was written when the flush began",
        (Patch(Flusher, "_flush", _flush_reports_later_writes),),
        first_seed=17,
    ),
    "checkpoint": Mutation(
        "queues are checked from the checkpoint on",
        (Patch(recovery, "checkpoint_start", _newest_file),),
    ),
    "properties": Mutation(
        "a record without all of its properties is torn",
        (Patch(log_scan, "is_torn", _returns(False)),),
        first_seed=534,
    ),
    "names": Mutation(
        "a new file of a queue has a durable name",
        (Patch(ConsumeQueue, "_create", _name_is_not_synced),),
        first_seed=996,
    ),
    "sync": Mutation("durable is what was synced", (Patch(Flusher, "_sync_file", _returns()),)),
    "failure": Mutation(
        "a flush that failed is the last one", (Patch(Flusher, "_round", _failure_is_forgotten),)
    ),
    "anew": Mutation(
        "a start writes again what a failed flush may have left in memory",
        (Patch(Recovery, "_rewrite", _returns()),),
        first_seed=70,
    ),
    "undecided": Mutation(
        "a file with a half that is undecided is not deleted",
        (Patch(RetentionPolicy, "_delete", _halves_do_not_count),),
    ),
    "deletion": Mutation(
        "what allows a file to be deleted is durable",
        (Patch(Deletion, "delete_before", _deletion_does_not_wait),),
        first_seed=787,
    ),
    "tombstone": Mutation(
        "a checker that finds no row forbids it (the users' part)",
        (Patch(Ledger, "fence", _no_tombstone),),
    ),
}


@contextlib.contextmanager
def mutated(name: str) -> Iterator[None]:
    """Remove a protection."""
    with contextlib.ExitStack() as stack:
        for patch in MUTATIONS[name].patches:
            replacement = patch.without(getattr(patch.owner, patch.attribute))
            stack.enter_context(mock.patch.object(patch.owner, patch.attribute, replacement))
        yield


class Found(NamedTuple):
    """The first seed that violated an invariant."""

    name: str
    seeds: int  # that were run
    violation: str | None


def violations_of(seed: int) -> list[str]:
    """Run a seed; a log that the invariants cannot even read is a violation, too."""
    try:
        return run(seed).records.violations
    except ValueError as error:
        return [str(error)]


def mistakes_in(name: str, violations: list[str]) -> None:
    """Check that a mutation has caused none of these by mistake.

    Raises:
        AssertionError: The replacement does not fit the code any more; it must be corrected.
    """
    mistakes = [one for one in violations if any(kind in one for kind in MISTAKES)]
    assert not mistakes, f"the mutation {name} does not fit the code: {mistakes[0]}"


def first_violation(name: str, seeds_max: int = SEEDS_MAX) -> Found:
    """Run seeds without a protection until one notices that passes with it.

    Raises:
        AssertionError: The replacement does not fit the code any more; it must be corrected.
    """
    first = MUTATIONS[name].first_seed
    for number, seed in enumerate(chain(range(first, seeds_max), range(first)), 1):
        with mutated(name):
            violations = violations_of(seed)
        mistakes_in(name, violations)
        if violations and not violations_of(seed):
            return Found(name, number, f"seed {seed}: {violations[0]}")
    return Found(name, seeds_max, None)


def main() -> int:
    """Run all mutations, or those named; return 1 if one is not found."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.mutations", description=__doc__
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MUTATIONS)}")
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    unnoticed = 0
    with ProcessPoolExecutor(arguments.processes) as pool:
        for found in pool.map(first_violation, arguments.names or MUTATIONS):
            unnoticed += found.violation is None
            print(
                f"{found.name}: without '{MUTATIONS[found.name].missing}' "
                f"{found.seeds} seeds, {found.violation or 'NOTHING NOTICED'}",
                flush=True,
            )
    return 1 if unnoticed else 0


if __name__ == "__main__":
    fix_hashes("tests.simulation.mutations")
    sys.exit(main())
