"""Headers of sends and pulls, filled as most clients fill them.

A test names the fields that its case is about.
"""

from __future__ import annotations

from typing import Any, Final

from halfmq.remoting.headers import PullMessageRequestHeader, SendMessageRequestHeaderV2
from tests.support.broker_doubles import START_MS

_SEND: Final[dict[str, Any]] = {
    "producer_group": "pg",
    "topic": "orders",
    "default_topic": "TBW102",
    "default_topic_queue_nums": 4,
    "queue_id": 0,
    "sys_flag": 0,
    "born_timestamp": START_MS,
    "flag": 0,
}
_PULL: Final[dict[str, Any]] = {
    "consumer_group": "cg",
    "topic": "orders",
    "queue_id": 0,
    "queue_offset": 0,
    "max_msg_nums": 32,
    "sys_flag": 4,  # with a subscription
    "commit_offset": 0,
    "suspend_timeout_millis": 0,
    "subscription": "*",
    "sub_version": 0,
}


def send_header(**fields: Any) -> SendMessageRequestHeaderV2:
    """Return the header of a send with some fields; the others have their usual values."""
    return SendMessageRequestHeaderV2(**_SEND | fields)


def pull_header(**fields: Any) -> PullMessageRequestHeader:
    """Return the header of a pull with some fields; the others have their usual values."""
    return PullMessageRequestHeader(**_PULL | fields)
