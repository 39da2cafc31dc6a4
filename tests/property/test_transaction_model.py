"""Transactions against a model: any order of requests, checks, crashes and restarts.

The model knows only the answers that clients got. In every run:

* a half has at most one final message, ever, also over several crashes;
* there is none after an answered rollback;
* an answered commit has its final message after every later crash;
* of several messages in one transaction all are delivered or none, after every start too;
* an answered half is decided, or undecided and known to the broker;
* every answer to a commit names the same final message, for every client and repetition;
* a parked transaction is not checked until it is resumed;
* the table after a restart is the one that reading the whole log gives.

Nothing depends on the machine: the example gives the duration of each step of a snapshot.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from halfmq.broker.config import TransactionConfig
from halfmq.broker.transaction.deciding import DecisionRequest, Ended, PlannedDecision
from halfmq.broker.transaction.errors import DecidedOtherwiseError, TransactionError
from halfmq.broker.transaction.replay import snapshot
from halfmq.broker.transaction.replay.log_replay import LogReplay
from halfmq.broker.transaction.state.pending import PendingTable
from halfmq.broker.transaction.state.state_machine import State, TransactionEvent
from halfmq.store.log.append_request import AppendResult
from tests.support.transactions import Broker, Connected, end_now

GROUPS = ("pg-a", "pg-b")


@dataclass(eq=False)
class Known:
    """What clients know about one transaction."""

    halves: list[AppendResult]  # the leader first; most transactions have no other
    group: str
    lost: bool = False  # lost in a crash before its sender got the answer
    decided: TransactionEvent | None = None  # the decision that was answered with success
    final_offset: int | None = None  # of the final message, from an answer
    waiting: list[Answer] = field(default_factory=list)  # until the log is on disk

    @property
    def half(self) -> AppendResult:
        """The half by which the broker knows the transaction."""
        return self.halves[0]


class Answer(NamedTuple):
    """An answer that the broker sends when the log is on disk."""

    position: int
    event: TransactionEvent
    final_offset: int | None


class TransactionMachine(RuleBasedStateMachine):
    """One broker, its clients, and a log that loses unflushed records in a crash."""

    halves = Bundle("halves")

    def __init__(self) -> None:
        super().__init__()
        # In place of the snapshot's thread, so that each example is reproducible.
        self._thread = patch.object(snapshot, "_in_background", self._in_background)
        self._thread.start()
        self.looks, self.is_early = 0, True  # see `set_thread`
        self._directory = tempfile.TemporaryDirectory()
        self.broker = Broker(
            Path(self._directory.name),
            config=TransactionConfig(check_max=2, check_interval_ms=10_000),
            decided=3,  # so few that entries are dropped almost at once
        )
        self.known: list[Known] = []
        self.members: dict[str, list[Connected]] = {group: [] for group in GROUPS}
        self.parked_before: set[int] = set()  # with no check in flight

    def teardown(self) -> None:
        self.broker.abandon_snapshot()
        self._thread.stop()
        self._directory.cleanup()

    @initialize(small=st.booleans())
    def start(self, small: bool) -> None:
        self.broker.snapshot_log_bytes = 0 if small else 1 << 30
        self.broker.restart()

    # --- clients

    @rule(target=halves, group=st.sampled_from(GROUPS), immune=st.booleans())
    def prepare(self, group: str, immune: bool) -> Known:
        seconds = "40" if immune else "none"
        half = self.broker.prepare(group=group, CHECK_IMMUNITY_TIME_IN_SECONDS=seconds)
        self.known.append(Known([half], group))
        return self.known[-1]

    @rule(target=halves, group=st.sampled_from(GROUPS), count=st.integers(2, 4))
    def prepare_several(self, group: str, count: int) -> Known:
        self.known.append(Known(self.broker.prepare_group(count, group=group), group))
        return self.known[-1]

    @rule(
        known=halves,
        event=st.sampled_from(
            [TransactionEvent.COMMIT, TransactionEvent.ROLLBACK, TransactionEvent.UNKNOWN]
        ),
        named=st.integers(0, 3),
        from_check=st.booleans(),
    )
    def end(
        self, known: Known, event: TransactionEvent, named: int = 0, from_check: bool = False
    ) -> None:
        if known.lost:
            return  # its sender got no answer, so it has no offsets
        half = known.halves[named % len(known.halves)]
        with self.refused_only_by_the_opposite(known, event):
            ended = end_now(
                self.broker.service.decisions,
                DecisionRequest(
                    half.physical_offset, half.queue_offset, known.group, event, from_check
                ),
            )
            self.note(known, event, ended)

    @rule(known=halves, action=st.sampled_from(["commit", "rollback"]), named=st.integers(0, 3))
    def decide(self, known: Known, action: str, named: int) -> None:
        """Have an operator decide."""
        if known.lost:
            return
        event = TransactionEvent.COMMIT if action == "commit" else TransactionEvent.ROLLBACK
        half = known.halves[named % len(known.halves)]
        with self.refused_only_by_the_opposite(known, event):
            self.note(
                known, event, self.broker.service.operator.decide(half.physical_offset, action)
            )

    @rule(known=halves, named=st.integers(0, 3))
    def resume(self, known: Known, named: int) -> None:
        """Have an operator resume the checks."""
        if known.lost:
            return
        half = known.halves[named % len(known.halves)]
        self.parked_before.discard(known.half.physical_offset)
        try:
            self.broker.service.operator.resume(half.physical_offset)
        except DecidedOtherwiseError:
            assert known.half.physical_offset not in self.broker.table
            return
        entry = self.broker.table.get(known.half.physical_offset)
        assert entry is not None
        assert entry.state is State.PREPARED

    @precondition(lambda self: self.known)  # a bundle in a list does not ensure that
    @rule(
        ends=st.lists(
            st.tuples(
                halves,
                st.sampled_from([TransactionEvent.COMMIT, TransactionEvent.ROLLBACK]),
                st.integers(0, 3),
            ),
            min_size=1,
            max_size=5,
        ),
        refused=st.booleans(),
    )
    def end_together(self, ends: list[tuple[Known, TransactionEvent, int]], refused: bool) -> None:
        """Plan and append several decisions as one group; the store may refuse them all."""
        service = self.broker.service
        plans: list[tuple[Known, TransactionEvent, int, PlannedDecision]] = []
        later: list[tuple[Known, TransactionEvent, int]] = []
        for known, event, named in ends:
            if known.lost:
                continue
            half = known.halves[named % len(known.halves)]
            request = DecisionRequest(half.physical_offset, half.queue_offset, known.group, event)
            with self.refused_only_by_the_opposite(known, event):
                planned = service.decisions.plan(request)
                if isinstance(planned, Ended):
                    self.note(known, event, planned)
                elif planned is None:
                    later.append((known, event, named))
                else:
                    plans.append((known, event, named, planned))
        if refused:
            for known, event, named, planned in plans:
                service.decisions.abandon(planned)
                later.append((known, event, named))
        else:
            results = self.broker.log.append([one for *_, plan in plans for one in plan.requests])
            for known, event, _, planned in plans:
                count = len(planned.requests)
                mine, results = results[:count], results[count:]
                self.note(known, event, service.decisions.decided(planned, mine))
        for known, event, named in later:
            self.end(known, event, named)

    @contextmanager
    def refused_only_by_the_opposite(self, known: Known, event: TransactionEvent) -> Iterator[None]:
        """Check that a refusal has a reason, and that nothing contradicts a success."""
        finals = len(self.broker.finals_of(known.half))
        try:
            yield
        except DecidedOtherwiseError:
            assert event is not known.decided
            assert finals == (event is TransactionEvent.ROLLBACK)

    def note(self, known: Known, event: TransactionEvent, ended: Ended) -> None:
        """Keep an answer until the log is on disk up to its decision."""
        if event is TransactionEvent.UNKNOWN:
            return
        assert (ended.final_offset is not None) == (event is TransactionEvent.COMMIT)
        if known.final_offset is not None:
            assert ended.final_offset == known.final_offset
        known.waiting.append(Answer(ended.position, event, ended.final_offset))

    @rule(known=halves, skew=st.sampled_from([(0, 1, ""), (1, 0, ""), (0, 0, "other")]))
    def end_wrongly(self, known: Known, skew: tuple[int, int, str]) -> None:
        before = self.broker.log.write_offset
        try:
            end_now(
                self.broker.service.decisions,
                DecisionRequest(
                    known.half.physical_offset + skew[0],
                    known.half.queue_offset + skew[1],
                    known.group + skew[2],
                    TransactionEvent.COMMIT,
                ),
            )
        except TransactionError:
            assert self.broker.log.write_offset == before
        else:
            raise AssertionError("a request that names no half message was accepted")

    @rule()
    def forget_recent(self) -> None:
        """Make the next decisions read their halves from the log."""
        self.broker.forget_finals()

    @rule(group=st.sampled_from(GROUPS))
    def connect(self, group: str) -> None:
        producer = self.broker.producers.join(group, Connected())
        self.members[group].append(producer)
        self.broker.service.on_producer(group)

    @rule(group=st.sampled_from(GROUPS), event=st.sampled_from(list(TransactionEvent)[:3]))
    def answer_checks(self, group: str, event: TransactionEvent) -> None:
        by_offset = {one.half.physical_offset: one for one in self.known if not one.lost}
        for producer in self.members[group]:
            for offset in producer.checked_offsets:
                assert by_offset[offset].group == group
                self.end(by_offset[offset], event, from_check=True)
            producer.checks.clear()

    @rule(group=st.sampled_from(GROUPS))
    def disconnect(self, group: str) -> None:
        for producer in self.members[group]:
            producer.closed = True
        self.members[group] = []
        self.broker.producers.groups.pop(group, None)

    # --- time, the disk, and the power

    @rule(milliseconds=st.sampled_from([0, 1_000, 7_000, 40_000]))
    def wait(self, milliseconds: int) -> None:
        self.broker.wait(milliseconds)

    @rule()
    def flush(self) -> None:
        self.broker.log.flush()
        for known in self.known:
            for answer in known.waiting:
                assert answer.position <= self.broker.log.durable_offset
                assert known.decided in {None, answer.event}
                known.decided, known.final_offset = answer.event, answer.final_offset
            known.waiting.clear()

    @rule()
    def stop_and_start(self) -> None:
        self.flush()
        self.broker.restart(drained=True)
        self._forget_connections()

    @rule(survivors=st.integers(min_value=0, max_value=4))
    def crash(self, survivors: int) -> None:
        """Lose the unflushed records, except for the first few."""
        self.broker.abandon_snapshot()
        log = self.broker.log
        unflushed = [record.end for record in log.scan(log.durable_offset)]
        end = max([log.durable_offset, *unflushed[:survivors]])
        self.broker.restart(survivors=survivors)
        self._forget_connections()
        for known in self.known:
            known.waiting.clear()
            last = known.halves[-1]
            known.lost = last.physical_offset + last.size > end
        self.known = [known for known in self.known if not known.lost]

    def _forget_connections(self) -> None:
        for group in GROUPS:
            self.disconnect(group)

    @rule(looks=st.integers(0, 3), is_early=st.booleans())
    def set_thread(self, looks: int, is_early: bool) -> None:
        """Let steps of snapshots appear done after ``looks`` polls, from the next step on.

        They are done before the first of these polls or after the last one.
        """
        self.looks, self.is_early = looks, is_early

    def _in_background(self, step: Callable[[], None]) -> Iterator[bool]:
        """Do what the snapshot's thread does, to the end even if it is abandoned."""
        is_early = self.is_early
        if is_early:
            step()
        try:
            for _ in range(self.looks):
                yield True
        finally:
            if not is_early:
                step()

    # --- what must hold

    @invariant()
    def decided_at_most_once(self) -> None:
        for known in self.known:
            finals = len(self.broker.finals_of(known.half))
            assert finals <= 1
            assert [len(self.broker.finals_of(half)) for half in known.halves] == [finals] * len(
                known.halves
            )
            if known.decided is TransactionEvent.COMMIT:
                assert finals == 1
            if known.decided is TransactionEvent.ROLLBACK:
                assert finals == 0

    @invariant()
    def nothing_is_lost(self) -> None:
        for known in self.known:
            offset = known.half.physical_offset
            undecided = offset in self.broker.table
            if undecided:
                assert known.decided is None
                assert self.broker.finals_of(known.half) == []
            elif known.decided is None and not known.waiting:
                # Decided by a request whose answer was lost in a crash: it has a record.
                assert any(
                    record.prepared_transaction_offset == offset and record.sys_flag & 0xC
                    for record in self.broker.log.records()
                )

    @invariant()
    def nobody_is_asked_about_what_is_parked(self) -> None:
        """Checks that were sent before it was parked are answered by now."""
        for members in self.members.values():
            for producer in members:
                assert not {*producer.checked_offsets} & self.parked_before
        self.parked_before = {
            entry.offset
            for entry in self.broker.table
            if entry.state is State.PARKED and not self._was_asked(entry.offset)
        }

    def _was_asked(self, offset: int) -> bool:
        return any(
            offset in producer.checked_offsets
            for members in self.members.values()
            for producer in members
        )

    @invariant()
    def the_table_is_what_the_log_says(self) -> None:
        table = PendingTable()
        log_replay = LogReplay(table)
        for record in self.broker.log.records():
            log_replay.apply(record)
        assert {(one.offset, one.state, one.parked_reason) for one in table} == {
            (one.offset, one.state, one.parked_reason) for one in self.broker.table
        }
        assert table.groups == self.broker.table.groups
        assert (log_replay.incomplete, log_replay.unfinished) == ({}, {})
        assert set(log_replay.without_op) == set(self.broker.ops.waiting)


TransactionMachine.TestCase.settings = settings(stateful_step_count=50)
test_transactions_against_a_model = TransactionMachine.TestCase
