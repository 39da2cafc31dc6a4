"""Transactions against a model: any order of requests, checks, crashes and restarts.

The model knows nothing but what clients were told. Whatever happens:

* a half has at most one final message, ever, also over several crashes;
* there is none after a rollback that was answered;
* a commit that was answered has its final message after every later crash;
* a half that was answered is decided, or undecided and known to the broker;
* the table that a restart builds is the one a reading of the whole log gives.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from halfmq.broker.config import TransactionConfig
from halfmq.broker.transaction.errors import (
    DecidedOtherwiseError,
    TransactionError,
)
from halfmq.broker.transaction.fold import Fold
from halfmq.broker.transaction.pending import Event, PendingTable
from halfmq.store.draft import Appended
from tests.support.transactions import Broker, Connected

GROUPS = ("pg-a", "pg-b")


@dataclass(eq=False)
class Known:
    """What clients know of one half."""

    half: Appended
    group: str
    lost: bool = False  # a crash took it before its sender was answered
    told: Event | None = None  # the decision that was answered with success
    waiting: list[tuple[int, Event]] = field(default_factory=list)  # answers held for the disk


class TransactionMachine(RuleBasedStateMachine):
    """One broker, its clients, and a log that forgets what was not flushed."""

    halves = Bundle("halves")

    def __init__(self) -> None:
        super().__init__()
        self._directory = tempfile.TemporaryDirectory()
        self.broker = Broker(
            Path(self._directory.name),
            config=TransactionConfig(check_max=2, check_interval_ms=10_000),
            decided=3,  # forgets almost at once
        )
        self.known: list[Known] = []
        self.members: dict[str, list[Connected]] = {group: [] for group in GROUPS}

    def teardown(self) -> None:
        self._abandon_snapshot()
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
        self.known.append(Known(half, group))
        return self.known[-1]

    @rule(known=halves, event=st.sampled_from([Event.COMMIT, Event.ROLLBACK, Event.UNKNOWN]))
    def end(self, known: Known, event: Event) -> None:
        if known.lost:
            return  # its sender got no answer, and has no offsets to send
        finals = len(self.broker.finals_of(known.half))
        try:
            position = self.broker.end(known.half, event, group=known.group)
        except DecidedOtherwiseError:
            assert event is not known.told
            assert finals == (event is Event.ROLLBACK)
            return
        if event is not Event.UNKNOWN:
            known.waiting.append((position, event))

    @rule(known=halves, skew=st.sampled_from([(0, 1, ""), (1, 0, ""), (0, 0, "other")]))
    def end_wrongly(self, known: Known, skew: tuple[int, int, str]) -> None:
        before = self.broker.log.write_offset
        try:
            self.broker.service.end(
                known.half.physical_offset + skew[0],
                known.half.queue_offset + skew[1],
                known.group + skew[2],
                Event.COMMIT,
            )
        except TransactionError:
            assert self.broker.log.write_offset == before
        else:
            raise AssertionError("a request that names no half message was accepted")

    @rule()
    def forget_recent(self) -> None:
        """Have the next decisions read their halves from the log."""
        self.broker.service._recent.__init__()  # type: ignore[misc]

    @rule(group=st.sampled_from(GROUPS))
    def connect(self, group: str) -> None:
        producer = self.broker.producers.join(group, Connected())
        self.members[group].append(producer)
        self.broker.service.on_producer(group)

    @rule(group=st.sampled_from(GROUPS), event=st.sampled_from(list(Event)[:3]))
    def answer_checks(self, group: str, event: Event) -> None:
        by_offset = {one.half.physical_offset: one for one in self.known if not one.lost}
        for producer in self.members[group]:
            for offset in producer.asked_offsets:
                assert by_offset[offset].group == group
                self.end(by_offset[offset], event)
            producer.asked.clear()

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
            for position, event in known.waiting:
                assert position <= self.broker.log.durable_offset
                assert known.told in {None, event}
                known.told = event
            known.waiting.clear()

    @rule()
    def stop_and_start(self) -> None:
        self.flush()
        self.broker.restart(drained=True)
        self._forget_connections()

    @rule(survivors=st.integers(min_value=0, max_value=4))
    def crash(self, survivors: int) -> None:
        """Lose what was not flushed, but for the first few records of it."""
        self._abandon_snapshot()
        self.broker.restart(survivors=survivors)
        self._forget_connections()
        end = self.broker.log.write_offset
        for known in self.known:
            known.waiting.clear()
            if known.half.physical_offset >= end:
                known.lost = True
        self.known = [known for known in self.known if not known.lost]

    def _abandon_snapshot(self) -> None:
        """Leave the unfinished file as a killed process would."""
        work = self.broker.service._snapshots._work
        if work is not None:
            work.close()

    def _forget_connections(self) -> None:
        for group in GROUPS:
            self.disconnect(group)

    # --- what must hold

    @invariant()
    def decided_at_most_once(self) -> None:
        for known in self.known:
            finals = len(self.broker.finals_of(known.half))
            assert finals <= 1
            if known.told is Event.COMMIT:
                assert finals == 1
            if known.told is Event.ROLLBACK:
                assert finals == 0

    @invariant()
    def nothing_is_lost(self) -> None:
        for known in self.known:
            offset = known.half.physical_offset
            undecided = offset in self.broker.service._table
            if undecided:
                assert known.told is None
                assert self.broker.finals_of(known.half) == []
            elif known.told is None and not known.waiting:
                # Decided by a request whose answer a crash took: a record says so.
                assert any(
                    record.prepared_transaction_offset == offset and record.sys_flag & 0xC
                    for record in self.broker.log.records()
                )

    @invariant()
    def the_table_is_what_the_log_says(self) -> None:
        table = PendingTable()
        fold = Fold(table)
        for record in self.broker.log.records():
            fold.apply(record)
        assert {(one.offset, one.state) for one in table} == {
            (one.offset, one.state) for one in self.broker.service._table
        }
        assert set(fold.unmirrored) == set(self.broker.service._ops.waiting)


TransactionMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None
)
test_transactions_against_a_model = TransactionMachine.TestCase
