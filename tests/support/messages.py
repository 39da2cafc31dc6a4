"""What golden stores hold, told from their truth in plain Python: who sees which message."""

import base64
import ipaddress
from collections.abc import Iterable
from typing import Any

HALF = "RMQ_SYS_TRANS_HALF_TOPIC"
OP = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
ROLES = {
    HALF: "half",
    OP: "op",
    "TRANS_CHECK_MAX_TIME_TOPIC": "parked",
    "SCHEDULE_TOPIC_XXXX": "delayed",
    "rmq_sys_wheel_timer": "delayed",
}
Told = dict[str, Any]


def role(topic: str) -> str:
    """What the records of a topic are to somebody who counts messages."""
    if topic.startswith("%"):
        return "retry" if topic.startswith("%RETRY%") else "dead_letter"
    return ROLES.get(topic, "system" if topic.startswith("rmq_sys_") else "message")


def visible(messages: Iterable[Told]) -> list[Told]:
    """Those in topics of applications."""
    return [message for message in messages if role(message["topic"]) == "message"]


def count(message: Told) -> int:
    """How many messages a record is."""
    return int(message["properties"]["INNER_NUM"]) if message["sysFlag"] & 0x80 else 1


def body(message: Told) -> bytes:
    return base64.b64decode(message["body"])


def host(message: Told) -> str:
    """Where a message was born, as the source spells addresses, without the port."""
    address = ipaddress.ip_address(message["bornHost"].partition("|")[0])
    return f"[{address}]" if address.version == 6 else str(address)
