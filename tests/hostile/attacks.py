"""The table of attacks on memory. The package's docstring says how to add a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from halfmq.remoting.bodies import (
    ConsumerData,
    HeartbeatData,
    ProducerData,
    encode_heartbeat,
    subscription_data,
)
from halfmq.remoting.codes import RequestCode

from .attacker import Attack, Attacker, frame

LARGE: Final = 15 << 20
"""Bytes of a field, a name or a body that still fits into a frame."""


def _held_pull(**fields: object) -> dict[str, str]:
    return {
        "consumerGroup": "cg",
        "topic": "probe",
        "queueId": "1",
        "queueOffset": "0",
        "maxMsgNums": "32",
        "sysFlag": "6",
        "commitOffset": "0",
        "suspendTimeoutMillis": "30000",
        "subscription": "*",
        "subVersion": "0",
    } | {name: str(value) for name, value in fields.items()}


def pulls_with_bodies(attacker: Attacker) -> None:
    """Have sixty pulls held, half with a large body, half with a large unknown field."""
    text = "x" * LARGE
    for _ in range(30):
        attacker.flood(frame(RequestCode.PULL_MESSAGE, _held_pull(), bytes(LARGE)))
        attacker.flood(frame(RequestCode.PULL_MESSAGE, _held_pull(extra=text)))


def heartbeat_of_many_tags(attacker: Attacker) -> None:
    """Subscribe with two million tags, and with one very long tag."""
    for expression in ("||".join(map(str, range(1_700_000))), "x" * LARGE):
        consumer = ConsumerData(
            group_name="cg", subscription_data_set=(subscription_data("probe", "*"),)
        )
        body = encode_heartbeat(HeartbeatData(client_id="c", consumer_data_set=(consumer,)))
        body = body.replace(b'"subString":"*"', b'"subString":"%b"' % expression.encode())
        attacker.ask(RequestCode.HEART_BEAT, body=body)


def new_groups(attacker: Attacker) -> None:
    """Name five hundred new groups in one heartbeat."""
    data = HeartbeatData(
        client_id="c",
        producer_data_set=(ProducerData(group_name="pg"),),
        consumer_data_set=tuple(ConsumerData(group_name=f"new-{number}") for number in range(500)),
    )
    attacker.ask(RequestCode.HEART_BEAT, body=encode_heartbeat(data))


ATTACKS: Final[Mapping[str, Attack]] = {
    "pulls with bodies": Attack(pulls_with_bodies),
    "heartbeat of many tags": Attack(heartbeat_of_many_tags),
    "new groups": Attack(new_groups),
}
