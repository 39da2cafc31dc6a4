"""Requests of RocketMQ 5.3.3 that are not served, and why; the answer says so.

``docs/compatibility.md`` lists the same: ``python -m tests.compatibility`` writes it.

Source: RocketMQ 5.3.3 ``RequestCode``.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple


class RefusedCode(NamedTuple):
    """A request that is refused."""

    name: str
    why: str


_NOT_IN_ROCKETMQ: Final = "RocketMQ 5.3.3 does not serve it either"
_TIMER: Final = "there is no timer wheel; QUERY_DELAYED (9005) lists messages that wait"
_POP: Final = "pops are not undone; CHANGE_MESSAGE_INVISIBLETIME makes a message visible again"
_ROCKS: Final = "there is no RocksDB; tables are JSON files, and queues are those of RocketMQ"
_REPLICAS: Final = "this broker is a master; halfmq ha status shows its slave"
_CONTROLLER: Final = "there is no controller; this broker has no replicas of which to elect one"
_CONTAINER: Final = "this process is one broker and no container of brokers"
_COLD: Final = "cold reads are paced without settings; docs/operations.md says how"
_USERS: Final = "there are no users; authenticationEnabled=true in broker.conf keeps some"
_ACCOUNTS: Final = "there is no plain_acl.yml; aclEnable=true in broker.conf reads it"

REFUSED_CODES: Final[Mapping[int, RefusedCode]] = {
    13: RefusedCode("QUERY_BROKER_OFFSET", _NOT_IN_ROCKETMQ),
    22: RefusedCode("GET_TOPIC_CONFIG_LIST", _NOT_IN_ROCKETMQ),
    23: RefusedCode("GET_TOPIC_NAME_LIST", _NOT_IN_ROCKETMQ),
    27: RefusedCode("TRIGGER_DELETE_FILES", _NOT_IN_ROCKETMQ),
    47: RefusedCode("GET_CLIENT_CONFIG", _NOT_IN_ROCKETMQ),
    60: RefusedCode("GET_TIMER_CHECK_POINT", _TIMER),
    61: RefusedCode("GET_TIMER_METRICS", _TIMER),
    209: RefusedCode("SUSPEND_CONSUMER", _NOT_IN_ROCKETMQ),
    210: RefusedCode("RESUME_CONSUMER", _NOT_IN_ROCKETMQ),
    211: RefusedCode("RESET_CONSUMER_OFFSET_IN_CONSUMER", _NOT_IN_ROCKETMQ),
    212: RefusedCode("RESET_CONSUMER_OFFSET_IN_BROKER", _NOT_IN_ROCKETMQ),
    213: RefusedCode("ADJUST_CONSUMER_THREAD_POOL", _NOT_IN_ROCKETMQ),
    214: RefusedCode("WHO_CONSUME_THE_MESSAGE", _NOT_IN_ROCKETMQ),
    301: RefusedCode("REGISTER_FILTER_SERVER", _NOT_IN_ROCKETMQ),
    302: RefusedCode("REGISTER_MESSAGE_FILTER_CLASS", _NOT_IN_ROCKETMQ),
    354: RefusedCode("CHECK_ROCKSDB_CQ_WRITE_PROGRESS", _ROCKS),
    355: RefusedCode("EXPORT_ROCKSDB_CONFIG_TO_JSON", _ROCKS),
    513: RefusedCode(
        "UPDATE_AND_CREATE_STATIC_TOPIC",
        "there are no static topics; each queue is one queue of this broker",
    ),
    902: RefusedCode("ADD_BROKER", _CONTAINER),
    903: RefusedCode("REMOVE_BROKER", _CONTAINER),
    905: RefusedCode("NOTIFY_MIN_BROKER_ID_CHANGE", _REPLICAS),
    906: RefusedCode("EXCHANGE_BROKER_HA_INFO", _REPLICAS),
    907: RefusedCode("GET_BROKER_HA_STATUS", _REPLICAS),
    908: RefusedCode("RESET_MASTER_FLUSH_OFFSET", _REPLICAS),
    1001: RefusedCode("CONTROLLER_ALTER_SYNC_STATE_SET", _CONTROLLER),
    1002: RefusedCode("CONTROLLER_ELECT_MASTER", _CONTROLLER),
    1003: RefusedCode("CONTROLLER_REGISTER_BROKER", _CONTROLLER),
    1004: RefusedCode("CONTROLLER_GET_REPLICA_INFO", _CONTROLLER),
    1005: RefusedCode("CONTROLLER_GET_METADATA_INFO", _CONTROLLER),
    1006: RefusedCode("CONTROLLER_GET_SYNC_STATE_DATA", _CONTROLLER),
    1007: RefusedCode("GET_BROKER_EPOCH_CACHE", _CONTROLLER),
    1008: RefusedCode("NOTIFY_BROKER_ROLE_CHANGED", _CONTROLLER),
    1009: RefusedCode("UPDATE_CONTROLLER_CONFIG", _CONTROLLER),
    1010: RefusedCode("GET_CONTROLLER_CONFIG", _CONTROLLER),
    1011: RefusedCode("CLEAN_BROKER_DATA", _CONTROLLER),
    1012: RefusedCode("CONTROLLER_GET_NEXT_BROKER_ID", _CONTROLLER),
    1013: RefusedCode("CONTROLLER_APPLY_BROKER_ID", _CONTROLLER),
    2001: RefusedCode("UPDATE_COLD_DATA_FLOW_CTR_CONFIG", _COLD),
    2002: RefusedCode("REMOVE_COLD_DATA_FLOW_CTR_CONFIG", _COLD),
    2003: RefusedCode("GET_COLD_DATA_FLOW_CTR_INFO", _COLD),
    2004: RefusedCode("SET_COMMITLOG_READ_MODE", _COLD),
    200056: RefusedCode("POP_ROLLBACK", _POP),
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
    if code in REFUSED_CODES:
        return f"{remark}: {REFUSED_CODES[code].why}"
    return f"{remark}: {WITHOUT_ACCESS[code]}" if code in WITHOUT_ACCESS else remark
