"""Decisions: each is one append, and the table changes only after the append has succeeded.

A refused append (disk full, broker stopping) therefore leaves the transaction undecided, and the
client can try again. A decision about several messages is also one append: the leader's final
message, which decides for all, followed by the other final messages.

A producer's request is validated once, by ``plan``: it returns the answer, or a planned decision,
whose records the handler appends together with others before it reports the result. ``carry_out``
appends a planned decision alone, at once.
"""

import logging
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

import msgspec
from attrs import define

from halfmq.store.files.page_cache import NotInMemoryError
from halfmq.store.format.flags import TransactionType
from halfmq.store.format.ids import offset_message_id
from halfmq.store.format.properties import get_property
from halfmq.store.log.append_request import AppendRequest, AppendResult
from halfmq.store.message_store import MessageStore

from ..errors import RequestRefusedError
from .decision_lookup import DecisionLookup
from .errors import (
    DecidedOtherwiseError,
    DecisionForgottenError,
    HalfMismatchError,
    HalfNotFoundError,
    TransactionError,
)
from .half import StoredHalf
from .half_reader import HalfReader
from .half_records import bare_request, committed, final_request, rollback_request
from .op_writer import OpWriter
from .state.caches import FinalMessageCache
from .state.counters import Counters
from .state.pending import Pending, PendingTable
from .state.state_machine import RESULTS, State, TransactionEvent, Verdict, outcome

logger = logging.getLogger(__name__)

_COMMITTED: Final = State.COMMITTED  # looking a member up in its class is a tenth of a microsecond
_DECIDE: Final = Verdict.DECIDE
_DECISION_NAMES: Final = {State.COMMITTED: "committed", State.ROLLED_BACK: "rolled back"}


class Ended(NamedTuple):
    """The answer to a decision."""

    position: int  # send the answer when the log is durable up to here
    final_offset: int | None = None  # of the final message; None unless committed
    store_host: bytes = b""  # of the final message, for its offset message id

    @property
    def message_id(self) -> str | None:
        """The offset message id of the final message; None unless committed."""
        if self.final_offset is None:
            return None
        return offset_message_id(self.store_host, self.final_offset)


class PlannedDecision(msgspec.Struct, gc=False):
    """A first decision whose records are not in the log yet."""

    requests: Sequence[AppendRequest]  # the record that decides, then the other final messages
    entry: Pending
    state: State
    dropped: int = 0  # body bytes of the message that was rolled back
    waits: bool = True  # whether the answer waits for the disk

    @property
    def size(self) -> int:
        """Body bytes of the messages read for this decision."""
        return self.dropped + sum([len(one.body) for one in self.requests])


Authorize: TypeAlias = Callable[[bytes, bool], None]
"""Takes the properties of a half and whether a check was sent for it; raises RequestRefusedError
unless the sender may decide it."""


class DecisionRequest(msgspec.Struct, gc=False):
    """A producer's request to end a transaction."""

    offset: int  # physical, of the half, or of a check copy or a further half of it
    queue_offset: int  # of the same record in the half topic
    producer_group: str  # must be the group that prepared it
    event: TransactionEvent  # COMMIT, ROLLBACK or UNKNOWN
    from_check: bool = False  # whether it answers a check
    names: Sequence[str] = ()  # names of the transaction; if any, one must be its unique key
    authorize: Authorize | None = None  # None: without access control


@define(eq=False, repr=False, slots=False)
class Decisions:
    """Applies decisions, and answers repeated ones."""

    _log: MessageStore
    _table: PendingTable
    _finals: FinalMessageCache
    _ops: OpWriter
    _lookup: DecisionLookup
    _counters: Counters
    _halves: HalfReader
    # Returns a final message as it must be stored now.
    _resolve: Callable[[AppendRequest], AppendRequest]
    _store_host: bytes
    _now_ms: Callable[[], int]
    # Decisions about their messages are answered before they are on disk.
    _unflushed_topics: Container[str] = frozenset()
    # Gets the age of each half at its decision.
    _observe_age: Callable[[float], None] = lambda _seconds: None

    def __attrs_post_init__(self) -> None:
        self._append = self._log.append
        self._find = self._table.get
        self._groups, self._copies = self._table.groups, self._table.copies
        self._pop_final = self._finals.pop
        self._add_op = self._ops.add
        self._read_half, self._existing_half = self._halves.read, self._halves.existing
        self._planned: set[int] = set()  # halves with a planned decision

    def plan(self, request: DecisionRequest) -> PlannedDecision | Ended | None:
        """Validate a producer's request; return its answer, or the first decision to append.

        The caller appends the requests of a planned decision, and then calls ``decided`` or
        ``abandon``. None if there is already a planned decision about the same transaction: plan
        again after that one was appended.

        Raises:
            TransactionError: The request is refused; the transaction is unchanged.
            RequestRefusedError: The sender may not decide, or the message has no destination now;
                nothing has changed.
            NotInMemoryError: The half must be read from disk first; nothing has changed.
        """
        offset, authorize = request.offset, request.authorize
        entry = self._find(offset)
        if entry is None:
            return self._plan_other(request)
        wrong_offset = entry.queue_offset != request.queue_offset
        wrong_group = entry.group != request.producer_group
        event = request.event
        if authorize is not None and (
            wrong_offset
            or wrong_group
            or event is TransactionEvent.UNKNOWN
            or offset in self._groups
        ):
            self._authorize_all(offset, authorize)
            authorize = None
        if wrong_offset:
            raise _wrong_queue_offset(offset, entry.queue_offset, request.queue_offset)
        if wrong_group:
            raise _wrong_group(offset, entry.group, request.producer_group)
        return self._plan(
            entry, event, request.names, from_check=request.from_check, authorize=authorize
        )

    def _plan_other(self, request: DecisionRequest) -> PlannedDecision | Ended | None:
        """Plan a decision about a half that is decided, or is a copy or a member of another."""
        offset, group = request.offset, request.producer_group
        if request.authorize is not None:
            self._authorize_all(offset, request.authorize)
        half = self._existing_half(offset)
        if half.queue_offset != request.queue_offset:
            raise _wrong_queue_offset(offset, half.queue_offset, request.queue_offset)
        prepared_by = get_property(half.properties, b"PGROUP")
        if prepared_by != group.encode():
            raise _wrong_group(offset, (prepared_by or b"").decode(errors="replace"), group)
        _check_names(offset, half.properties, request.names)
        entry = self._find(self._table.transaction_of(offset))
        if entry is None:
            return self._answer_decided(offset, half, request.event)
        return self._plan(entry, request.event, from_check=request.from_check)

    def _plan(
        self,
        entry: Pending,
        event: TransactionEvent,
        names: Sequence[str] = (),
        *,
        from_check: bool = False,
        authorize: Authorize | None = None,
    ) -> PlannedDecision | Ended | None:
        if entry.offset in self._planned:
            return None
        state, verdict = RESULTS[entry.state][event]
        if verdict is not _DECIDE:
            if from_check:
                self._answered(entry)
            self._counters.unknown += 1
            return Ended(0)
        plan = self._commit if state is _COMMITTED else self._rollback
        planned = plan(entry, names, authorize)
        if from_check:  # only now: if a read raises NotInMemoryError, the request is served again
            self._answered(entry)
        self._planned.add(entry.offset)
        return planned

    def carry_out(self, planned: PlannedDecision) -> Ended:
        """Append a planned decision now, and complete it.

        Raises:
            StoreError: It could not be appended; the transaction is unchanged.
        """
        try:
            results = self._append(planned.requests)
        except BaseException:
            self.abandon(planned)
            raise
        return self.decided(planned, results)

    def decide(self, entry: Pending, event: TransactionEvent) -> Ended:
        """Apply a decision of an operator or of a start; raise as ``plan`` and ``carry_out`` do."""
        planned = self._plan(entry, event)
        assert planned is not None  # decisions planned by producers have been appended before
        return planned if isinstance(planned, Ended) else self.carry_out(planned)

    def answer_decided(self, offset: int, event: TransactionEvent) -> Ended:
        """Answer a request about a decided half with its decision, or raise."""
        return self._answer_decided(offset, self._existing_half(offset), event)

    def _members_of(self, leader: int) -> list[int]:
        """Return the offsets of the other halves of a transaction."""
        return [member.offset for member in self._groups.get(leader, ())]

    def _authorize_all(self, offset: int, authorize: Authorize) -> None:
        """Raise unless the sender may decide each message of the transaction with this half."""
        leader = self._table.transaction_of(offset)
        entry = self._find(leader)
        # A request about a decided transaction changes nothing, so it may answer an old check.
        check_sent = entry is None or entry.sent > 0
        halves = dict.fromkeys((offset, leader, *self._members_of(leader)))
        try:
            for half in halves:
                authorize(self._existing_half(half).properties, check_sent)
        except NotInMemoryError as error:  # of a half, or of its queue entry
            lacking = self._log.reader.lacking(halves)
            raise NotInMemoryError([*error.missing, *lacking.missing]) from None

    def _answered(self, entry: Pending) -> None:
        """Count the answer to a check once, even if the answer is repeated."""
        counts = outcome(entry.state, TransactionEvent.ANSWERED).verdict is Verdict.COUNT
        if counts and entry.answered < entry.sent:
            entry.answered += 1
            self._counters.checks_answered += 1

    def _commit(
        self, entry: Pending, names: Sequence[str], authorize: Authorize | None
    ) -> PlannedDecision:
        offset = entry.offset
        final = self._final_at(offset)
        if authorize is not None:
            authorize(final.properties, entry.sent > 0)
        _check_names(offset, final.properties, names)
        if offset in self._groups:
            members = self._members_of(offset)
            finals = [committed(self._final_at(member)) for member in members]
            decided = [self._resolve(one) for one in (committed(final, members), *finals)]
            return PlannedDecision(decided, entry, _COMMITTED)
        waits = final.topic not in self._unflushed_topics
        return PlannedDecision((self._resolve(committed(final)),), entry, _COMMITTED, waits=waits)

    def _rollback(
        self, entry: Pending, names: Sequence[str], authorize: Authorize | None
    ) -> PlannedDecision:
        members = self._members_of(entry.offset)
        try:
            final = self._final_at(entry.offset)
        except TransactionError:
            if authorize is not None:
                raise  # a half that cannot be read does not name its principal
            # A half that the disk has damaged can still be rolled back.
            bare = bare_request(
                entry.offset,
                entry.group,
                TransactionType.ROLLBACK,
                now_ms=self._now_ms(),
                host=self._store_host,
            )
            return PlannedDecision((bare,), entry, State.ROLLED_BACK)
        if authorize is not None:
            authorize(final.properties, entry.sent > 0)
        _check_names(entry.offset, final.properties, names)
        waits = bool(members) or final.topic not in self._unflushed_topics
        rollback = rollback_request(final, members)
        return PlannedDecision((rollback,), entry, State.ROLLED_BACK, len(final.body), waits)

    def _final_at(self, offset: int) -> AppendRequest:
        final = self._pop_final(offset)
        if final is not None:
            return final
        try:
            half = self._read_half(offset)
        except NotInMemoryError:
            leader = self._table.transaction_of(offset)
            members = self._members_of(leader)
            if not members:
                raise
            raise self._log.reader.lacking((leader, *members)) from None
        if half is None:
            raise HalfNotFoundError(offset)
        try:
            return final_request(half)
        except ValueError as error:
            raise HalfMismatchError(offset, str(error)) from error

    def decided(self, planned: PlannedDecision, results: Sequence[AppendResult]) -> Ended:
        """Complete a decision after its records were appended; return its answer."""
        entry, state = planned.entry, planned.state
        self._planned.discard(entry.offset)
        self._observe_age((results[0].store_timestamp - entry.store_timestamp) / 1_000)
        if state is _COMMITTED:
            self._counters.committed += 1
        else:
            self._counters.rolled_back += 1
        table = self._table
        if self._copies or self._groups:
            for queue_offset in table.op_offsets_of(entry):
                self._add_op(queue_offset)
        else:
            self._add_op(entry.queue_offset)
        first_offset = results[0].physical_offset
        table.decide(entry, state, first_offset)
        position = results[-1].end if planned.waits else 0
        if state is not _COMMITTED:
            return Ended(position)
        return Ended(position, first_offset, planned.requests[0].store_host)

    def abandon(self, planned: PlannedDecision) -> None:
        """Drop a planned decision whose records could not be appended."""
        self._planned.discard(planned.entry.offset)

    def _answer_decided(self, offset: int, half: StoredHalf, event: TransactionEvent) -> Ended:
        """Answer a request about a decided transaction; append nothing."""
        first = self._table.transaction_of(offset)
        decision = self._lookup.find(first, half)
        if decision is None:
            raise DecisionForgottenError(first)
        _, verdict = outcome(decision.state, event)
        # A flush covers whole records: a record is durable if its first byte is.
        position = decision.position + 1
        if verdict is Verdict.REPEAT:
            self._counters.repeated += 1
            if decision.state is _COMMITTED:
                return Ended(position, decision.position, half.store_host)
            return Ended(position)
        if verdict is Verdict.REFUSE:
            decided_ms = self._lookup.decided_ms(decision)
            self._counters.refused += 1
            name = _DECISION_NAMES[decision.state]
            raise DecidedOtherwiseError(first, name, decided_ms, position)
        self._counters.unknown += 1
        return Ended(0)

    def roll_back_incomplete(self, leaders: Iterable[int]) -> None:
        """Roll back transactions that lost some halves in a crash; no client got an answer."""
        for leader in leaders:
            entry = self._find(leader)
            if entry is None:
                continue
            logger.warning(
                "event=transaction_incomplete half_offset=%d group=%s halves=%d decision=rollback",
                leader,
                entry.group,
                1 + len(self._table.groups.get(leader, ())),
            )
            self.decide(entry, TransactionEvent.ROLLBACK)
            self._log.request_flush()

    def complete_commits(self, halves: Sequence[int]) -> None:
        """Append the final messages of these halves, which a crash cut off after the decision.

        A damaged message is logged: it must neither prevent the start nor lose the others.
        """
        finals = []
        for offset in halves:
            try:
                final = committed(self._final_at(offset))
            except TransactionError as error:
                logger.error(  # noqa: TRY400 - the error says it all
                    "event=half_unreadable half_offset=%d committed=true reason=%r",
                    offset,
                    str(error),
                )
                continue
            try:
                final = self._resolve(final)
            except RequestRefusedError as refusal:
                # It is consumed from the queue it was prepared for when its topic is created again.
                logger.warning("event=destination_lacking topic=%s reason=%s", final.topic, refusal)
            logger.warning("event=commit_completed half_offset=%d", offset)
            finals.append(final)
        if finals:
            self._append(finals)
            self._log.request_flush()


# Both texts begin with RocketMQ's words, which users and tools know.


def _wrong_queue_offset(offset: int, stored: int, requested: int) -> HalfMismatchError:
    return HalfMismatchError(
        offset,
        f"The transaction state table offset wrong: the half at commitLogOffset {offset} has the "
        f"queue offset {stored}, and the request says {requested}",
    )


def _wrong_group(offset: int, stored: str, requested: str) -> HalfMismatchError:
    return HalfMismatchError(
        offset,
        f"The producer group wrong: the half at commitLogOffset {offset} was prepared by the group "
        f"{stored!r}, and the request is of {requested[:128]!r}",
    )


def _check_names(offset: int, properties: bytes, names: Sequence[str]) -> None:
    """Verify that a request refers to this half.

    A power cut may remove halves that were not on disk yet; later halves then reuse their offsets.
    A producer of the earlier half must not decide the later one.

    Raises:
        HalfMismatchError: The request names another transaction.
    """
    requested = ""
    for name in names:
        if name:
            requested = requested or name
            if properties.rfind(f"UNIQ_KEY\x01{name}\x02".encode()) >= 0:
                return
    key = get_property(properties, b"UNIQ_KEY") if requested else None
    if key is not None:
        raise HalfMismatchError(
            offset,
            f"The transaction id wrong: the half at commitLogOffset {offset} is that of "
            f"{key.decode(errors='replace')!r}, and the request is about {requested[:128]!r}",
        )
