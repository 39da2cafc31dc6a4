"""Handles of popped messages, and what a pop's answer tells to make them.

A handle (RocketMQ's ``extraInfo``, property ``POP_CK``) has eight fields with blanks between them:
begin of the checkpoint, pop time, invisible time, revive queue, kind of topic, broker, queue and
queue offset. Clients of halfmq send it back unread.

Source: RocketMQ ``ExtraInfoUtil``, ``KeyBuilder``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

ORDER_QUEUE: Final = 999
"""The revive queue in handles of messages that were popped in order: they have no checkpoint."""

_RETRY_PREFIX: Final = "%RETRY%"


class PopHandle(NamedTuple):
    """One delivery of a message."""

    start: int  # queue offset at which the checkpoint begins
    pop_ms: int
    invisible_ms: int
    revive_queue: int
    kind: str  # see `kind_of`
    broker_name: str
    queue_id: int
    offset: int

    def __str__(self) -> str:
        return " ".join(map(str, self))


def parse_handle(text: str, offset: int) -> PopHandle:
    """Return the handle of the message at a queue offset; old clients leave that out of the text.

    Raises:
        ValueError: This is no handle.
    """
    fields = text.split(" ")
    if not 7 <= len(fields) <= 8:
        raise ValueError(f"{len(fields)} fields")
    start, pop_ms, invisible_ms, revive_queue = map(int, fields[:4])
    return PopHandle(
        start, pop_ms, invisible_ms, revive_queue, fields[4], fields[5], int(fields[6]), offset
    )


def pop_retry_topic(topic: str, group: str, *, version_2: bool = False) -> str:
    """Return the topic of messages of ``topic`` that the group has not acknowledged in time."""
    return f"{_RETRY_PREFIX}{group}{'+' if version_2 else '_'}{topic}"


def kind_of(topic: str) -> str:
    """Return 0 for an ordinary topic; 1 or 2 for a retry topic of that version."""
    if not topic.startswith(_RETRY_PREFIX):
        return "0"
    return "2" if "+" in topic else "1"


def topic_of_kind(kind: str, topic: str, group: str) -> str:
    """Return the topic in which a message of ``topic`` was popped."""
    return topic if kind == "0" else pop_retry_topic(topic, group, version_2=kind == "2")


def offsets_text(kind: str, queue_id: int, offsets: Sequence[int]) -> str:
    """Return what a pop's answer says about the messages of one queue."""
    return f"{kind} {queue_id} {','.join(map(str, offsets))}"


def parse_offsets(text: str | None) -> dict[tuple[str, int], list[int]]:
    """Return offsets by kind of topic and queue id.

    Raises:
        ValueError: The text is damaged.
    """
    found: dict[tuple[str, int], list[int]] = {}
    for part in (text or "").split(";"):
        if part:
            kind, queue_id, offsets = part.split(" ")
            found[kind, int(queue_id)] = [int(one) for one in offsets.split(",")]
    return found
