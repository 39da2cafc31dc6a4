"""Handles of messages that wait for their delivery, by which they are recalled.

The text is RocketMQ's: URL-safe base64 of ``v1 TOPIC BROKER TIME UNIQ_KEY``. Its clients read these
five fields and ignore more; a halfmq broker adds the place where the message waits.

Source: RocketMQ ``RecallMessageHandle``.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Final, NamedTuple

_VERSION: Final = "v1"


class RecallHandle(NamedTuple):
    """What a handle names."""

    topic: str
    broker_name: str
    deliver_ms: int  # milliseconds since 1970, cut to a second, plus one
    unique_key: str
    place: int = -1  # the broker's own number; -1 if RocketMQ made the handle: it is not named

    def encode(self) -> str:
        """Return the text that the broker answers and a client sends back."""
        return urlsafe_b64encode(" ".join(map(str, (_VERSION, *self))).encode()).decode()


def parse_recall_handle(text: str) -> RecallHandle:
    """Return what a handle names.

    Raises:
        ValueError: It is no handle.
    """
    version, topic, broker_name, deliver_ms, unique_key, *more = (
        urlsafe_b64decode(text).decode().split(" ")
    )
    if version != _VERSION:
        raise ValueError(f"version {version:.9}, expected {_VERSION}")
    return RecallHandle(topic, broker_name, int(deliver_ms), unique_key, *map(int, more[:1]))
