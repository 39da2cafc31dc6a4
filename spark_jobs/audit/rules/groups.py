"""Rules about what belongs together: several messages of one transaction, and repeated prepares."""

from collections.abc import Iterable, Sequence

from .decisions import AcceptedDecision, Outcome
from .histories import History, MessageHistory
from .model import AuditedState, Finding, Kind, LogBounds

# --- several messages


def unlike_the_leader(outcome: Outcome, bounds: LogBounds) -> Iterable[Finding]:
    """Find messages of several that were not decided like the others."""
    history = outcome.history
    if history.half is None:
        yield from _without_leader(history, bounds)
        return
    for number in sorted({*range(history.total), *history.messages}):
        message = history.messages.get(number, MessageHistory())
        which = f"message {number + 1} of {history.total}"
        finals = message.commits
        if outcome.state is AuditedState.COMMITTED:
            yield from _unlike_a_commit(outcome, number, message, bounds)
        elif finals and outcome.state is not AuditedState.UNDETERMINED:
            state = "rolled back" if outcome.rollbacks else "undecided"
            detail = f"{which} was committed, the first is {state}"
            yield Finding(Kind.SPLIT_GROUP, [history.half.offset, finals[0].offset], detail)
        for half in message.halves[1:] if number else ():
            detail = f"{which} was prepared twice"
            offsets = [message.halves[0].offset, half.offset]
            yield Finding(Kind.DUPLICATE_PREPARE, offsets, detail)
        for half in message.halves:
            if half.total != history.total and not half.check_times:
                detail = f"{which} says that there are {half.total}"
                yield Finding(Kind.SPLIT_GROUP, [history.half.offset, half.offset], detail)
        if number and len(finals) > 1:  # ``repeated`` reports several of the first
            detail = f"{len(finals)} final messages of {which}"
            yield Finding(Kind.COMMITTED_TWICE, [final.offset for final in finals], detail)


def _unlike_a_commit(
    outcome: Outcome, number: int, message: MessageHistory, bounds: LogBounds
) -> Iterable[Finding]:
    """Find a message of a committed transaction that consumers do not get."""
    history, decided = outcome.history, outcome.decided
    assert history.half is not None
    assert decided is not None
    delivered = message.commits or message.delivered or message.waiting
    if delivered or message.unmarked or message.damaged:  # these may stand for its final
        return
    if message.half is None:
        if not bounds.hides(history.half.offset, decided.offset):
            detail = f"committed, but the log has no half message {number + 1} of {history.total}"
            yield Finding(Kind.SPLIT_GROUP, [history.half.offset, decided.offset], detail)
        return
    if number:  # its final comes after that of the leader, which decides
        may_come = bounds.hides(decided.offset) or _ends_the_log(history, bounds)
    else:
        may_come = bounds.hides(message.half.offset, decided.offset)
    if not may_come:
        detail = f"committed, but message {number + 1} of {history.total} has no final message"
        yield Finding(Kind.MISSING_FINAL, [message.half.offset, decided.offset], detail)


def _ends_the_log(history: History, bounds: LogBounds) -> bool:
    """Tell whether the log ends amid the final messages, so that the next start adds the rest."""
    finals = [final.offset for message in history.messages.values() for final in message.commits]
    return max(finals, default=None) == bounds.last_offset


def _without_leader(history: History, bounds: LogBounds) -> Iterable[Finding]:
    offsets = [
        half.offset for number, one in history.messages.items() if number for half in one.halves
    ]
    if offsets and not bounds.hides(0, min(offsets)):
        detail = (
            "half messages of a transaction of several, without the first, which decides for all"
        )
        yield Finding(Kind.SPLIT_GROUP, sorted(offsets), detail)


# --- one message prepared several times


def overlapping(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    """Put transactions together that were there at the same time.

    What is prepared once more after a rollback is another transaction: the producer began anew.
    """
    groups: list[list[Outcome]] = []
    for outcome in outcomes:
        half = outcome.history.half
        if half and groups and not all(_was_rolled_back(o, half.offset) for o in groups[-1]):
            groups[-1].append(outcome)
        else:
            groups.append([outcome])
    return groups


def _was_rolled_back(outcome: Outcome, before: int) -> bool:
    rollbacks = [rollback for rollback in outcome.rollbacks if rollback.offset < before]
    return bool(rollbacks) and not any(commit.offset < before for commit in outcome.commits)


def repeated(together: Sequence[Outcome]) -> Iterable[Finding]:
    """Find messages that were prepared, or committed, more than once."""
    if len(together) > 1:
        detail = f"prepared {len(together)} times: none of the half messages is the copy of a check"
        offsets = [outcome.history.half.offset for outcome in together if outcome.history.half]
        yield Finding(Kind.DUPLICATE_PREPARE, offsets, detail)
    commits: list[AcceptedDecision] = [commit for outcome in together for commit in outcome.commits]
    if len(commits) > 1:
        offsets = sorted(commit.offset for commit in commits)
        detail = f"{len(commits)} final messages: consumers see each of them"
        yield Finding(Kind.COMMITTED_TWICE, offsets, detail)
