"""Headers of sent messages, as most clients fill them."""

from __future__ import annotations

from typing import Any, Final

from halfmq.remoting.headers import SendMessageRequestHeaderV2
from tests.support.broker_doubles import START_MS

_USUAL: Final[dict[str, Any]] = {
    "producer_group": "pg",
    "topic": "orders",
    "default_topic": "TBW102",
    "default_topic_queue_nums": 4,
    "queue_id": 0,
    "sys_flag": 0,
    "born_timestamp": START_MS,
    "flag": 0,
}


def send_header(**fields: Any) -> SendMessageRequestHeaderV2:
    """Return the header of a send with some fields; the others have their usual values."""
    return SendMessageRequestHeaderV2(**_USUAL | fields)
