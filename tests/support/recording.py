"""A recording of official peers: its steps in order, and what it leaves out.

Recordings keep one of several requests of the same shape, and begin in the middle of a broker's
life. ``tests/golden/frames/left_out.json.gz`` has what their answers presuppose all the same, by
the line that needs it: tables that the broker starts with, messages, heartbeats, half messages.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict, deque
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from halfmq.remoting.codes import FLAG_ONE_WAY, FLAG_RESPONSE, RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import ProtocolError
from halfmq.remoting.framing import FrameDecoder
from halfmq.store.format.ids import parse_offset_message_id
from halfmq.store.format.record import Record, decode_records
from tests.support.frames import FRAMES, recorded

SENDS: Final = {
    RequestCode.SEND_MESSAGE,
    RequestCode.SEND_MESSAGE_V2,
    RequestCode.SEND_BATCH_MESSAGE,
}
PULLS: Final = {RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE}
WITH_RECORDS: Final = PULLS | {RequestCode.VIEW_MESSAGE_BY_ID, RequestCode.QUERY_MESSAGE}

LEFT_OUT: Final = FRAMES / "left_out.json.gz"

QueueKey = tuple[str, int]


@dataclass
class Step:
    """One line: a request or garbage of a client, an answer to it, or a server's own request."""

    number: int
    connection: int
    frame: bytes
    is_from_client: bool
    command: RemotingCommand | None  # None: no valid frame, or one that ends the connection
    request: Step | None = None  # of an answer
    answer: Step | None = None  # of a request

    @property
    def is_answer(self) -> bool:
        return not self.is_from_client and self.request is not None


def steps_of(file: str) -> list[Step]:
    """Return the lines of a recording of clients and servers, answers paired with requests."""
    steps: list[Step] = []
    asked: dict[int, deque[Step]] = defaultdict(deque)
    for number, line in enumerate(recorded(file)):
        here, _, there = line.direction.partition("→")
        assert "client" in (here, there), f"{file} is a recording between servers"
        step = Step(number, line.connection, line.frame, here == "client", command_in(line.frame))
        steps.append(step)
        is_response = bool((line.flag or 0) & FLAG_RESPONSE)
        if step.is_from_client and step.command is not None and not is_response:
            if not step.command.flag & FLAG_ONE_WAY:
                asked[line.connection].append(step)
        elif not step.is_from_client and is_response:
            request = _request_of(step, asked[line.connection])
            if request is not None:
                step.request, request.answer = request, step
    return steps


def command_in(frame: bytes) -> RemotingCommand | None:
    try:
        commands = FrameDecoder().receive_data(frame)
    except ProtocolError:
        return None
    return commands[0] if len(commands) == 1 else None


def _request_of(answer: Step, waiting: deque[Step]) -> Step | None:
    """Find the request, for the official server of one without opaque by taking the oldest."""
    assert answer.command is not None
    for accepted in (answer.command.opaque, 0):
        for request in waiting:
            if request.command is not None and request.command.opaque == accepted:
                waiting.remove(request)
                return request
    return None


def records_of(step: Step) -> list[Record]:
    """Return the records that an answer carries."""
    if step.request is None or step.request.command is None or step.command is None:
        return []
    if step.request.command.code not in WITH_RECORDS or step.command.code != 0:
        return []
    return decode_records(step.command.body)


def answer_fields(step: Step) -> dict[str, str]:
    """Return the ext fields of an answer."""
    assert step.command is not None
    return step.command.header if isinstance(step.command.header, dict) else {}


def offsets_in_ids(msg_ids: str) -> list[int]:
    """Return the physical offsets in offset message ids joined by commas."""
    return [parse_offset_message_id(one)[1] for one in msg_ids.split(",")]


# --- places


class Half(NamedTuple):
    """Where a half message lies here."""

    physical_offset: int
    queue_offset: int


class Places:
    """Recorded places in the log, and ours."""

    def __init__(self) -> None:
        self.physical: dict[int, int] = {}
        self.halves: dict[int, Half] = {}  # by recorded physical offset
        self.halves_by_key: dict[str, Half] = {}
        self._shifts: dict[QueueKey, list[tuple[int, int]]] = defaultdict(list)

    def note_shift(self, queue: QueueKey, recorded: int, ours: int) -> None:
        """Note which queue offset of ours is the like of a recorded one."""
        self._shifts[queue].append((recorded, ours - recorded))

    def shift(self, queue: QueueKey, recorded: int) -> int:
        """Return what to add to a recorded queue offset."""
        known = [shift for start, shift in self._shifts[queue] if start <= recorded]
        return known[-1] if known else 0


# --- what is left out


class Addition(NamedTuple):
    """A request that the recording leaves out, or messages of a queue; the other part is empty."""

    frame: bytes
    queue: QueueKey
    at: int  # the queue's end before; it gets there by itself
    records: list[Record]  # as they were recorded, or with body "left out" and offset -1


class LeftOut(NamedTuple):
    """What a recording leaves out."""

    tables: dict[str, Any]  # topics, groups and offsets that the broker starts with
    additions: dict[int, list[Addition]]  # by the number of the line right before which they belong


def left_out_of(file: str) -> LeftOut:
    """Return what a recording of clients leaves out."""
    found = _left_out().get(file, {})
    additions: dict[int, list[Addition]] = defaultdict(list)
    for step in found.get("steps", ()):
        additions[step["line"]].append(_addition(step))
    return LeftOut(found, additions)


@cache
def _left_out() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(gzip.decompress(LEFT_OUT.read_bytes()))
    return content


def _addition(step: dict[str, Any]) -> Addition:
    if "frame" in step:
        return Addition(bytes.fromhex(step["frame"]), ("", 0), 0, [])
    topic, queue_id = step["queue"]
    records = decode_records(bytes.fromhex(step["records"]))
    return Addition(b"", (topic, queue_id), step["at"], records)


def lay_down(content: dict[str, Any], root: Path) -> None:
    """Write tables into a broker's directory."""
    tables = root / "config"
    tables.mkdir(parents=True)
    for name, table, key in (
        ("topics.json", "topicConfigTable", "topics"),
        ("subscriptionGroup.json", "subscriptionGroupTable", "groups"),
        ("consumerOffset.json", "offsetTable", "offsets"),
    ):
        (tables / name).write_text(json.dumps({table: content.get(key, {})}))
