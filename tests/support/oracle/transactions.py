"""Says what became of every transaction of a log, and what is wrong with it.

Written from the facts about both brokers, record after record in log order, for tests; speed and
memory do not count. It shares no code with what is tested, and ``test_oracle.py`` sees to that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from .delays import is_overdue, mistimed, plain_delays
from .log import MAY_DIFFER, Audit, Log
from .records import BITS, COMMIT, HALF, OP, PARKED, PREPARED, ROLLBACK, SCHEDULE, TIMER, Raw
from .words import Kind, State

CHECKS_MAX = 15
PARKED_WITHIN_MS = 600_000


@dataclass
class Message:
    """One message of a transaction; most have one."""

    halves: list[Raw] = field(default_factory=list)
    finals: list[Raw] = field(default_factory=list)
    rollbacks: list[Raw] = field(default_factory=list)
    damaged: list[Raw] = field(default_factory=list)  # decisions that do not match their CRC
    unmarked: list[Raw] = field(default_factory=list)  # name the half, without bits
    ops: list[tuple[Raw, Raw]] = field(default_factory=list)  # each with the half that it names
    waits: list[Raw] = field(default_factory=list)  # copies of a final, stored once more
    arrivals: list[Raw] = field(default_factory=list)


@dataclass
class Transaction:
    """One transaction: what was prepared first, and all that is about it."""

    messages: dict[int, Message] = field(default_factory=lambda: defaultdict(Message))
    total: int = 1
    parked: list[Raw] = field(default_factory=list)
    resumed: list[Raw] = field(default_factory=list)

    @property
    def first(self) -> Raw:
        return self.messages[0].halves[0]

    @property
    def is_open(self) -> bool:
        one = self.messages[0]
        return not (one.finals or one.rollbacks or one.ops or one.damaged or one.unmarked)


def audit(root: Path, pending_age_ms: int) -> Audit:
    """Say what is wrong with the transactions of a store, or of a folder of segments."""
    log, told = Log(root), Audit()
    for one in log.records:
        if not one.sound:
            told.add(Kind.CRC, one.offset)
        if one.topic != HALF and one.bits in (PREPARED, ROLLBACK):
            told.add(Kind.INVISIBLE_MESSAGE, one.offset)
    for start, end in log.damage:
        path = max(path for path in log.folder.iterdir() if int(path.name) <= start)
        base = int(path.name)
        zeros = not any(path.read_bytes()[start - base : end - base])
        told.add(Kind.GAP if zeros else Kind.CORRUPT_RECORD, start, end)
    collected = _Collector(log, told)
    by_key: dict[str, list[_Verdict]] = defaultdict(list)
    for key, tx in collected.transactions:
        verdict = _Verdict(log, told, tx)
        verdict.judge(log.last.time - pending_age_ms)
        told.states[tx.first.offset] = verdict.state
        by_key[key].append(verdict)
    for together in by_key.values():
        _repeated(told, together)
    plain_delays(told, log)
    told.found.sort()
    return told


# --- which record is about which transaction


class _Collector:
    def __init__(self, log: Log, told: Audit) -> None:
        self._log, self._told = log, told
        self.transactions: list[tuple[str, Transaction]] = []
        self._by_key: dict[str, list[Transaction]] = defaultdict(list)
        self._by_half: dict[int, tuple[Transaction, int, Raw]] = {}
        self._by_place: dict[tuple[int, int], tuple[Transaction, int, Raw]] = {}
        for one in log.records:
            if one.topic == HALF and not one.bits:
                self._half(one)
        for one in log.records:
            if one.topic == OP:
                self._op(one)
            elif one.topic == HALF and not one.bits:
                continue
            elif one.topic in (HALF, PARKED):
                self._about(one)
            elif one.topic in (SCHEDULE, TIMER):
                self._waiting(one)
            elif not one.topic.startswith(("%RETRY%", "%DLQ%")):
                self._message(one)

    def _half(self, one: Raw) -> None:
        key, number, total = _key(one)
        if "TRANSACTION_CHECK_TIMES" in one.properties:
            tx = self._open(key, one.offset)
        elif number:
            tx = self._by_key[key][-1]
        else:
            tx = Transaction(total=total)
            self.transactions.append((key, tx))
            self._by_key[key].append(tx)
        tx.messages[number].halves.append(one)
        self._by_half[one.offset] = self._by_place[one.queue, one.place] = tx, number, one

    def _open(self, key: str, offset: int) -> Transaction:
        """The latest transaction of this key before an offset, if possible an open one."""
        known = self._by_key[key]
        begun = [tx for tx in known if tx.messages[0].halves and tx.first.offset <= offset]
        return ([tx for tx in begun if tx.is_open] or begun or known)[-1]

    def _op(self, one: Raw) -> None:
        for place in one.body.decode().split(",") if one.sound else ():
            if not place:
                continue
            if (one.queue, int(place)) not in self._by_place:
                self._told.add(Kind.OP_WITHOUT_HALF, one.offset)
                continue
            tx, number, half = self._by_place[one.queue, int(place)]
            if half.offset > one.offset:
                self._told.add(Kind.OP_WITHOUT_HALF, one.offset)
            else:
                tx.messages[number].ops.append((one, half))

    def _about(self, one: Raw) -> None:
        """A rollback or resume record, or a parked copy."""
        owner = self._linked(one) or self._without_link(one)
        if owner is None:
            return
        tx, number, _ = owner
        if one.topic == PARKED:
            tx.parked.append(one)
        elif one.bits == PREPARED:
            tx.resumed.append(one)
        else:
            tx.messages[number].rollbacks.append(one)
            self._named(one)

    def _linked(self, one: Raw) -> tuple[Transaction, int, Raw] | None:
        """Whom a record names; 0 is the link of one that names none, and of the half at 0."""
        owner = self._by_half.get(one.link)
        if owner is None or one.link:
            return owner
        is_late = bool({"DELAY", "TIMER_OUT_MS"} & one.properties.keys()) and not _waits(one)
        names_it = bool(one.bits) and not is_late and one.head[-1] == 0
        names_it &= "UNIQ_KEY" not in one.properties or _key(one)[0] == _key(owner[2])[0]
        return owner if names_it else None

    def _without_link(self, one: Raw) -> tuple[Transaction, int, Raw] | None:
        key, number, _ = _key(one)
        known = self._by_key.get(key)
        is_copy = one.topic == PARKED and not one.link  # RocketMQ's, known by its key
        if not (known and is_copy) and not self._log.hides(one.link, one.link + 1):
            parks = one.topic == PARKED or one.bits == PREPARED
            self._told.add(
                Kind.PARKED_WITHOUT_HALF if parks else Kind.DECISION_WITHOUT_HALF, one.offset
            )
        if not known:
            return None
        tx = self._open(key, one.offset)
        return tx, number, tx.first

    def _named(self, one: Raw) -> None:
        """The further halves that a decision names."""
        for text in one.properties.get("TRANSACTION_HALVES", "").split(","):
            if not text or int(text) in self._by_half:
                continue
            if not self._log.hides(int(text), int(text) + 1):
                self._told.add(Kind.DECISION_WITHOUT_HALF, one.offset)

    def _waiting(self, one: Raw) -> None:
        if not _was_half(one) or one.properties.get("REAL_TOPIC", "").startswith("%RETRY%"):
            return
        key, number, _ = _key(one)
        owner = self._linked(one)
        if owner is not None:
            tx, number, _ = owner
            message = tx.messages[number]
            (message.finals if one.sound else message.damaged).append(one)
            self._named(one)
        elif self._by_key.get(key):
            self._open_at(key, one.offset).messages[number].waits.append(one)

    def _open_at(self, key: str, offset: int) -> Transaction:
        known = self._by_key[key]
        return ([tx for tx in known if tx.first.offset <= offset] or known)[-1]

    def _message(self, one: Raw) -> None:
        """A record in an application's topic: a final, or a delivery of another kind."""
        key, number, _ = _key(one)
        owner = self._linked(one)
        if one.link == 0 and owner and owner[0].messages[owner[1]].finals:
            owner = None  # 0 is no link here: another final of the half at 0 came first
        is_final = one.bits == COMMIT and (one.link > 0 or owner is not None)
        if owner is not None and (is_final or one.link > 0):
            tx, number, _ = owner
            message = tx.messages[number]
            if not one.sound:
                message.damaged.append(one)
            else:
                (message.finals if is_final else message.unmarked).append(one)
                self._named(one) if is_final else None
        elif is_final:
            if not one.sound:
                return
            if not self._log.hides(one.link, one.link + 1) or one.link >= one.offset:
                self._told.add(Kind.DECISION_WITHOUT_HALF, one.offset)
            if self._by_key.get(key):
                self._open(key, one.offset).messages[number].finals.append(one)
        elif _was_half(one) and self._by_key.get(key):
            self._arrival(one, key, number)

    def _arrival(self, one: Raw, key: str, number: int) -> None:
        begun = [tx for tx in self._by_key[key] if tx.first.offset <= one.offset]
        for tx in begun:  # of several, one that waits for its delivery
            message = tx.messages[number]
            if sum(map(_waits, message.finals)) > len(message.arrivals):
                message.arrivals.append(one)
                return
        if begun:
            begun[-1].messages[number].arrivals.append(one)


def _key(one: Raw) -> tuple[str, int, int]:
    """The producer group and the unique key, of several messages the leader's; which of them."""
    named = one.properties.get("TRANSACTION_GROUP", "").rsplit(",", 2)
    leader, number, total = (
        (named[0], int(named[1]), int(named[2]))
        if len(named) == 3
        else (one.properties.get("UNIQ_KEY", f"at {one.offset}"), 0, 1)
    )
    return f"{one.properties.get('PGROUP')} {leader}", number, total


def _was_half(one: Raw) -> bool:
    return one.properties.get("TRAN_MSG") == "true" or "TRANSACTION_HALF_ID" in one.properties


def _waits(one: Raw) -> bool:
    return one.topic in (SCHEDULE, TIMER)


# --- what became of it


class _Verdict:
    """Judges one transaction."""

    def __init__(self, log: Log, told: Audit, tx: Transaction) -> None:
        self._log, self._told, self.tx = log, told, tx
        self.first = tx.first
        leader = tx.messages[0]
        self.commits = [one.offset for one in leader.finals]
        # Each decision has the first op after it; of the others RocketMQ's are rollbacks.
        left = sorted(leader.ops, key=lambda op: op[0].offset)
        own = {half.offset for half in leader.halves}
        self.op_of: dict[int, int] = {}
        linked = [*leader.finals, *leader.rollbacks]
        for one in sorted(linked, key=lambda one: (one.link not in own, one.offset)):
            self._take_op(one, left, any_half=one.link not in own)
        for one in (*leader.unmarked, *leader.damaged):
            self._take_op(one, left, any_half=True)
        self.idle = [op for op, _ in left if log.is_ours(op.offset)]
        self.op_rollbacks = [op.offset for op, _ in left if not log.is_ours(op.offset)]
        self.rollbacks = sorted([*(one.offset for one in leader.rollbacks), *self.op_rollbacks])
        self.state, self.decided = State.PENDING, 0

    def _take_op(self, one: Raw, left: list[tuple[Raw, Raw]], *, any_half: bool) -> None:
        for index, (op, half) in enumerate(left):
            if op.offset > one.offset and (any_half or half.offset == one.link):
                self.op_of[one.offset] = op.offset
                del left[index]
                return

    def judge(self, overdue_before_ms: int) -> None:
        self._decide()
        if self.commits:
            self._conflicts()
        self._several()
        for message in self.tx.messages.values():
            self._deliveries(message)
        if self.state is State.PENDING and not self._is_blamed:
            self._waiting(overdue_before_ms)
        self._oddities()
        if self.tx.resumed or any(_checks(half) == 0 for half in self.tx.messages[0].halves[1:]):
            self._resumed()

    _is_blamed = False

    def _oddities(self) -> None:
        """What is there twice, in the wrong place, or at the wrong time."""
        tx = self.tx
        again = [half.offset for half in tx.messages[0].halves if _checks(half) == 0]
        resumed = [*again, *(one.offset for one in tx.resumed)]
        for before, after in pairwise([one.offset for one in tx.parked]):
            if not any(before < one < after for one in resumed):
                self._told.add(Kind.PARKED_TWICE, before, after)
        for number, message in tx.messages.items():
            if len(message.rollbacks) > 1:
                rollbacks = [one.offset for one in message.rollbacks]
                self._told.add(Kind.ROLLED_BACK_TWICE, *rollbacks)
            for half in message.halves:
                if half.queue:
                    self._told.add(Kind.MISPLACED_HALF, half.offset)
                if _key(half)[2] != tx.total and "TRANSACTION_GROUP" in half.properties:
                    self._told.add(Kind.SPLIT_GROUP, self.first.offset, half.offset)
            for half in message.halves[1:] if number else ():
                self._told.add(Kind.DUPLICATE_PREPARE, message.halves[0].offset, half.offset)
            by_offset = {half.offset: half for half in message.halves}
            for final in message.finals:
                own = by_offset.get(final.link)
                if own and own.time > final.time + 1_000:
                    self._told.add(Kind.HALF_AFTER_FINAL, own.offset, final.offset)

    def _decide(self) -> None:
        leader = self.tx.messages[0]
        records = sorted(one.offset for one in leader.rollbacks)
        if self.commits or records:
            self.state = State.COMMITTED if self.commits else State.ROLLED_BACK
            self.decided = min(self.commits or records)
            first = min([*self.commits, *records])
            for op in self.idle[:1]:
                if op.offset < first and not self._may_be_lost(op.offset):
                    self._blame(Kind.MISSING_DECISION, self.first.offset, op.offset)
            return
        followers = [
            final.offset
            for number, message in self.tx.messages.items()
            for final in message.finals
            if number and self._log.is_ours(final.offset)
        ]
        if shown := [one.offset for one in leader.unmarked] or sorted(followers):
            self.state, self.decided = State.COMMITTED, shown[0]
        elif self.op_rollbacks:
            lost = self._may_be_lost(self.op_rollbacks[0])
            self.state = State.UNDETERMINED if lost else State.ROLLED_BACK
        elif leader.damaged:
            self.state = State.UNDETERMINED
        else:
            self._undecided()

    def _undecided(self) -> None:
        leader = self.tx.messages[0]
        asked = max(one.offset for one in (*leader.halves[-1:], *self.tx.resumed[-1:]))
        if self.tx.parked and self.tx.parked[-1].offset > asked:
            self.state = State.PARKED
        every = [
            (op, half)
            for message in self.tx.messages.values()
            for op, half in message.ops
            if self._log.is_ours(op.offset)
        ]
        if not every:
            return
        first_op = min(op.offset for op, _ in every)
        if leader.arrivals or leader.waits:
            self.state = State.COMMITTED
            self.decided = (leader.arrivals or leader.waits)[0].offset
        elif self._may_be_lost(first_op):
            self.state = State.UNDETERMINED
        else:
            self._blame(Kind.MISSING_DECISION, *{half.offset for _, half in every}, first_op)

    def _may_be_lost(self, before: int) -> bool:
        size = 91 + (0 if self._log.is_ours(before) else len(self.first.body))
        return self._log.has_room(size, self.first.offset, before)

    def _blame(self, kind: Kind, *offsets: int) -> None:
        self._is_blamed = True
        self._told.add(kind, *offsets)

    def _conflicts(self) -> None:
        seen = set()
        for rollback in self.rollbacks:
            by_op = rollback in self.op_rollbacks
            last = all(self.op_of.get(one, rollback) < rollback for one in self.commits)
            later = any(one > rollback for one in self.commits)
            after = later or (by_op and not last)
            kind = Kind.COMMIT_AFTER_ROLLBACK if after else Kind.ROLLBACK_AFTER_COMMIT
            if kind not in seen:
                seen.add(kind)
                self._told.add(kind, rollback, *self.commits)

    # --- several messages

    def _several(self) -> None:
        tx, committed = self.tx, self.state is State.COMMITTED
        for number in range(tx.total):
            message = tx.messages[number]
            finals = [one.offset for one in message.finals]
            if committed:
                self._missing(number, message)
            elif finals and self.state is not State.UNDETERMINED:
                self._told.add(Kind.SPLIT_GROUP, self.first.offset, finals[0])
            if number and len(finals) > 1:
                self._told.add(Kind.COMMITTED_TWICE, *finals)

    def _missing(self, number: int, message: Message) -> None:
        there = [*message.finals, *message.arrivals, *message.waits]
        if there or message.unmarked or message.damaged:
            return
        if not message.halves:
            if not self._log.hides(self.first.offset, self.decided):
                self._told.add(Kind.SPLIT_GROUP, self.first.offset, self.decided)
            return
        half = message.halves[0]
        finals = [one.offset for each in self.tx.messages.values() for one in each.finals]
        is_cut_off = max(finals, default=-1) == self._log.last.offset
        excused = (
            self._log.hides(self.decided) or is_cut_off
            if number
            else self._log.hides(half.offset, self.decided)
        )
        if not excused:
            self._told.add(Kind.MISSING_FINAL, half.offset, self.decided)

    # --- what consumers get

    def _deliveries(self, message: Message) -> None:
        halves = {half.offset: half for half in message.halves}
        for one in message.unmarked:
            self._told.add(Kind.UNMARKED_FINAL, message.halves[0].offset, one.offset)
        waiting = [one for one in message.finals if _waits(one)]
        if not waiting and not message.finals and message.waits:
            start, copy = message.halves[0].offset, message.waits[0].offset
            if not self._log.hides(start, copy):
                self._told.add(Kind.UNLINKED_DELIVERY, start, copy)
            waiting = message.waits[:1]
        arrived = message.arrivals if waiting or message.waits else []
        for one in (*message.finals, *message.unmarked, *arrived):
            half = halves.get(one.link, message.halves[0] if message.halves else None)
            if half and half.sound and one.sound and self._differs(half, one, halves):
                self._told.add(Kind.ALTERED_FINAL, half.offset, one.offset)
        if waiting:
            self._delayed(message, waiting)
        elif message.halves and not message.damaged:
            decided = message.finals or message.rollbacks
            for one in message.arrivals:
                if decided or not self._log.hides(message.halves[0].offset, one.offset):
                    self._told.add(Kind.UNLINKED_DELIVERY, message.halves[0].offset, one.offset)

    def _differs(self, half: Raw, one: Raw, halves: Collection[int]) -> bool:
        topic, queue = half.properties["REAL_TOPIC"], int(half.properties["REAL_QID"])
        to_topic, to_queue = one.topic, one.queue
        if _waits(one):
            to_topic, to_queue = one.properties["REAL_TOPIC"], int(one.properties["REAL_QID"])
        moved = to_queue != queue and not self._was_moved(topic, queue, to_queue, one)
        kept = {k: v for k, v in half.properties.items() if k not in MAY_DIFFER}
        final = {k: v for k, v in one.properties.items() if k not in MAY_DIFFER}
        half_id = one.properties.get("TRANSACTION_HALF_ID")
        names_another = half_id and int(half_id[-16:], 16) not in (
            [half.offset] if one.link in halves else halves
        )
        return (
            topic != to_topic
            or moved
            or bool(names_another)
            or (half.body, half.crc, half.head) != (one.body, one.crc, one.head)
            or half.sys_flag & ~BITS != one.sys_flag & ~BITS
            or kept != final
        )

    def _was_moved(self, topic: str, queue: int, to_queue: int, one: Raw) -> bool:
        """Halfmq takes the remainder, by the number of queues that are left."""
        if not self._log.is_ours(one.offset) or 2 * to_queue >= queue:
            return False
        if self._log.queues is None:
            later = (r for r in self._log.records if r.topic == topic and r.offset > one.offset)
            return not any(r.queue >= queue for r in later if not _waits(r))
        present = self._log.queues.get(topic)
        return present is None or queue >= present

    def _delayed(self, message: Message, waiting: list[Raw]) -> None:
        if len(message.arrivals) > len(waiting):
            self._told.add(Kind.DELIVERED_TWICE, *(one.offset for one in message.arrivals))
        last = max((*waiting, *message.waits), key=lambda one: one.offset)
        for wait, arrival in zip(waiting, message.arrivals, strict=False):
            own = [one for one in message.waits if one.offset < arrival.offset]
            mistimed(self._told, self._log, own[-1] if len(waiting) == 1 and own else wait, arrival)
        if not message.arrivals and is_overdue(self._log, last):
            self._told.add(Kind.OVERDUE_DELIVERY, message.halves[0].offset, last.offset)

    # --- what should have gone on

    def _waiting(self, overdue_before_ms: int) -> None:
        halves = self.tx.messages[0].halves
        if halves[0].time < overdue_before_ms:
            self._told.add(Kind.OVERDUE_HALF, *(half.offset for half in halves))
        late = halves[-1].time < self._log.last.time - PARKED_WITHIN_MS
        if (_checks(halves[-1]) or 0) >= CHECKS_MAX and late:
            self._told.add(Kind.LOST_PARKING, *(half.offset for half in halves))

    def _resumed(self) -> None:
        again = [half for half in self.tx.messages[0].halves[1:] if _checks(half) == 0]
        first = min(one.offset for one in (*self.tx.resumed, *again))
        if any(one.offset < first for one in self.tx.parked):
            return
        if not self._log.hides(self.first.offset, first):
            self._told.add(Kind.LOST_PARKING, self.first.offset, first)


def _checks(half: Raw) -> int | None:
    text = half.properties.get("TRANSACTION_CHECK_TIMES")
    return None if text is None else int(text)


def _repeated(told: Audit, verdicts: list[_Verdict]) -> None:
    """Several transactions of one key that were there at the same time."""
    groups: list[list[_Verdict]] = []
    for one in verdicts:
        before = one.first.offset
        anew = groups and all(
            any(at < before for at in other.rollbacks)
            and not any(at < before for at in other.commits)
            for other in groups[-1]
        )
        if groups and not anew:
            groups[-1].append(one)
        else:
            groups.append([one])
    for together in groups:
        if len(together) > 1:
            told.add(Kind.DUPLICATE_PREPARE, *(one.first.offset for one in together))
        commits = [at for one in together for at in one.commits]
        if len(commits) > 1:
            told.add(Kind.COMMITTED_TWICE, *commits)
