"""Attacks with look-ups by key, and with the keys that they find."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Thread
from typing import Final

from halfmq.remoting.codes import INT64_MAX, RequestCode
from halfmq.store.format.properties import encode_properties
from tests.support.usual_headers import send_header

from .attacker import Attack, Attacker, frame, pages

KEYS: Final = " ".join(f"{number:x}" for number in range(6_000))
"""Keys of one message: as many as its properties hold."""


def _send(topic: str, keys: str, body: bytes) -> bytes:
    header = send_header(topic=topic, properties=encode_properties({"KEYS": keys}).decode())
    return frame(RequestCode.SEND_MESSAGE_V2, header, body, one_way=True)


def _query(topic: str, key: str) -> bytes:
    fields = {"topic": topic, "key": key, "maxNum": 64, "beginTimestamp": 0}
    header = {name: str(value) for name, value in (fields | {"endTimestamp": INT64_MAX}).items()}
    return frame(RequestCode.QUERY_MESSAGE, header)


def messages_of_many_keys(attacker: Attacker) -> None:
    """Send five hundred messages with six thousand keys each, and look one up at once."""
    message = _send("keyed", KEYS, b"x")
    attacker.flood(*pages(500, lambda _: message, 50))
    wire = attacker.wire()
    wire.send(_query("keyed", "none"))
    wire.receive()


def keys_of_equal_hash(attacker: Attacker) -> None:
    """Look up ``BB``, whose hash is that of ``Aa``, of which there are large messages."""
    attacker.flood(*[_send("equal", "Aa", bytes(3 << 20))] * 64)
    wires = [attacker.wire() for _ in range(30)]
    askers = [Thread(target=wire.send, args=(_query("equal", "BB"),)) for wire in wires]
    for asker in askers:
        asker.start()
    for wire, asker in zip(wires, askers, strict=True):
        wire.receive()
        asker.join()


LOOK_UPS: Final[Mapping[str, Attack]] = {
    "messages of many keys": Attack(messages_of_many_keys, "8.0 s"),
    "keys of equal hash": Attack(keys_of_equal_hash, "0.6 s"),
}
