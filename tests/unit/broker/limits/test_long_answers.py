"""A few connections at a time collect a long answer."""

from __future__ import annotations

import pytest

from halfmq.broker.errors import UnfinishedError
from halfmq.broker.limits.kept import LONG_ANSWERS
from halfmq.broker.limits.long_answers import LongAnswers
from tests.support.broker_doubles import FakeConnection


def test_others_wait_until_an_answer_is_complete_and_keep_nothing_meanwhile() -> None:
    """Hundreds of lists of megabytes would otherwise be in memory at the same time."""
    answers, resumed = LongAnswers(), list[str]()
    first, *_ = collecting = [FakeConnection() for _ in range(LONG_ANSWERS.most)]
    for one in collecting:
        answers.begin(one)
        assert answers.next_turn(one).until is None
    waiting = FakeConnection()
    waiting.unfinished = object()  # what was collected in the first turn

    wait = answers.next_turn(waiting).until
    assert waiting.unfinished is answers
    assert wait is not None
    wait(lambda: resumed.append("waiting"))
    with pytest.raises(UnfinishedError) as again:
        answers.begin(waiting)
    assert again.value.until is not None
    assert not resumed

    answers.end(first)
    assert resumed == ["waiting"]
    answers.begin(waiting)
    assert answers.next_turn(waiting).until is None
    assert len(answers) == LONG_ANSWERS.most
