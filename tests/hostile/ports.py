"""Attacks with other protocols, on the ports of clients and of HTTP, and with pops and delays."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Final

from halfmq.remoting.codes import RequestCode
from halfmq.store.format.properties import encode_properties
from tests.support.usual_headers import send_header

from .attacker import Attack, Attacker, frame, pages

HTTP_PORT: Final = 19_877
"""Of the rows that attack HTTP: one that the broker picks is not known to the attacker."""

_GET: Final = b"GET /metrics HTTP/1.1\r\nHost: x\r\n"


def http_connections(attacker: Attacker) -> None:
    """Open a thousand connections that send nothing or little, then ask for metrics at once."""
    for number in range(1_000):
        attacker.flood(_GET if number % 2 else b"", port=HTTP_PORT)
    for _ in range(20):
        attacker.flood((_GET + b"\r\n") * 3_000, port=HTTP_PORT)


def http_heads_and_bodies(attacker: Attacker) -> None:
    """Send endless headers, lines and bodies."""
    piece = b"a" * (256 << 10)
    many = b"".join(b"H%d: x\r\n" % number for number in range(10_000))
    post = b"POST /metrics HTTP/1.1\r\nHost: x\r\n"
    for _ in range(20):
        attacker.flood(_GET + b"X: ", *[piece] * 64, port=HTTP_PORT)
        attacker.flood(_GET, *[many] * 10, port=HTTP_PORT)
        attacker.flood(b"GET /" + piece * 4 + b" HTTP/1.1\r\n\r\n", port=HTTP_PORT)
        sized = post + b"Content-Length: 1000000000\r\nContent-Encoding: gzip\r\n\r\n"
        attacker.flood(sized, *[piece] * 64, port=HTTP_PORT)
        chunked = post + b"Transfer-Encoding: chunked\r\n\r\n"
        attacker.flood(chunked, *[b"40000\r\n" + piece + b"\r\n"] * 64, port=HTTP_PORT)


def other_protocols(attacker: Attacker) -> None:
    """Begin HTTP/2, TLS and HTTP with the port of clients, hundreds of times each."""
    for _ in range(300):
        for begin in (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\0\x01", _GET):
            attacker.flood(begin)


def many_delayed_messages(attacker: Attacker) -> None:
    """Have a hundred thousand messages delivered in the same second, and recall invented ones."""
    due = str(int((time.time() + 5) * 1_000))
    properties = encode_properties({"TIMER_DELIVER_MS": due}).decode()
    header = send_header(topic="delayed", properties=properties)

    def send(number: int) -> bytes:
        return frame(RequestCode.SEND_MESSAGE_V2, header, b"x", opaque=number, one_way=True)

    attacker.flood(*pages(100_000, send))

    def recall(number: int) -> bytes:
        handle = f"v1 delayed broker-a {due} {number:032X}"
        fields = {"producerGroup": "pg", "topic": "delayed", "recallHandle": handle}
        return frame(RequestCode.RECALL_MESSAGE, fields, opaque=number)

    attacker.flood(*pages(50_000, recall))
    time.sleep(6)


def invented_handles(attacker: Attacker) -> None:
    """Acknowledge and change messages that nobody has popped, a hundred thousand times."""
    with contextlib.suppress(OSError):
        attacker.ask(RequestCode.SEND_MESSAGE_V2, send_header(topic="handles"), b"x")
    now = int(time.time() * 1_000)

    def invented(number: int) -> bytes:
        info = f"{number % 100} {now} 60000 0 0 broker-a 0 {number}"
        fields = {
            "consumerGroup": "popping",
            "topic": "handles",
            "queueId": "0",
            "extraInfo": info,
            "offset": str(number),
            "invisibleTime": "1000",
        }
        codes = RequestCode.ACK_MESSAGE, RequestCode.CHANGE_MESSAGE_INVISIBLETIME
        return frame(codes[number % 2], fields, opaque=number)

    attacker.flood(*pages(100_000, invented))


def request_reply_flood(attacker: Attacker) -> None:
    """Send replies of a megabyte to clients that do not exist."""
    properties = encode_properties({"REPLY_TO_CLIENT": "nobody", "CORRELATION_ID": "1"}).decode()
    header = send_header(topic="DefaultCluster_REPLY_TOPIC", properties=properties)
    request = frame(RequestCode.SEND_REPLY_MESSAGE_V2, header, bytes(1 << 20))
    for _ in range(20):
        attacker.flood(*[request] * 20)


_HTTP: Final = {"httpListenPort": HTTP_PORT}

PORTS: Final[Mapping[str, Attack]] = {
    "http connections": Attack(http_connections, "probes kept out", _HTTP),
    "http heads and bodies": Attack(http_heads_and_bodies, settings=_HTTP),
    "other protocols": Attack(other_protocols),
    "many delayed messages": Attack(many_delayed_messages),
    "invented handles": Attack(invented_handles),
    "request-reply flood": Attack(request_reply_flood),
}
