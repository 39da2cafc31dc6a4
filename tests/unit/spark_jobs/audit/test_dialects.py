"""Which parts of a log which broker wrote, told by the marks that only one of them leaves."""

from __future__ import annotations

import pytest

from halfmq.spark_jobs.audit.dialects import END, Mark, recorded_rollbacks

CASES = {
    "no marks": ("", ()),
    "RocketMQ's finals": ("10-f 20-f", ()),
    "our finals": ("10+f 20+", ((0, END),)),
    "RocketMQ's finals, then ours": ("10-f 20+f", ((20, END),)),
    "finals of nobody, among our records": ("10-f 20+ 30-f 40+", ((20, END),)),
    "RocketMQ's throughout": ("10- 20-", ()),
    "ours throughout": ("10+f 20+", ((0, END),)),
    "RocketMQ's, then ours": ("10- 20- 30+ 40+", ((30, END),)),
    "ours, then RocketMQ's": ("10+f 20+ 30-f 40-", ((0, 21),)),
    "in turn": ("10- 20+ 30+ 40- 50+", ((20, 31), (50, END))),
}


@pytest.mark.parametrize("name", CASES)
def test_what_lies_between_marks_of_both_is_nobodys(name: str) -> None:
    """An op there may be a rollback of RocketMQ's, so its half is not missing a decision."""
    text, expected = CASES[name]
    marks = [
        Mark(int(mark.rstrip("+-f")), is_ours="+" in mark, is_final="f" in mark)
        for mark in text.split()
    ]

    assert recorded_rollbacks(marks) == expected
    assert recorded_rollbacks(marks[::-1]) == expected
