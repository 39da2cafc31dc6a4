"""Names of topics and groups: system names, and checks of names.

Source: RocketMQ ``TopicValidator.java``, ``MixAll.java``, ``TransactionalMessageUtil.java``.
"""

import re
from collections.abc import Collection
from typing import Final

DEFAULT_TOPIC: Final = "TBW102"  # new topics inherit its permissions
HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
TRANS_CHECK_MAX_TIME_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
SELF_TEST_TOPIC: Final = "SELF_TEST_TOPIC"
OFFSET_MOVED_EVENT_TOPIC: Final = "OFFSET_MOVED_EVENT"
BENCHMARK_TOPIC: Final = "BenchmarkTest"
TRACE_TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"
CHECKPOINT_TOPIC: Final = "CHECKPOINT_TOPIC"
TIMER_TOPIC: Final = "rmq_sys_wheel_timer"

RETRY_PREFIX: Final = "%RETRY%"
DEAD_LETTER_PREFIX: Final = "%DLQ%"
DELAYED_TOPICS: Final = frozenset({SCHEDULE_TOPIC, TIMER_TOPIC})
"""Topics of messages that wait for their delivery; their queue entries hold due times."""

LIGHT_QUEUE_PREFIX: Final = "%LMQ%"
SYSTEM_PREFIX: Final = "rmq_sys_"
SYSTEM_GROUP_PREFIX: Final = "CID_RMQ_SYS_"  # of groups that RocketMQ's brokers consume with

# Key of ``consumerOffset.json`` on a slave of halfmq, topic and group: by "queue", up to where a
# slave had the log (0), and the master's epoch (1).
CONFIRMED_KEY: Final = "HALFMQ_CONFIRMED@CID_HALFMQ"

TOPIC_LENGTH_MAX: Final = 127  # characters; what fits a V1 record's signed length byte
GROUP_TOPIC_LENGTH_MAX: Final = 255  # %RETRY% and %DLQ% topics, which V2 records can hold
# A group is as long as its retry topic allows; RocketMQ 5.3.3 takes 255, later ones 120.
GROUP_LENGTH_MAX: Final = GROUP_TOPIC_LENGTH_MAX - len(RETRY_PREFIX)

# Groups of every broker. Source: RocketMQ ``SubscriptionGroupManager.init``.
BUILT_IN_GROUPS: Final = (
    "TOOLS_CONSUMER",
    "FILTERSRV_CONSUMER",
    "SELF_TEST_C_GROUP",
    "CID_ONS-HTTP-PROXY",
    "CID_ONSAPI_PULL",
    "CID_ONSAPI_PERMISSION",
    "CID_ONSAPI_OWNER",
    "CID_RMQ_SYS_TRANS",
)

SYSTEM_TOPICS: Final = frozenset(
    {
        DEFAULT_TOPIC,
        HALF_TOPIC,
        OP_TOPIC,
        TRANS_CHECK_MAX_TIME_TOPIC,
        SCHEDULE_TOPIC,
        SELF_TEST_TOPIC,
        OFFSET_MOVED_EVENT_TOPIC,
        BENCHMARK_TOPIC,
        TRACE_TOPIC,
        CHECKPOINT_TOPIC,
        TIMER_TOPIC,
    }
)
# Only the broker writes to these; a client that does gets NO_PERMISSION.
CLIENTS_MAY_NOT_SEND: Final = frozenset(
    {
        SCHEDULE_TOPIC,
        HALF_TOPIC,
        OP_TOPIC,
        TRANS_CHECK_MAX_TIME_TOPIC,
        SELF_TEST_TOPIC,
        OFFSET_MOVED_EVENT_TOPIC,
        # RocketMQ lets clients send here; but records decide what is delivered where.
        TIMER_TOPIC,
    }
)

REVIVE_PREFIX: Final = "rmq_sys_REVIVE_LOG_"  # before the name of the cluster

_ALLOWED: Final = "^[%|a-zA-Z0-9_-]+$"
_NAME: Final = re.compile(r"[%|a-zA-Z0-9_-]+")


def is_internal_topic(topic: str, own_names: Collection[str]) -> bool:
    """Return whether a topic is no user's: the broker's own, or retries or dead letters of a group.

    ``own_names`` are the names of brokers and clusters, which are topics of their brokers too.
    """
    of_group = topic.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX))
    return of_group or is_system_topic(topic) or topic in own_names


def revive_topic(cluster: str) -> str:
    """Return the topic of the records of pops in a cluster."""
    return f"{REVIVE_PREFIX}{cluster}"


def is_broker_only(topic: str) -> bool:
    """Return whether only the broker writes to a topic; its records decide what is delivered."""
    return topic in CLIENTS_MAY_NOT_SEND or topic.startswith(REVIVE_PREFIX)


def retry_topic(group: str) -> str:
    """Return the retry topic of a consumer group."""
    return RETRY_PREFIX + group


def dead_letter_topic(group: str) -> str:
    """Return the dead-letter topic of a consumer group."""
    return DEAD_LETTER_PREFIX + group


def reply_topic(cluster: str) -> str:
    """Return the topic for replies of request-reply in a cluster."""
    return f"{cluster}_REPLY_TOPIC"


def is_system_topic(topic: str) -> bool:
    """Return whether the topic belongs to the broker; names made from settings do not count."""
    return topic in SYSTEM_TOPICS or topic.startswith(SYSTEM_PREFIX)


def validate_topic(name: str) -> str | None:
    """Return why the topic name is refused, in RocketMQ's words; None if it is valid."""
    of_group = name.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX))
    return _refusal("topic", name, GROUP_TOPIC_LENGTH_MAX if of_group else TOPIC_LENGTH_MAX)


def validate_group(name: str) -> str | None:
    """Return why the group name is refused, in RocketMQ's words; None if it is valid."""
    return _refusal("group", name, GROUP_LENGTH_MAX)


def _refusal(kind: str, name: str, length_max: int) -> str | None:
    if not name or name.isspace():
        return f"The specified {kind} is blank."
    if not _NAME.fullmatch(name):
        return f"The specified {kind} contains illegal characters, allowing only {_ALLOWED}"
    if len(name) > length_max:
        return f"The specified {kind} is longer than {kind} max length {length_max}."
    return None


def is_text(topic: bytes) -> bool:
    """Return whether the topic of a record is valid UTF-8."""
    try:
        topic.decode()
    except UnicodeDecodeError:
        return False
    return True
