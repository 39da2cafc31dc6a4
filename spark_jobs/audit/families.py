"""What became of the transactions of one bucket: from packed events to states and findings.

Nearly all transactions have nothing unusual in them, and what became of these is decided for all at
once with numpy: one half record, or several of one transaction, no check copies, and about them
either nothing or one decision with its ops. The rest goes family by family through ``judge``, which
knows all the rules. The shortcuts here say what it would say.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from ..log.arrays import Bools, Ints
from .events import NO_CHECKS, Records
from .histograms import Histogram
from .judge import Event, Finding, LogBounds, Part, State, Terms, judge
from .timeline import NO_SCALE, Scale, counted

TRANSACTION: Final = np.dtype(
    [
        ("at", "<i8"),  # physical offset of its first half, else of what is there of it
        ("half", "<i8"),  # physical offset of its first half; ABSENT
        ("decided", "<i8"),  # physical offset of the record or op that decided it; ABSENT
        ("took", "<i8"),  # ms from half to decision; ABSENT
        ("time", "<i8"),  # ms, when its first half was stored; ABSENT
        ("label", "<u8"),  # of its half; 0 without one
        ("checks", "<i4"),
        ("halves", "<i4"),
        ("state", "<i4"),  # place in STATES; OPEN
    ]
)
ABSENT: Final = -1
OPEN: Final = -1  # only ``judge`` can tell
STATES: Final = tuple(State)
_COMMITTED: Final = STATES.index(State.COMMITTED)
_ROLLED_BACK: Final = STATES.index(State.ROLLED_BACK)
_PENDING: Final = STATES.index(State.PENDING)
_VOID: Final = (STATES.index(State.EXPIRED), STATES.index(State.UNFOUNDED))


class Told(NamedTuple):
    """A finding, and the physical offset of a record that says whose it is."""

    finding: Finding
    told: int


@dataclass(slots=True)
class Judged:
    """What became of the transactions of one bucket."""

    states: Counter[State]
    findings: list[Told]
    transactions: Records  # TRANSACTION, those that were prepared here
    latencies: Histogram  # ms from half to decision
    checks: Histogram
    times: bytes  # what ``timeline.counted`` returns


def judge_families(
    events: Records, bounds: LogBounds, terms: Terms, scale: Scale = NO_SCALE
) -> Judged:
    """Judge all families of a bucket."""
    families = _Families(events)
    settled = families.settle(terms)
    told: list[Told] = []
    judged = []
    for place, history in families.histories(settled["state"] == OPEN):
        verdict = judge(history, bounds, terms)
        first = history[0].offset
        told += [Told(finding, first) for finding in verdict.findings]
        for one in verdict.transactions:
            half = ABSENT if one.half is None else one.half
            judged.append(
                (
                    first if one.half is None else one.half,
                    half,
                    ABSENT if one.decided is None else one.decided,
                    ABSENT if one.took_ms is None else one.took_ms,
                    _stored(history, half),
                    settled["label"][place],
                    one.checks,
                    one.halves,
                    STATES.index(one.state),
                )
            )
    certain = settled[settled["state"] != OPEN]
    transactions = np.concatenate([certain, np.array(judged, dtype=TRANSACTION)])
    counts = np.bincount(transactions["state"], minlength=len(STATES)).tolist()
    prepared = transactions[~np.isin(transactions["state"], _VOID)]
    return Judged(
        states=Counter(dict(zip(STATES, counts, strict=True))),
        findings=told,
        transactions=prepared,
        latencies=_histogram(prepared, "took", prepared["took"] != ABSENT),
        checks=_histogram(prepared, "checks", prepared["half"] != ABSENT),
        times=_counted(prepared, scale),
    )


def _stored(history: list[Event], half: int) -> int:
    times = (one.time_ms for one in history if one.part is Part.HALF and one.offset == half)
    return next(times, ABSENT)


def _histogram(transactions: Records, what: str, counted: Bools) -> Histogram:
    histogram = Histogram()
    histogram.add(transactions["label"][counted], transactions[what][counted].astype(np.int64))
    return histogram


def _counted(transactions: Records, scale: Scale) -> bytes:
    times, took = transactions["time"], transactions["took"]
    decided = np.where(took == ABSENT, ABSENT, times + took)
    return counted(transactions["state"], times, decided, scale)


class _Part(NamedTuple):
    """The events of one part of transactions."""

    family: Ints
    at: Ints
    reference: Ints
    time: Ints
    counts: Ints  # by family

    def by_family(self, values: Ints) -> Ints:
        """Spread one value of each event over the families; of several events, of any."""
        spread = np.full(len(self.counts), ABSENT, dtype=np.int64)
        spread[self.family] = values
        return spread

    def only(self, families: Bools) -> "_Part":
        """Return the events of some families, by family and in the order of what they name."""
        chosen = families[self.family]
        family, reference = self.family[chosen], self.reference[chosen]
        order = np.lexsort((reference, family))
        at, time = self.at[chosen][order], self.time[chosen][order]
        return _Part(family[order], at, reference[order], time, self.counts)


class _Families:
    """The events of a bucket, sorted by family; families are numbered."""

    def __init__(self, events: Records) -> None:
        self._events = events[np.argsort(events["key"])]
        keys = self._events["key"]
        is_new = np.ones(len(keys), dtype=np.bool_)
        is_new[1:] = keys[1:] != keys[:-1]
        self._family = np.cumsum(is_new) - 1
        self._count = int(is_new.sum())
        self._parts = self._events["part"]

    def _of(self, part: Part) -> _Part:
        places = np.flatnonzero(self._parts == part)
        family, events = self._family[places], self._events[places]
        counts = np.bincount(family, minlength=self._count)
        at, reference, time = (events[name].copy() for name in ("at", "reference", "time"))
        return _Part(family, at, reference, time, counts)

    def histories(self, wanted: Bools) -> Iterator[tuple[int, list[Event]]]:
        """Give the events of some families, each in log order, with the family's number."""
        chosen = wanted[self._family]
        events, family = self._events[chosen], self._family[chosen]
        order = np.lexsort((events["at"], family))
        events, family = events[order], family[order]
        columns = ("part", "at", "reference", "checks", "number", "total", "time")
        history = [
            Event(Part(part), at, reference, None if checks == NO_CHECKS else checks, *rest)
            for part, at, reference, checks, *rest in zip(
                *(events[name].tolist() for name in columns), strict=True
            )
        ]
        bounds = [0, *(np.flatnonzero(np.diff(family)) + 1).tolist(), len(family)]
        for start, end in pairwise(bounds):
            if start < end:
                yield int(family[start]), history[start:end]

    def settle(self, terms: Terms) -> Records:
        """Describe each family as one transaction; what is not certain is OPEN."""
        parts = {part: self._of(part) for part in Part}
        halves = self._events[self._parts == Part.HALF]
        half = parts[Part.HALF]
        settled = np.zeros(self._count, dtype=TRANSACTION)
        settled["state"] = OPEN
        settled["half"] = settled["at"] = half.by_family(half.at)
        settled["time"] = half.by_family(half.time)
        settled["halves"] = half.counts
        settled["label"][half.family] = halves["label"]
        settled["decided"] = settled["took"] = ABSENT
        plain = half.counts > 0
        plain[half.family[halves["checks"] != NO_CHECKS]] = False
        plain &= parts[Part.DISCARD].counts + parts[Part.RESUME].counts == 0
        several = np.zeros(self._count, dtype=np.bool_)
        several[half.family[(halves["number"] > 0) | (halves["total"] > 1)]] = True
        waits = np.zeros(self._count, dtype=np.bool_)  # longer than it should, perhaps
        waits[half.family[_is_suspect(halves, terms)]] = True
        _settle_single(settled, parts, plain & ~several & (half.counts == 1), waits)
        _Several(settled, parts, halves, plain & several & (half.counts > 1)).settle(waits)
        return settled


def _is_suspect(halves: Records, terms: Terms) -> Bools:
    """Tell of which halves, were they undecided, there may be something to say."""
    suspect: Bools = halves["reference"] < terms.passed_slot
    if terms.overdue_before_ms is not None:
        suspect |= halves["time"] < terms.overdue_before_ms
    return suspect


def _settle_single(settled: Records, parts: dict[Part, _Part], chosen: Bools, waits: Bools) -> None:
    """Settle families of one half and at most one decision."""
    op = parts[Part.OP]
    chosen = chosen & (parts[Part.NAMED].counts == 0)
    start, prepared = settled["half"], settled["time"]
    op_at = op.by_family(op.at)
    counts = {part: parts[part].counts for part in (Part.COMMIT, Part.ROLLBACK, Part.OP)}
    undecided = chosen & (sum(counts.values()) == 0) & ~waits
    settled["state"][undecided] = _PENDING
    for part, other, state in (
        (Part.COMMIT, Part.ROLLBACK, _COMMITTED),
        (Part.ROLLBACK, Part.COMMIT, _ROLLED_BACK),
    ):
        decision = parts[part]
        at = decision.by_family(decision.at)
        here = chosen & (counts[part] == 1) & (counts[other] == 0)
        here &= (decision.by_family(decision.reference) == start) & (at > start)
        here &= (counts[Part.OP] == 0) | ((counts[Part.OP] == 1) & (op_at > at))
        _enter(settled, here, state, at, decision.by_family(decision.time) - prepared)
    by_op = chosen & (counts[Part.COMMIT] + counts[Part.ROLLBACK] == 0)
    by_op &= (counts[Part.OP] == 1) & (op_at > start)
    _enter(settled, by_op, _ROLLED_BACK, op_at, op.by_family(op.time) - prepared)


def _enter(settled: Records, here: Bools, state: int, at: Ints, took: Ints) -> None:
    settled["state"][here] = state
    settled["decided"][here] = at[here]
    settled["took"][here] = took[here]


class _Several:
    """Settles families of several messages, of which all halves are there and decided alike."""

    def __init__(
        self, settled: Records, parts: dict[Part, _Part], halves: Records, chosen: Bools
    ) -> None:
        self._settled = settled
        self._parts = parts
        self._count = parts[Part.HALF].counts
        half = parts[Part.HALF]
        wanted = chosen[half.family]
        family, halves = half.family[wanted], halves[wanted]
        order = np.lexsort((halves["at"], family))
        self._family, self._halves = family[order], halves[order]
        is_first = np.ones(len(family), dtype=np.bool_)
        is_first[1:] = self._family[1:] != self._family[:-1]
        starts = np.flatnonzero(is_first)
        self._rank = np.arange(len(family)) - starts[np.cumsum(is_first) - 1]
        self._leaders = self._family[starts]
        settled["at"][self._leaders] = self._halves["at"][starts]
        settled["half"][self._leaders] = self._halves["at"][starts]
        settled["label"][self._leaders] = self._halves["label"][starts]
        settled["time"][self._leaders] = self._halves["time"][starts]
        # Side by side, the first one first.
        self._chosen = _without(chosen, self._family[self._halves["number"] != self._rank])

    def settle(self, waits: Bools) -> None:
        """Enter states for those that are certain."""
        if not len(self._halves):
            return
        counts = {part: self._parts[part].counts for part in Part}
        decisions = counts[Part.COMMIT] + counts[Part.ROLLBACK]
        undecided = self._chosen & (decisions + counts[Part.OP] + counts[Part.NAMED] == 0)
        self._settled["state"][undecided & ~waits] = _PENDING
        # Each half names how many there are; a crash may have cut some off.
        incomplete = self._halves["total"] != self._count[self._family]
        whole = _without(self._chosen, self._family[incomplete])
        committed = whole & (counts[Part.ROLLBACK] == 0)
        committed = self._all_named(committed, Part.COMMIT, self._last + 1)
        self._enter(committed, Part.COMMIT, _COMMITTED)
        rolled_back = whole & (counts[Part.ROLLBACK] == 1) & (counts[Part.COMMIT] == 0)
        self._enter(rolled_back, Part.ROLLBACK, _ROLLED_BACK)

    @cached_property
    def _last(self) -> Ints:
        """Where the last half of each family is."""
        last = np.zeros(len(self._count), dtype=np.int64)
        last[self._family] = self._halves["at"]
        return last

    def _enter(self, here: Bools, part: Part, state: int) -> None:
        """Enter a decision that stands behind all halves, names them, and has all ops or none."""
        decision = self._parts[part]
        is_first = decision.reference == self._settled["half"][decision.family]
        family = decision.family[is_first]
        at = np.full(len(here), ABSENT, dtype=np.int64)
        took = at.copy()
        at[family] = decision.at[is_first]
        took[family] = decision.time[is_first] - self._settled["time"][family]
        here = self._all_named(here & (at > self._last), Part.NAMED, at, further=True)
        has_ops = self._parts[Part.OP].counts > 0
        mirrored = self._all_named(here & has_ops, Part.OP, at + 1)
        _enter(self._settled, (here & ~has_ops) | mirrored, state, at, took)

    def _all_named(self, here: Bools, part: Part, low: Ints, *, further: bool = False) -> Bools:
        """Keep the families of which each half is named once, from ``low`` of the log on.

        ``further`` leaves out the first half of each.
        """
        halves = here[self._family] & ((self._rank > 0) | (not further))
        expected = self._count - further
        same = here & (self._parts[part].counts == expected)
        halves &= same[self._family]
        named = self._parts[part].only(same)
        wrong = named.reference != self._halves["at"][halves]
        wrong |= named.at < low[named.family]
        return _without(same, named.family[wrong])


def _without(families: Bools, excluded: Ints) -> Bools:
    kept = families.copy()
    kept[excluded] = False
    return kept
