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
from halfmq.store.format.properties import encode_properties
from tests.support.usual_headers import pull_header, send_header

from .attacker import Attack, Attacker, frame
from .extremes import LARGE, extremes, long_names
from .look_ups import LOOK_UPS
from .machine import MACHINE
from .pops import POPS
from .ports import PORTS
from .stalls import STALLS


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


def unfinished_frames(attacker: Attacker) -> None:
    """Announce seventeen large frames and send all but their last bytes."""
    data = frame(RequestCode.SEND_MESSAGE_V2, send_header(), bytes(LARGE))
    for _ in range(17):
        attacker.flood(memoryview(data)[:-1])


def unread_answers(attacker: Attacker) -> None:
    """Ask eighty times for large messages and for lists, and read none."""
    pull = frame(RequestCode.PULL_MESSAGE, pull_header(topic="probe", queue_offset=20))
    request = pull + frame(RequestCode.GET_ALL_TOPIC_CONFIG, {})
    for _ in range(80):
        attacker.flood(request * 200)


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


def many_held_pulls(attacker: Attacker) -> None:
    """Have as many pulls held as one connection can ask for, and more with ten others."""
    request = frame(RequestCode.PULL_MESSAGE, _held_pull())
    for _ in range(11):
        attacker.flood(*[request * 1_000] * 10)


def held_pulls_with_filters(attacker: Attacker) -> None:
    """Have pulls held that each keep a filter of their own."""
    for number in range(400):
        names = " OR ".join(f"a{number} = {n}" for n in range(250))
        fields = _held_pull(subscription=names, expressionType="SQL92")
        attacker.flood(frame(RequestCode.PULL_MESSAGE, fields))


def large_halves(attacker: Attacker) -> None:
    """Prepare halves with keys and groups of 15 kB, each with its own."""
    wire = attacker.wire()
    for number in range(500):
        for group in ("pg", f"{number}".zfill(15_000)):
            texts = {"TRAN_MSG": "true", "PGROUP": group, "KEYS": f"{number}".zfill(15_000)}
            properties = encode_properties(texts | {"UNIQ_KEY": f"{group[:32]}-{number}"}).decode()
            header = send_header(topic="halves", sys_flag=4, properties=properties)
            wire.ask(RequestCode.SEND_MESSAGE_V2, header, b"half")


def unread_refusals(attacker: Attacker) -> None:
    """Have pulls of topics with long names refused, and read no answer."""
    request = frame(RequestCode.PULL_MESSAGE, _held_pull(topic="t" * 250, extra="x" * 20_000))
    for _ in range(60):
        attacker.flood(*[request] * 100)


ATTACKS: Final[Mapping[str, Attack]] = {
    "pulls with bodies": Attack(pulls_with_bodies, "1,014 MB"),
    "many held pulls": Attack(many_held_pulls, "consumers spun"),
    "held pulls with filters": Attack(
        held_pulls_with_filters, "1,513 MB, kept", {"enablePropertyFilter": True}
    ),
    "large halves": Attack(large_halves, "26 kB a half"),
    "unread refusals": Attack(unread_refusals, "796 MB"),
    "long names": Attack(long_names, "19.6 s, 1,798 MB"),
    "extremes": Attack(extremes),
    "unfinished frames": Attack(unfinished_frames, "others were cut off"),
    "unread answers": Attack(unread_answers, "823 MB"),
    "heartbeat of many tags": Attack(heartbeat_of_many_tags, "11.0 s, 434 MB kept"),
    "new groups": Attack(new_groups, "19.6 s"),
    **STALLS,
    **POPS,
    **PORTS,
    **LOOK_UPS,
    **MACHINE,
}
