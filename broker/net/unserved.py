"""Requests of RocketMQ 5.3.3 that are not served, and why; the answer says so.

``docs/compatibility.md`` lists the same: ``python -m tests.compatibility`` writes it.

Source: RocketMQ 5.3.3 ``RequestCode``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class Unserved(NamedTuple):
    """A request that is refused."""

    name: str
    why: str


_NOT_IN_ROCKETMQ: Final = "RocketMQ 5.3.3 does not serve it either"
_TIMER: Final = "there is no timer wheel; QUERY_TIMERS (9005) lists messages that wait"
_POP: Final = "pops are not undone; CHANGE_MESSAGE_INVISIBLETIME makes a message visible again"
_ROCKS: Final = "there is no RocksDB; tables are JSON files, and queues are those of RocketMQ"
_REPLICAS: Final = "there is no replication; this broker is a master without slaves"
_CONTROLLER: Final = "there is no controller; this broker has no replicas of which to elect one"
_CONTAINER: Final = "this process is one broker and no container of brokers"
_COLD: Final = "cold reads are paced without settings; docs/operations.md says how"
_USERS: Final = "there are no users; authenticationEnabled=true in broker.conf keeps some"
_ACCOUNTS: Final = "there is no plain_acl.yml; aclEnable=true in broker.conf reads it"

UNSERVED: Final[Mapping[int, Unserved]] = {
    13: Unserved("QUERY_BROKER_OFFSET", _NOT_IN_ROCKETMQ),
    22: Unserved("GET_TOPIC_CONFIG_LIST", _NOT_IN_ROCKETMQ),
    23: Unserved("GET_TOPIC_NAME_LIST", _NOT_IN_ROCKETMQ),
    27: Unserved("TRIGGER_DELETE_FILES", _NOT_IN_ROCKETMQ),
    47: Unserved("GET_CLIENT_CONFIG", _NOT_IN_ROCKETMQ),
    60: Unserved("GET_TIMER_CHECK_POINT", _TIMER),
    61: Unserved("GET_TIMER_METRICS", _TIMER),
    209: Unserved("SUSPEND_CONSUMER", _NOT_IN_ROCKETMQ),
    210: Unserved("RESUME_CONSUMER", _NOT_IN_ROCKETMQ),
    211: Unserved("RESET_CONSUMER_OFFSET_IN_CONSUMER", _NOT_IN_ROCKETMQ),
    212: Unserved("RESET_CONSUMER_OFFSET_IN_BROKER", _NOT_IN_ROCKETMQ),
    213: Unserved("ADJUST_CONSUMER_THREAD_POOL", _NOT_IN_ROCKETMQ),
    214: Unserved("WHO_CONSUME_THE_MESSAGE", _NOT_IN_ROCKETMQ),
    301: Unserved("REGISTER_FILTER_SERVER", _NOT_IN_ROCKETMQ),
    302: Unserved("REGISTER_MESSAGE_FILTER_CLASS", _NOT_IN_ROCKETMQ),
    354: Unserved("CHECK_ROCKSDB_CQ_WRITE_PROGRESS", _ROCKS),
    355: Unserved("EXPORT_ROCKSDB_CONFIG_TO_JSON", _ROCKS),
    513: Unserved(
        "UPDATE_AND_CREATE_STATIC_TOPIC",
        "there are no static topics; each queue is one queue of this broker",
    ),
    902: Unserved("ADD_BROKER", _CONTAINER),
    903: Unserved("REMOVE_BROKER", _CONTAINER),
    905: Unserved("NOTIFY_MIN_BROKER_ID_CHANGE", _REPLICAS),
    906: Unserved("EXCHANGE_BROKER_HA_INFO", _REPLICAS),
    907: Unserved("GET_BROKER_HA_STATUS", _REPLICAS),
    908: Unserved("RESET_MASTER_FLUSH_OFFSET", _REPLICAS),
    1001: Unserved("CONTROLLER_ALTER_SYNC_STATE_SET", _CONTROLLER),
    1002: Unserved("CONTROLLER_ELECT_MASTER", _CONTROLLER),
    1003: Unserved("CONTROLLER_REGISTER_BROKER", _CONTROLLER),
    1004: Unserved("CONTROLLER_GET_REPLICA_INFO", _CONTROLLER),
    1005: Unserved("CONTROLLER_GET_METADATA_INFO", _CONTROLLER),
    1006: Unserved("CONTROLLER_GET_SYNC_STATE_DATA", _CONTROLLER),
    1007: Unserved("GET_BROKER_EPOCH_CACHE", _CONTROLLER),
    1008: Unserved("NOTIFY_BROKER_ROLE_CHANGED", _CONTROLLER),
    1009: Unserved("UPDATE_CONTROLLER_CONFIG", _CONTROLLER),
    1010: Unserved("GET_CONTROLLER_CONFIG", _CONTROLLER),
    1011: Unserved("CLEAN_BROKER_DATA", _CONTROLLER),
    1012: Unserved("CONTROLLER_GET_NEXT_BROKER_ID", _CONTROLLER),
    1013: Unserved("CONTROLLER_APPLY_BROKER_ID", _CONTROLLER),
    2001: Unserved("UPDATE_COLD_DATA_FLOW_CTR_CONFIG", _COLD),
    2002: Unserved("REMOVE_COLD_DATA_FLOW_CTR_CONFIG", _COLD),
    2003: Unserved("GET_COLD_DATA_FLOW_CTR_INFO", _COLD),
    2004: Unserved("SET_COMMITLOG_READ_MODE", _COLD),
    200056: Unserved("POP_ROLLBACK", _POP),
}
"""By request code."""

WITHOUT_ACCESS: Final[Mapping[int, str]] = {
    **dict.fromkeys(range(50, 54), _ACCOUNTS),
    **dict.fromkeys(range(3001, 3011), _USERS),
}
"""Why requests about users or accounts are refused by a broker that has none."""


def remark_of(code: int) -> str:
    """Return the remark of a refusal."""
    # The leading blank is RocketMQ's. Source: NettyRemotingAbstract#processRequestCommand.
    remark = f" request type {code} not supported"
    if code in UNSERVED:
        return f"{remark}: {UNSERVED[code].why}"
    return f"{remark}: {WITHOUT_ACCESS[code]}" if code in WITHOUT_ACCESS else remark
