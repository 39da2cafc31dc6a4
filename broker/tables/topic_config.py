"""One topic: its queues and permissions, its entry in `topics.json`, and the built-in topics.

Source: RocketMQ `TopicConfig`, `PermName`, `TopicConfigManager`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from halfmq.store.format.topics import (
    BENCHMARK_TOPIC,
    DEFAULT_TOPIC,
    HALF_TOPIC,
    OFFSET_MOVED_EVENT_TOPIC,
    OP_TOPIC,
    SCHEDULE_TOPIC,
    SELF_TEST_TOPIC,
    TRACE_TOPIC,
    reply_topic,
)

from ..config import TopicDefaults
from .table_file import JsonFields, JsonObject

PERM_READ: Final = 4
PERM_WRITE: Final = 2
PERM_INHERIT: Final = 1  # new topics may copy the settings of this one
PERM_ALL: Final = PERM_READ | PERM_WRITE | PERM_INHERIT


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicConfig:
    """One topic; `unknown` keeps the fields of the file that are not interpreted."""

    name: str
    read_queue_nums: int
    write_queue_nums: int
    perm: int = PERM_READ | PERM_WRITE
    filter_type: str = "SINGLE_TAG"
    sys_flag: int = 0
    order: bool = False
    attributes: Mapping[str, object] = field(default_factory=dict)
    unknown: Mapping[str, object] = field(default_factory=dict)

    @property
    def readable(self) -> bool:
        return self.perm & PERM_READ != 0

    @property
    def writable(self) -> bool:
        return self.perm & PERM_WRITE != 0

    def __str__(self) -> str:
        """As RocketMQ prints it in remarks."""
        rights = "".join(
            letter if self.perm & bit else "-"
            for letter, bit in (("R", PERM_READ), ("W", PERM_WRITE), ("X", PERM_INHERIT))
        )
        attributes = ", ".join(f"{key}={value}" for key, value in self.attributes.items())
        return (
            f"TopicConfig [topicName={self.name}, readQueueNums={self.read_queue_nums}, "
            f"writeQueueNums={self.write_queue_nums}, perm={rights}, "
            f"topicFilterType={self.filter_type}, topicSysFlag={self.sys_flag}, "
            f"order={str(self.order).lower()}, attributes={{{attributes}}}]"
        )

    def to_json(self) -> dict[str, object]:
        return _FIELDS.entry(self, self.unknown)

    @classmethod
    def from_json(cls, name: str, entry: JsonObject) -> TopicConfig:
        """Read an entry; a missing field has the default of RocketMQ's class."""
        made = cls(name=name, read_queue_nums=16, write_queue_nums=16)
        found = _FIELDS.read(entry, made)
        for number in ("read_queue_nums", "write_queue_nums"):
            found[number] = max(0, found[number])
        return replace(made, **found)


_FIELDS: Final = JsonFields(
    TopicConfig, name="topicName", filter_type="topicFilterType", sys_flag="topicSysFlag"
)


def built_in_topics(identity: TopicDefaults, delay_levels: int) -> dict[str, TopicConfig]:
    """Return the topics of an empty broker.

    Source: the constructor of `TopicConfigManager`, without the topics of pop and the timer wheel.
    """
    usual, everything = PERM_READ | PERM_WRITE, PERM_ALL
    rows = [
        (SELF_TEST_TOPIC, 1, usual),
        (BENCHMARK_TOPIC, 1_024, usual),
        (identity.cluster_name, 16, everything),
        (identity.broker_name, 1, everything),
        (OFFSET_MOVED_EVENT_TOPIC, 1, usual),
        (SCHEDULE_TOPIC, max(18, delay_levels), usual),
        (reply_topic(identity.cluster_name), 1, usual),
        (f"rmq_sys_SYNC_BROKER_MEMBER_{identity.broker_name}", 1, PERM_INHERIT),
        (HALF_TOPIC, 1, usual),
        (OP_TOPIC, 1, usual),
    ]
    if identity.auto_create:
        rows.append((DEFAULT_TOPIC, identity.default_queue_nums, everything))
    if identity.trace_topic:
        rows.append((TRACE_TOPIC, 1, usual))
    return {name: simple_topic(name, queues, perm) for name, queues, perm in rows}


def simple_topic(name: str, queues: int, perm: int) -> TopicConfig:
    """Return a topic with as many read as write queues and defaults for the rest."""
    return TopicConfig(name=name, read_queue_nums=queues, write_queue_nums=queues, perm=perm)
