"""Attacks with pops: many that wait, many in flight, and many topics of which there are retries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from halfmq.remoting.codes import RequestCode
from tests.support.usual_headers import send_header

from .attacker import Attack, Attacker, frame, pages

HELD_MS: Final = 30_000


def _pop(topic: str, **fields: object) -> bytes:
    usual: dict[str, object] = {
        "consumerGroup": "popping",
        "topic": topic,
        "queueId": -1,
        "maxMsgNums": 1,
        "invisibleTime": 600_000,
        "pollTime": 0,
    }
    header = {name: str(value) for name, value in (usual | fields).items()}
    return frame(RequestCode.POP_MESSAGE, header)


def _send(topic: str) -> bytes:
    return frame(RequestCode.SEND_MESSAGE_V2, send_header(topic=topic), b"x", one_way=True)


def many_held_pops(attacker: Attacker) -> None:
    """Have as many pops held as one connection can ask for, and more with ten others."""
    assert attacker.ask(RequestCode.SEND_MESSAGE_V2, send_header(topic="empty"), b"x") == 0
    attacker.flood(_pop("empty"))
    for _ in range(11):
        attacker.flood(*[_pop("empty", pollTime=HELD_MS) * 1_000] * 10)


def pops_of_a_topic_that_is_deleted(attacker: Attacker) -> None:
    """Pop five thousand messages one by one, then delete their topic."""
    attacker.flood(*pages(5_000, lambda _: _send("popped")))
    wire = attacker.wire()
    while wire.ask(RequestCode.GET_MAX_OFFSET, {"topic": "popped", "queueId": "0"}).code:
        pass
    for _ in range(50):
        wire.send(_pop("popped") * 100)
        answers = 0
        while answers < 100:
            answers += len(wire.receive())
    wire.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "popped"})


def retries_of_many_topics(attacker: Attacker) -> None:
    """Pop a message of each of three thousand topics and let it become visible at once."""
    attacker.flood(*pages(3_000, lambda number: _send(f"retried-{number}")))
    last = {"topic": "retried-2999"}
    while attacker.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, last):
        pass
    pop = pages(3_000, lambda number: _pop(f"retried-{number}", invisibleTime=1))
    attacker.flood(*pop)


POPS: Final[Mapping[str, Attack]] = {
    "many held pops": Attack(many_held_pops),
    "pops of a topic that is deleted": Attack(pops_of_a_topic_that_is_deleted),
    "retries of many topics": Attack(retries_of_many_topics, "0.4 s"),
}
