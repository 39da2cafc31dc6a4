"""Attacks on the time of others: well-formed requests that are many, or long to serve."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Thread
from typing import Final

from halfmq.remoting.bodies import ConsumerData, HeartbeatData, encode_heartbeat, subscription_data
from halfmq.remoting.codes import RequestCode
from tests.support.usual_headers import pull_header, send_header

from .attacker import Attack, Attacker, frame, pages

PROPERTY: Final = ("a" * 32 + "b") * 900
"""A value in which a search for other letters comes far at each place."""


def _heartbeat(client_id: str, group: str) -> bytes:
    consumer = ConsumerData(
        group_name=group, subscription_data_set=(subscription_data("probe", "*"),)
    )
    data = HeartbeatData(client_id=client_id, consumer_data_set=(consumer,))
    return frame(RequestCode.HEART_BEAT, body=encode_heartbeat(data))


def _search(expression: str, topic: str = "probe") -> bytes:
    header = pull_header(topic=topic, subscription=expression, expression_type="SQL92")
    return frame(RequestCode.PULL_MESSAGE, header)


def members_that_leave(attacker: Attacker) -> None:
    """Register 3,000 members of one group on two connections, and close one of them."""
    for number in range(2):
        connected = attacker.connect()
        beats = [_heartbeat(f"{number}-{one}", "leaving") for one in range(1_500)]
        attacker.flood(b"".join(beats), connected=connected)
    connected.close()


def consumers_that_start_together(attacker: Attacker) -> None:
    """Join one group from 300 connections."""
    for number in range(300):
        attacker.flood(_heartbeat(f"c-{number}", "joining"))


def many_look_ups_in_one_write(attacker: Attacker) -> None:
    """Ask for offsets by time, and for undecided transactions, thousands of times at once."""
    offset = {"topic": "probe", "queueId": "0", "timestamp": "1700000000000"}
    look_up = frame(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, offset)
    listing = frame(RequestCode.QUERY_TRANSACTIONS, {"maxCount": "1000"})
    _answered(attacker, look_up + listing, 2_000)


def _answered(attacker: Attacker, request: bytes, count: int) -> None:
    """Send a request, or several, many times in one write, and read the answers."""
    wire = attacker.wire()
    sender = Thread(target=wire.send, args=(request * count,))
    sender.start()
    answers = 0
    while answers < count:
        answers += len(wire.receive())
    sender.join()


def members_asked_for(attacker: Attacker) -> None:
    """Ask for the three thousand members of a group again and again, and 200 times at once."""
    members = {"consumerGroup": "asked"}
    request = frame(RequestCode.GET_CONSUMER_LIST_BY_GROUP, members)
    beats = pages(3_000, lambda one: _heartbeat(f"c-{one}", "asked"))
    attacker.flood(*beats)
    _answered(attacker, request, 300)
    wires = [attacker.wire() for _ in range(200)]
    for wire in wires:
        wire.send(request)
    for wire in wires:
        wire.receive()


def brackets_in_filters(attacker: Attacker) -> None:
    """Pull with 500 filters of brackets and signs, then with one that is right."""
    for sign in "(+-":
        attacker.flood(*[_search(sign * 30_000 + f"a = {number}") for number in range(170)])
    attacker.flood(_search("a = 1"))


def filters_that_match_nothing(attacker: Attacker) -> None:
    """Search messages with large properties for what is not in them, from 60 connections."""
    header = send_header(topic="searched", properties=f"p\x01{PROPERTY}\x02")
    sender = attacker.wire()
    for _ in range(100):
        sender.ask(RequestCode.SEND_MESSAGE_V2, header)
    longest = " OR ".join(f"p CONTAINS '{'a' * 33}{number}'" for number in range(7))
    for number in range(60):
        compared = " OR ".join(f"p > {number + one}" for one in range(250))
        attacker.flood(_search(longest, "searched") * 20 + _search(compared, "searched") * 20)


STALLS: Final[Mapping[str, Attack]] = {
    "members that leave": Attack(members_that_leave, "20.9 s"),
    "consumers that start together": Attack(consumers_that_start_together, "3.4 s"),
    "many look-ups in one write": Attack(many_look_ups_in_one_write, "13.4 s"),
    "members asked for": Attack(members_asked_for, "2.1 s"),
    "brackets in filters": Attack(brackets_in_filters, "minutes"),
    "filters that match nothing": Attack(filters_that_match_nothing, "66 s"),
}
