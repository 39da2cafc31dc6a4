"""Assigns records to transactions; no Spark in here.

What is judged together is a *key group*: all records with one producer group and one unique key (of
several messages the leader's). Usually that is one transaction. If a producer sent its message
twice, there are two.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ...log.transaction_parts import Part
from .model import Finding, Kind, LogBounds, LogEvent


@dataclass(slots=True)
class MessageHistory:
    """One of the messages of a transaction, mostly the only one: every record that is about it."""

    halves: list[LogEvent] = field(default_factory=list)  # the first, then a check's copies of it
    decided: list[LogEvent] = field(default_factory=list)  # final and rollback records
    damaged: list[LogEvent] = field(default_factory=list)  # such that do not match their CRC
    unmarked: list[LogEvent] = field(default_factory=list)  # finals without the bits of a commit
    ops: list[LogEvent] = field(default_factory=list)
    waiting: list[LogEvent] = field(
        default_factory=list
    )  # copies of a delayed final, without a link
    delivered: list[LogEvent] = field(default_factory=list)  # by records without a link

    @property
    def half(self) -> LogEvent | None:
        """The first half record that can be read."""
        return self.halves[0] if self.halves else None

    @property
    def commits(self) -> list[LogEvent]:
        """The final messages."""
        return [event for event in self.decided if event.part is not Part.ROLLBACK]

    @property
    def is_decided(self) -> bool:
        return bool(self.decided or self.damaged or self.unmarked or self.ops)


@dataclass(slots=True)
class History:
    """One transaction: every record that is about it."""

    half: LogEvent | None = None  # its original half, if that can be read
    messages: dict[int, MessageHistory] = field(default_factory=dict)  # by number; 0 is there
    discards: list[LogEvent] = field(default_factory=list)
    resumes: list[LogEvent] = field(default_factory=list)

    def message(self, number: int) -> MessageHistory:
        return self.messages.setdefault(number, MessageHistory())

    @property
    def leader(self) -> MessageHistory:
        """The first message, which decides for all."""
        return self.messages[0]

    @property
    def total(self) -> int:
        """How many messages it has."""
        return self.half.total if self.half else 1

    @property
    def is_transaction(self) -> bool:
        """Whether there is more of it than deliveries, whose final left the log before them."""
        messages = self.messages.values()
        return bool(self.discards or self.resumes) or any(
            message.halves or message.is_decided for message in messages
        )


def divide(events: Sequence[LogEvent], bounds: LogBounds) -> tuple[list[History], list[Finding]]:
    """Divide the records of a key group, in log order, by transaction; report what has no half."""
    division = _Division(events, bounds)
    return [history for history in division.histories if history.is_transaction], division.findings


class _Division:
    def __init__(self, events: Sequence[LogEvent], bounds: LogBounds) -> None:
        self._bounds = bounds
        self._owners: dict[int, tuple[History, int]] = {}  # by half; the number of its message
        self.findings: list[Finding] = []
        firsts = [event for event in events if _is_first(event)]
        self.histories = [History(half, {0: MessageHistory([half])}) for half in firsts]
        self.histories = self.histories or [History(None, {0: MessageHistory()})]
        for event in events:
            if event.part is Part.HALF:
                self._half(event)
            elif event.part is Part.NAMED:
                self._named(event)
            else:
                self._about(event)

    def _half(self, event: LogEvent) -> None:
        if event.number:  # the halves of several messages lie side by side, the leader first
            history = self._begun(event.offset)[-1]
            history.message(event.number).halves.append(event)
        elif event.check_times is not None:
            history = self._latest(event.offset)
            history.leader.halves.append(event)
        else:
            history = next(history for history in self.histories if history.half is event)
        self._owners[event.offset] = history, event.number

    def _about(self, event: LogEvent) -> None:
        """Take a record that names a half, or is known by its key."""
        owner = self._owners.get(event.reference)
        if event.part in _DELIVERIES and self._is_without_link(event, owner):
            self._delivery(event)
            return
        if owner is None:
            self.findings += self._without_half(event)
            if event.part is Part.OP:
                return
            owner = self._history_without_owner(event), event.number
        history, number = owner
        message = history.message(number)
        if event.part in _PARKING:
            # RocketMQ parks further messages one by one, which says nothing about the first.
            if not number:
                (history.discards if event.part is Part.DISCARD else history.resumes).append(event)
        elif event.part is Part.OP:
            message.ops.append(event)
        elif not event.sound:
            message.damaged.append(event)
        elif event.part is Part.DELIVERED:
            message.unmarked.append(event)
        else:
            message.decided.append(event)

    def _is_without_link(self, event: LogEvent, owner: tuple[History, int] | None) -> bool:
        """Tell whether a record that delivers is known by its key only.

        Zero is the link of a record that has none, and of the final of the half at offset 0.
        """
        if event.reference:
            return event.part is Part.DELIVERED and owner is None and bool(self._owners)
        if event.part is Part.DELIVERED or owner is None:
            return True
        return bool(owner[0].message(owner[1]).decided)

    def _delivery(self, event: LogEvent) -> None:
        begun = self._begun(event.offset)
        message = begun[-1].message(event.number)
        if event.part is Part.WAITING:
            message.waiting.append(event)
            return
        for history in begun:  # of several, one that waits for its delivery
            one = history.message(event.number)
            if sum(final.part is Part.WAITING for final in one.decided) > len(one.delivered):
                message = one
                break
        message.delivered.append(event)

    def _named(self, event: LogEvent) -> None:
        if event.reference not in self._owners and not self._bounds.is_unreadable(event.reference):
            detail = f"the decision also names {event.reference}, where there is no half message"
            self.findings.append(Finding(Kind.DECISION_WITHOUT_HALF, [event.offset], detail))

    def _without_half(self, event: LogEvent) -> Iterable[Finding]:
        named = event.reference
        if event.part is Part.OP:
            detail = (
                f"the op message lies before the half message at {named} that it marks as decided"
            )
            yield Finding(Kind.OP_WITHOUT_HALF, [event.offset], detail)
        elif event.part is Part.DISCARD and not named:  # RocketMQ's, known by its key
            if not self._owners and not self._bounds.hides(0, event.offset):
                detail = "a message was parked whose half message is not in the log"
                yield Finding(Kind.PARKED_WITHOUT_HALF, [event.offset], detail)
        elif event.part is Part.DELIVERED or not event.sound:
            pass  # what is wrong with these records is told of them
        elif named >= event.offset or not self._bounds.is_unreadable(named):
            what = _RECORD_NAMES[event.part]
            detail = f"the {what} names {named}, where there is no half message of its transaction"
            kind = (
                Kind.PARKED_WITHOUT_HALF if event.part in _PARKING else Kind.DECISION_WITHOUT_HALF
            )
            yield Finding(kind, [event.offset], detail)

    def _begun(self, offset: int) -> list[History]:
        begun = [one for one in self.histories if one.half and one.half.offset <= offset]
        return begun or self.histories[:1]

    def _history_without_owner(self, event: LogEvent) -> History:
        """The transaction that a record is about whose half is not there.

        It is one of its own if it names a half that cannot be read, before all that can.
        """
        first = self.histories[0].half
        named = event.reference
        if first and named and event.offset < first.offset and self._bounds.is_unreadable(named):
            self.histories.insert(0, History(None, {0: MessageHistory()}))
            return self.histories[0]
        return self._latest(event.offset)

    def _latest(self, offset: int) -> History:
        """Return the transaction of a record without a link: the latest undecided one, if any."""
        begun = self._begun(offset)
        return ([history for history in begun if not history.leader.is_decided] or begun)[-1]


_PARKING: Final = (Part.DISCARD, Part.RESUME)
_DELIVERIES: Final = (Part.DELIVERED, Part.WAITING)
_RECORD_NAMES: Final = {
    Part.COMMIT: "final message",
    Part.WAITING: "final message",
    Part.ROLLBACK: "rollback record",
    Part.DISCARD: "parked copy",
    Part.RESUME: "resume record",
}


def _is_first(event: LogEvent) -> bool:
    return event.part is Part.HALF and event.check_times is None and not event.number
