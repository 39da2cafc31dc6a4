"""Requests of official clients, answered by our broker as the official broker answered them.

Each recording is played again over real sockets against a broker in this process, and every answer
is compared with the recorded one: code, header type, names of the ext fields, the words of a
refusal, and the body. Not compared are offsets, times, ids and addresses, and the remark of a
success. Where ours differs on purpose, a row of `DEVIATIONS` says so and why; a row that no
recorded request needs fails a test of its own.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from halfmq.broker.config import (
    BrokerConfig,
    ConsumerConfig,
    NetworkConfig,
    StoreSettings,
    TopicDefaults,
    TransactionConfig,
)
from halfmq.broker.handlers.messages import sql_search
from halfmq.remoting import headers
from halfmq.remoting.codes import HeaderType, RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.ext_fields import texts_of
from halfmq.remoting.fastjson import parse
from halfmq.store.format.batch import decode_batch
from halfmq.store.format.flags import TRANSACTION_MASK
from halfmq.store.format.properties import PROPERTY_TRANSACTION_HALF_ID
from halfmq.store.format.record import Record, decode_records
from tests.support.frames import FILES
from tests.support.patience import PATIENCE_S
from tests.support.recording import PULLS, SENDS, WITH_RECORDS, Step, steps_of
from tests.support.replay import RELAYED, Observer, Peer, Replay

NOT_PLAYED: Final = {
    "acl2-java-4.9.8-unknown-user": "refusals of access control: test_access_golden",
    "acl2-java-5.3.3-wrong-secret": "refusals of access control: test_access_golden",
    "broker-4.9.7-acl1": "refusals of access control: test_access_golden",
    "raw-5.3.3-acl": "refusals of access control: test_access_golden",
    "broker-4.9.7-raw-unknown": "servers 5.3.3 are asked the same, and answer all of it",
    "broker-5.3.3-registration": "a broker speaks with a name server",
    "java-5.3.3-json-timer-recall": "its times are over; test_java_features has a live client",
    "java-5.3.3-rocketmq-timer-recall": "as java-5.3.3-json-timer-recall",
}
PLAYED: Final = [name for name in FILES if name not in NOT_PLAYED]

OLDER: Final = "broker-4.9.7"
"""Recordings of an older broker. Its answers and records have fewer fields than those of 5.3.3, and
than ours; names that it has must be there."""

MAX_MESSAGE_OF_OVERSIZE: Final = 4_096
WITHOUT_AUTO_CREATE: Final = ("raw-5.3.3-strict", "no-autocreate-5.3.3")
WITHOUT_PROPERTY_FILTER: Final = ("raw-5.3.3-strict", "no-autocreate-5.3.3")
WITH_REJECTED_TRANSACTIONS: Final = ("raw-5.3.3-strict",)  # set there before its only half message


REPLIES: Final = frozenset({RequestCode.SEND_REPLY_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2})

SERVED: Final = (
    SENDS
    | REPLIES
    | WITH_RECORDS
    | {
        RequestCode.QUERY_CONSUMER_OFFSET,
        RequestCode.UPDATE_CONSUMER_OFFSET,
        RequestCode.GET_BROKER_RUNTIME_INFO,
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
        RequestCode.GET_MAX_OFFSET,
        RequestCode.GET_MIN_OFFSET,
        RequestCode.GET_EARLIEST_MSG_STORETIME,
        RequestCode.HEART_BEAT,
        RequestCode.UNREGISTER_CLIENT,
        RequestCode.CONSUMER_SEND_MSG_BACK,
        RequestCode.END_TRANSACTION,
        RequestCode.GET_CONSUMER_LIST_BY_GROUP,
        RequestCode.LOCK_BATCH_MQ,
        RequestCode.UNLOCK_BATCH_MQ,
        RequestCode.CHECK_CLIENT_CONFIG,
        RequestCode.QUERY_ASSIGNMENT,
        RequestCode.GET_ROUTEINFO_BY_TOPIC,
        RequestCode.GET_BROKER_CLUSTER_INFO,
        RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
        RequestCode.RESUME_CHECK_HALF_MESSAGE,
        RequestCode.DELETE_EXPIRED_COMMITLOG,
        RequestCode.UPDATE_AND_CREATE_TOPIC,
        RequestCode.UPDATE_AND_CREATE_TOPIC_LIST,
        RequestCode.GET_ALL_TOPIC_CONFIG,
        RequestCode.PUT_KV_CONFIG,
        RequestCode.GET_KV_CONFIG,
        RequestCode.DELETE_KV_CONFIG,
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
        RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
        RequestCode.GET_TOPIC_STATS_INFO,
        RequestCode.GET_CONSUMER_CONNECTION_LIST,
        RequestCode.GET_PRODUCER_CONNECTION_LIST,
        RequestCode.WIPE_WRITE_PERM_OF_BROKER,
        RequestCode.DELETE_SUBSCRIPTIONGROUP,
        RequestCode.GET_CONSUME_STATS,
        RequestCode.DELETE_TOPIC_IN_BROKER,
        RequestCode.DELETE_TOPIC_IN_NAMESRV,
        RequestCode.GET_KVLIST_BY_NAMESPACE,
        RequestCode.GET_TOPICS_BY_CLUSTER,
        RequestCode.QUERY_TOPIC_CONSUME_BY_WHO,
        RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS,
        RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER,
        RequestCode.GET_UNIT_TOPIC_LIST,
        RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST,
        RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST,
        RequestCode.ADD_WRITE_PERM_OF_BROKER,
        RequestCode.QUERY_TOPICS_BY_CONSUMER,
        RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER,
        RequestCode.GET_TOPIC_CONFIG,
        RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG,
        RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
        RequestCode.GET_ALL_PRODUCER_INFO,
        RequestCode.UPDATE_BROKER_CONFIG,
        RequestCode.GET_BROKER_CONFIG,
        RequestCode.GET_ALL_CONSUMER_OFFSET,
        RequestCode.GET_ALL_DELAY_OFFSET,
        RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS,
        RequestCode.QUERY_CONSUME_TIME_SPAN,
        RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE,
        RequestCode.GET_CONSUMER_RUNNING_INFO,
        RequestCode.CONSUME_MESSAGE_DIRECTLY,
        RequestCode.CLONE_GROUP_OFFSET,
        RequestCode.VIEW_BROKER_STATS_DATA,
        RequestCode.CLEAN_UNUSED_TOPIC,
        RequestCode.GET_BROKER_CONSUME_STATS,
        RequestCode.UPDATE_NAMESRV_CONFIG,
        RequestCode.GET_NAMESRV_CONFIG,
        RequestCode.QUERY_CONSUME_QUEUE,
        RequestCode.QUERY_DATA_VERSION,
        RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN,
        RequestCode.GET_BROKER_MEMBER_GROUP,
        RequestCode.BROKER_HEARTBEAT,
    }
)


class Exchange(NamedTuple):
    """A recorded request, and its recorded answer if it has one."""

    file: str
    request: RemotingCommand
    answer: RemotingCommand | None

    @property
    def code(self) -> int | None:
        return None if self.answer is None else self.answer.code

    @property
    def remark(self) -> str:
        return "" if self.answer is None else self.answer.remark or ""

    @property
    def properties(self) -> str:
        header = self.request.header
        if not isinstance(header, headers.SendMessageRequestHeader):
            return ""
        return header.properties or ""


class Deviation(NamedTuple):
    """One thing that our broker answers otherwise, on purpose."""

    what: str
    why: str
    applies: Callable[[Exchange], bool]
    # That our answer may have, None for a request that is held; nothing else of it is compared.
    codes: frozenset[int | None]


def _names_topic(exchange: Exchange, codes: Collection[int], topic: str) -> bool:
    return exchange.request.code in codes and getattr(exchange.request.header, "topic", "") == topic


def _sends_bits_only(exchange: Exchange) -> bool:
    header = exchange.request.header
    return (
        isinstance(header, headers.SendMessageRequestHeader)
        and bool(header.sys_flag & TRANSACTION_MASK)
        and not header.batch
        and "TRAN_MSG\x01true" not in exchange.properties
    )


def _sends_transactional_batch(exchange: Exchange) -> bool:
    header = exchange.request.header
    return (
        isinstance(header, headers.SendMessageRequestHeader)
        and header.batch is True
        and "TRAN_MSG\x01true" in (header.properties or "")
    )


def _says_batch_with_1(exchange: Exchange) -> bool:
    return exchange.request.code in SENDS and bool(
        re.search(rb'"(m|batch)" ?: ?"1"', exchange.request.raw_header)
    )


def _is_undecided(exchange: Exchange) -> bool:
    header = exchange.request.header
    return (
        isinstance(header, headers.EndTransactionRequestHeader)
        and header.commit_or_rollback == 0
        and not exchange.request.is_one_way
    )


def _is_at(place: tuple[str, int, int], exchange: Exchange) -> bool:
    return place == (exchange.file, exchange.request.opaque, exchange.request.code)


MADE_ELSEWHERE: Final = {
    ("mqadmin-4.9.7", 54, 208): 0,
    ("mqadmin-4.9.7", 69, 203): 206,
    ("mqadmin-4.9.7", 83, 204): 1,
    ("mqadmin-4.9.7", 107, 300): 0,
    ("mqadmin-4.9.7", 165, 222): 26,
    ("mqadmin-5.3.3-cluster-config", 4, 351): 17,
    ("mqadmin-5.3.3-cluster-config", 14, 101): 22,
    ("mqadmin-5.3.3-cluster-config", 16, 219): 22,
    ("mqadmin-5.3.3-group-offset-stats", 40, 208): 0,
    ("mqadmin-5.3.3-group-offset-stats", 98, 222): 26,
    ("mqadmin-5.3.3-group-offset-stats", 136, 300): 0,
    ("mqadmin-5.3.3-topic", 106, 202): 17,
    ("mqadmin-5.3.3-topic", 108, 351): 17,
    ("raw-5.3.3-admin", 8, 343): 0,
    ("raw-5.3.3-admin", 10, 345): 0,
    ("raw-5.3.3-admin", 14, 351): 17,
    ("raw-5.3.3-admin", 15, 351): 17,
    ("raw-5.3.3-admin", 17, 202): 17,
    ("raw-5.3.3-admin", 19, 208): 0,
    ("raw-5.3.3-admin", 20, 208): 0,
    ("raw-5.3.3-admin", 24, 300): 0,
    ("raw-5.3.3-admin", 32, 222): 17,
    ("raw-5.3.3-extra", 20, 300): 0,
    ("mqadmin-4.9.7", 97, 307): 1,
    ("mqadmin-5.3.3-cluster-config", 94, 315): 1,
    ("mqadmin-5.3.3-group-offset-stats", 128, 317): 0,
    ("mqadmin-5.3.3-group-offset-stats", 138, 315): 1,
    ("mqadmin-5.3.3-group-offset-stats", 336, 321): 1,
    ("mqadmin-5.3.3-group-offset-stats", 338, 321): 1,
    ("raw-5.3.3-admin", 3, 43): 0,
    ("raw-5.3.3-admin", 4, 45): 0,
    ("raw-5.3.3-admin", 7, 303): 17,
    ("raw-5.3.3-admin", 26, 315): 1,
    ("raw-5.3.3-admin", 34, 314): 26,
    ("raw-5.3.3-admin", 35, 321): 1,
    ("raw-5.3.3-admin", 36, 317): 0,
}
"""Requests (file, opaque, code) about topics, groups and settings that the official broker had from
another recording, and the code of our answer: each recording is played against an empty broker."""

TABLES: Final = {
    "data",
    "offsetTable",
    "subscriptionGroupTable",
    "subscriptionTable",
    "topicConfigTable",
}
"""Fields of bodies whose keys are names of the day; their values have one shape."""

LISTINGS: Final = {
    RequestCode.GET_ALL_TOPIC_CONFIG,
    RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
    RequestCode.GET_TOPIC_STATS_INFO,
    RequestCode.GET_CONSUMER_CONNECTION_LIST,
    RequestCode.GET_CONSUME_STATS,
    RequestCode.GET_TOPICS_BY_CLUSTER,
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS,
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER,
    RequestCode.GET_ALL_PRODUCER_INFO,
    RequestCode.QUERY_TOPICS_BY_CONSUMER,
    RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER,
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
    RequestCode.GET_ALL_CONSUMER_OFFSET,
    RequestCode.GET_ALL_DELAY_OFFSET,
    RequestCode.QUERY_CONSUME_TIME_SPAN,
    RequestCode.VIEW_BROKER_STATS_DATA,
}
"""Requests whose answers are about all that a broker has: field names and types are compared."""

CHANGES_OF_SETTINGS: Final = {RequestCode.UPDATE_BROKER_CONFIG, RequestCode.UPDATE_NAMESRV_CONFIG}
PROPERTIES: Final = {RequestCode.GET_BROKER_CONFIG, RequestCode.GET_NAMESRV_CONFIG}
"""Requests answered with lines of ``key=value``; which keys there are is each broker's own."""

_OK: Final = frozenset({0})
_PULL_CODES: Final = frozenset({0, 19, 20, 21})

POP: Final = {
    RequestCode.POP_MESSAGE,
    RequestCode.ACK_MESSAGE,
    RequestCode.BATCH_ACK_MESSAGE,
    RequestCode.PEEK_MESSAGE,
    RequestCode.CHANGE_MESSAGE_INVISIBLETIME,
    RequestCode.NOTIFICATION,
    RequestCode.POLLING_INFO,
    RequestCode.SET_MESSAGE_REQUEST_MODE,
}

DEVIATIONS: Final = (
    Deviation(
        "pop: other messages and handles",
        "handles name the time of a pop and revive queues, so those of the recording are invented "
        "here; tests/unit/broker/handlers/messages/test_pop.py has the answers",
        lambda it: it.request.code in POP,
        frozenset({0, ResponseCode.TOPIC_NOT_EXIST, 208, 210, None}),
    ),
    Deviation(
        "many requests of tools, request-reply, recall and static topics: 3",
        "not offered; 3 is what clients understand",
        lambda it: (
            it.request.code not in SERVED | {RequestCode.RECALL_MESSAGE}
            and it.code not in (None, ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
        ),
        frozenset({ResponseCode.REQUEST_CODE_NOT_SUPPORTED}),
    ),
    Deviation(
        "no authentication",
        "off here, as it is by default; test_access_golden plays the same with users",
        lambda it: it.code == ResponseCode.NO_PERMISSION and it.remark.startswith("username "),
        _OK,
    ),
    Deviation(
        "a name server's request at the broker's address and the other way round: served",
        "both roles are one process, and clients may name one address for both",
        lambda it: it.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED and it.request.code in SERVED,
        frozenset(ResponseCode) - {ResponseCode.REQUEST_CODE_NOT_SUPPORTED},
    ),
    Deviation(
        "105 without a topic: 1 instead of 17",
        "a missing field is named; the official answer looks for a topic called null",
        lambda it: it.remark.startswith("No topic route info in name server for the topic: null"),
        frozenset({ResponseCode.SYSTEM_ERROR}),
    ),
    Deviation(
        "370 is served: 604 for a handle that is none",
        "RocketMQ serves it if recallMessageEnable is set, and refuses such a handle alike",
        lambda it: it.request.code == RequestCode.RECALL_MESSAGE,
        frozenset({ResponseCode.ILLEGAL_OPERATION}),
    ),
    Deviation(
        "a send to the topic of timer messages: 16",
        "its records decide what is delivered where; RocketMQ keeps clients from writing some",
        lambda it: _names_topic(it, SENDS, "rmq_sys_wheel_timer"),
        frozenset({ResponseCode.NO_PERMISSION}),
    ),
    Deviation(
        "a timer message of five seconds arrives at a pull that waits: 0 instead of 19",
        "the official broker had been told not to hold pulls",
        lambda it: _names_topic(it, {RequestCode.PULL_MESSAGE}, "strict_x") and it.code == 19,
        frozenset({ResponseCode.SUCCESS}),
    ),
    Deviation(
        "a batch that is too large: 13 instead of 1",
        "the answer to a single message that is too large; clients repeat a request after 1",
        lambda it: "message body size exceeded" in it.remark,
        frozenset({ResponseCode.MESSAGE_ILLEGAL}),
    ),
    Deviation(
        "transaction bits in sysFlag without TRAN_MSG: 13",
        "the official broker stores a message that no consumer ever sees (prepared, rollback) or "
        "that later looks like a decision",
        _sends_bits_only,
        frozenset({ResponseCode.MESSAGE_ILLEGAL}),
    ),
    Deviation(
        "a batch with TRAN_MSG=true: 13",
        "the official broker delivers its messages at once, whatever becomes of the transaction",
        _sends_transactional_batch,
        frozenset({ResponseCode.MESSAGE_ILLEGAL}),
    ),
    Deviation(
        "and its messages are not pulled",
        "the last pull of that recording gets all that was stored before",
        lambda it: it.file == "raw-5.3.3-batch" and it.request.opaque == 36,
        _OK,
    ),
    Deviation(
        'batch="1" makes a batch',
        "the C++ client writes 1 for true; the official broker stores its batches as one message",
        _says_batch_with_1,
        _OK,
    ),
    Deviation(
        "37 with decision 0 is answered",
        "the official broker answers nothing, and Go clients wait for every answer",
        _is_undecided,
        frozenset({0, ResponseCode.SYSTEM_ERROR}),
    ),
    Deviation(
        "a setting that halfmq does not have, or that is not live: 29; without a file: 16",
        "the official servers say success and ignore it, or change it until the next start",
        lambda it: it.request.code in CHANGES_OF_SETTINGS,
        frozenset({0, ResponseCode.INVALID_PARAMETER, ResponseCode.NO_PERMISSION}),
    ),
    Deviation(
        "a reply whose requester is gone is not stored",
        "nobody would read it",
        lambda it: it.request.code in REPLIES and it.code != 0,
        frozenset({ResponseCode.SYSTEM_ERROR}),
    ),
    Deviation(
        "an SQL92 filter that is wrong: 23",
        "the official broker finds no message, and the consumer waits forever",
        lambda it: _is_at(("raw-5.3.3-pull", 16, RequestCode.PULL_MESSAGE), it),
        frozenset({ResponseCode.SUBSCRIPTION_PARSE_FAILED}),
    ),
    Deviation(
        "an unknown type of filter: 1",
        "the official broker delivers every message",
        lambda it: getattr(it.request.header, "expression_type", "") == "XPATH",
        frozenset({ResponseCode.SYSTEM_ERROR}),
    ),
    Deviation(
        "no brokerPermission",
        "settings do not change while the broker runs",
        lambda it: bool(re.match(r"the broker\[.*\] (send|pull)ing message is forb", it.remark)),
        _OK,
    ),
    *(
        Deviation(
            f"{place}: {code}, for what another recording made is not there",
            "each recording is played against an empty broker",
            partial(_is_at, place),
            frozenset({code}),
        )
        for place, code in MADE_ELSEWHERE.items()
    ),
    Deviation(
        "no 21 OFFSET_RESET where another recording has the reset",
        "each recording is played against an empty broker",
        lambda it: it.remark == "OFFSET_RESET" and it.file == "java-5.3.3-json-heartbeat-v2",
        _PULL_CODES,
    ),
    Deviation(
        "a pull that waits while its group is reset: 21 at once instead of 19 at its end",
        "the consumer goes where it was sent up to 15 s earlier",
        lambda it: _is_at(("java-5.3.3-json-online-admin", 80, RequestCode.PULL_MESSAGE), it),
        frozenset({ResponseCode.PULL_OFFSET_MOVED}),
    ),
    Deviation(
        "a second pull from elsewhere after a reset: 21 again",
        "the first may have been one that an earlier owner of the queue had left behind",
        lambda it: _is_at(("raw-5.3.3-extra", 28, RequestCode.PULL_MESSAGE), it),
        frozenset({ResponseCode.PULL_OFFSET_MOVED}),
    ),
    Deviation(
        "400 for a group in pop mode: queues to pull from",
        "pop is not offered, and the client takes either",
        lambda it: (
            it.request.code == RequestCode.QUERY_ASSIGNMENT
            and it.answer is not None
            and b'"POP"' in it.answer.body
        ),
        _OK,
    ),
    Deviation(
        "200 with a blank in the group's name: 29",
        "no client may use such a name",
        lambda it: it.request.code == 200 and b'"raw made"' in it.request.body,
        frozenset({ResponseCode.INVALID_PARAMETER}),
    ),
    Deviation(
        "no 1500 GO_AWAY",
        "it makes clients of a single broker reconnect in a storm; we close the connection",
        lambda it: it.code == 1500,
        _OK,
    ),
)

# One more is no exchange: a PROXY line and a TLS greeting end the connection like other garbage.
# The official servers take them on the same port; here neither is offered.

# Differences inside an answer that are on purpose too, see where they are used.
CHECK_TIMES: Final = "TRANSACTION_CHECK_TIMES"
"""The official broker stores a half message anew for each check, with its count in this property
and with WAIT=false. Ours stays where it is: the pending table counts."""

OURS: Final = {PROPERTY_TRANSACTION_HALF_ID}
"""The property of a committed message that names its transaction. Official clients show it as one
of the user's."""

OWN_OR_OF_THE_DAY: Final = re.compile(
    r"halfmq\.|getTransferedTps$|commitLogDiskRatio_|scheduleMessageOffset_"
    "|putLatency|putMessageFailedTimes"
)
"""Keys of runtime information: ours, one that only tools of 4.9 read, those with a path or with a
delay level that is in use, and figures that are not measured here."""

OF_THE_DAY: Final = frozenset({"UNIQ_KEY", "ORIGIN_MESSAGE_ID", "DLQ_ORIGIN_MESSAGE_ID"})
"""Properties whose values are ids. Of UNIQ_KEY there are two in the units of official batches."""


def _config(file: str, root: Path) -> BrokerConfig:
    """Return the settings under which the recording was made, on a free port."""
    auto_create = file not in WITHOUT_AUTO_CREATE
    return BrokerConfig(
        network=NetworkConfig(
            listen_port=0, namesrv_listen_port=0, registration_addresses="127.0.0.1"
        ),
        topics=TopicDefaults(
            auto_create=auto_create,
            auto_create_groups=auto_create,
            store_replies=False,  # the recording has those that were stored
        ),
        store=StoreSettings(
            root=root,
            commit_log_file_size=8 << 20,
            consume_queue_file_size=20_000,
            max_hash_slots=1_000,
            max_index_items=10_000,
            max_message_size=MAX_MESSAGE_OF_OVERSIZE if "oversize" in file else 4_194_304,
        ),
        consumers=ConsumerConfig(property_filter=file not in WITHOUT_PROPERTY_FILTER),
        transaction=TransactionConfig(
            timeout_ms=6_000,
            check_interval_ms=4_000,
            reject=file in WITH_REJECTED_TRANSACTIONS,
        ),
    )


class Comparison(Observer):
    """Compares answer by answer and collects what differs."""

    def __init__(self, file: str) -> None:
        self._file = file
        self.differences: list[str] = []
        self.compared: dict[int, int] = defaultdict(int)  # answers by request code

    def answered(self, step: Step, ours: RemotingCommand | None) -> None:
        exchange = _exchange(self._file, step.request)
        assert exchange is not None
        self.compared[exchange.request.code] += 1
        if ours is None:
            self._differs(exchange, "no answer")
            return
        deviation = _deviation(exchange)
        if deviation is None:
            self._compare(exchange, ours)
        elif ours.code not in deviation.codes:
            self._differs(exchange, f"{deviation.what}: answered {ours.code} {ours.remark}")

    def pushed(self, step: Step, ours: RemotingCommand | None) -> None:
        theirs = step.command
        assert theirs is not None
        exchange = Exchange(self._file, theirs, None)
        if ours is None:
            self._differs(exchange, "the broker sent no such request")
            return
        self._same_names(exchange, "ext fields", _names(theirs), _names(ours))
        self._same(exchange, "one-way", theirs.is_one_way, ours.is_one_way)
        if theirs.code == RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT:
            self._same(exchange, "body", theirs.body, ours.body)
            return
        for expected, record in zip(
            decode_records(theirs.body), decode_records(ours.body), strict=True
        ):
            self._compare_record(exchange, expected, record)

    def left_over(self, peer: Peer, unanswered: list[Step]) -> None:
        for step in unanswered:
            exchange = _exchange(self._file, step)
            if exchange is None:
                if not peer.closed:
                    self.differences.append(f"{step.frame[:40]!r} did not end the connection")
                continue
            ours = peer.take_answer(exchange.request.opaque)
            if exchange.request.is_one_way and ours is not None:
                self._differs(exchange, f"one-way, answered {ours.code} {ours.remark}")
            deviation = _deviation(exchange)
            code = None if ours is None else ours.code
            if deviation is not None and code not in deviation.codes:
                self._differs(exchange, f"{deviation.what}: answered {code}")
        if peer.answers:
            self.differences.append(f"answers without a request: {peer.answers}")

    # --- one answer

    def _compare(self, exchange: Exchange, ours: RemotingCommand) -> None:
        theirs = exchange.answer
        assert theirs is not None
        if ours.code != theirs.code:
            self._differs(exchange, f"code {theirs.code} {theirs.remark!r} → {ours.code}")
            return
        self._same(exchange, "header type", exchange.request.header_type, ours.header_type)
        # What a client answered is passed on with its header type and signature by RocketMQ.
        if not _is_java_exception(theirs) and exchange.request.code not in RELAYED:
            as_json = exchange.request.header_type == HeaderType.JSON
            expected = _names(theirs) if as_json else _names(theirs) or set()
            self._same_names(exchange, "ext fields", expected, _names(ours))
        self._compare_remark(exchange, theirs, ours)
        if exchange.request.code in WITH_RECORDS and ours.code == 0:
            self._compare_records(exchange, decode_records(theirs.body), decode_records(ours.body))
        else:
            self._same(exchange, "body", _content(exchange, theirs), _content(exchange, ours))
        if exchange.request.code in PULLS:
            self._compare_offsets(exchange, ours)

    def _compare_remark(
        self, exchange: Exchange, theirs: RemotingCommand, ours: RemotingCommand
    ) -> None:
        """Have a refusal begin with the official words; ours may say more."""
        if theirs.code == 0 and exchange.request.code not in PULLS:
            return
        if _is_java_exception(theirs):
            self._same(exchange, "has a remark", expected=True, ours=bool(ours.remark))
        elif not _words(ours).startswith(_words(theirs)):
            self._differs(exchange, f"remark {theirs.remark!r} → {ours.remark!r}")

    def _compare_records(
        self, exchange: Exchange, theirs: list[Record], ours: list[Record]
    ) -> None:
        """Compare as many records as both gave.

        The official broker gives 8 of records that it takes for cold, 32 of others; ours always 32.
        """
        expected = [body for record in theirs for body in _bodies(record)]
        got = [body for record in ours for body in _bodies(record)]
        self._same(exchange, "record bodies", expected, got[: len(expected)])
        if len(expected) == len(theirs) and len(got) == len(ours):
            for one, other in zip(theirs, ours, strict=False):
                self._compare_record(exchange, one, other)

    def _compare_record(self, exchange: Exchange, theirs: Record, ours: Record) -> None:
        for name in ("magic", "topic", "queue_id", "flag", "sys_flag", "reconsume_times", "body"):
            self._same(exchange, f"record's {name}", getattr(theirs, name), getattr(ours, name))
        expected, got = theirs.property_map, ours.property_map
        of_check = {CHECK_TIMES, "WAIT"} if CHECK_TIMES in expected else set()
        self._same_names(
            exchange, "property names", expected.keys() - of_check, got.keys() - of_check - OURS
        )
        for name in (expected.keys() & got.keys()) - OF_THE_DAY - of_check:
            self._same(exchange, f"property {name}", expected[name], got[name])

    def _compare_offsets(self, exchange: Exchange, ours: RemotingCommand) -> None:
        """Compare where the next offset lies relative to the others; not for a cut-off answer."""
        theirs = exchange.answer
        assert theirs is not None
        if theirs.code in _PULL_CODES - _OK:
            self._same(exchange, "next offset", _next_offset(theirs), _next_offset(ours))

    def _same_names(
        self,
        exchange: Exchange,
        what: str,
        expected: AbstractSet[str] | None,
        ours: AbstractSet[str] | None,
    ) -> None:
        if exchange.file.startswith(OLDER):
            expected, ours = expected or set(), (ours or set()) & (expected or set())
        self._same(exchange, what, expected, ours)

    def _same(self, exchange: Exchange, what: str, expected: object, ours: object) -> None:
        if expected != ours:
            self._differs(exchange, f"{what} {expected} → {ours}")

    def _differs(self, exchange: Exchange, how: str) -> None:
        request = exchange.request
        self.differences.append(
            f"{self._file} opaque {request.opaque} code {request.code}: {how}\n    {request.header}"
        )


def _exchange(file: str, step: Step | None) -> Exchange | None:
    if step is None or step.command is None:
        return None
    return Exchange(file, step.command, None if step.answer is None else step.answer.command)


def _exchanges(file: str) -> Iterator[Exchange]:
    for step in steps_of(file):
        if step.is_from_client and step.command is not None and not step.command.is_response:
            exchange = _exchange(file, step)
            assert exchange is not None
            yield exchange


def _deviation(exchange: Exchange) -> Deviation | None:
    return next((row for row in DEVIATIONS if row.applies(exchange)), None)


def _is_java_exception(answer: RemotingCommand) -> bool:
    """Whether the official broker failed; it then says where in its code, and sends no fields."""
    return "Exception" in (answer.remark or "")


def _names(command: RemotingCommand) -> set[str] | None:
    """Return the names of the ext fields.

    None where JSON has no ext fields at all: Java clients read them without asking. The two are one
    in the other header types, and for code 3, of which no client reads any.
    """
    if command.header is None and command.header_type == HeaderType.JSON:
        return set() if command.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED else None
    return set(texts_of(command.header) or {})


def _words(answer: RemotingCommand) -> str:
    text = (answer.remark or "").partition("\nSee http")[0]
    return re.sub(r"127\.0\.0\.1:\d+", "ADDRESS", text).rstrip(" .,")


def _bodies(record: Record) -> list[bytes]:
    """Return the bodies that went into a record: of a batch taken for one message, its units'."""
    try:
        units = decode_batch(record.body)
    except ValueError:
        return [record.body]
    return [unit.body for unit in units] or [record.body]


def _content(exchange: Exchange, answer: RemotingCommand) -> Any:
    """Return what of a body must be equal."""
    if not answer.body:
        return None
    if exchange.request.code in PROPERTIES:
        return b"=" in answer.body
    value = parse(answer.body)
    if exchange.request.code == RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG:
        for group in value["subscriptionGroupTable"].values():
            group.get("groupRetryPolicy", {}).pop("exponentialRetryPolicy", None)  # of some groups
    if exchange.request.code in LISTINGS:
        return _shape(value)
    match exchange.request.code:
        case RequestCode.QUERY_TOPIC_CONSUME_BY_WHO:
            # The official broker counts the topic's own name, when it is asked for, as a group.
            value["groupList"] = sorted(
                {*value["groupList"]} - {getattr(exchange.request.header, "topic", "")}
            )
        case RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER:
            return list(value)  # which topics there are is of the day
        case RequestCode.GET_BROKER_RUNTIME_INFO:
            return {key for key in value["table"] if not OWN_OR_OF_THE_DAY.match(key)}
        case RequestCode.GET_CONSUMER_LIST_BY_GROUP:
            value["consumerIdList"].sort()
        case RequestCode.LOCK_BATCH_MQ:
            value["lockOKMQSet"].sort(key=str)
        case RequestCode.GET_ROUTEINFO_BY_TOPIC if exchange.file.startswith(OLDER):
            for broker in value["brokerDatas"]:
                broker.pop("enableActingMaster", None)
    return json.loads(re.sub(r"127\.0\.0\.1:\d+", "ADDRESS", json.dumps(value)))


def _shape(value: Any) -> Any:
    """Return the names and types of fields without values; each one once in a list or table."""
    if isinstance(value, list):
        shapes = {json.dumps(_shape(one), sort_keys=True) for one in value}
        return [json.loads(shape) for shape in sorted(shapes)]
    if not isinstance(value, dict):
        return "number" if isinstance(value, int | float) else type(value).__name__
    return {
        name: (_shape([*field.values()]) if name in TABLES else _shape(field))
        for name, field in value.items()
    }


def _next_offset(answer: RemotingCommand) -> tuple[bool, bool]:
    fields = texts_of(answer.header) or {}
    following = fields["nextBeginOffset"]
    return following == fields["minOffset"], following == fields["maxOffset"]


@pytest.mark.parametrize("file", PLAYED)
def test_a_recording_is_answered_as_the_official_broker_answered(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unmodified clients of every age and language cannot tell the difference."""
    # A search that finds nothing in a millisecond is answered 20, and the client pulls again.
    # A recording cannot, so searches end with their queue here.
    monkeypatch.setattr(sql_search, "SEARCH_S", PATIENCE_S)
    comparison = Comparison(file)

    Replay(file, _config(file, tmp_path / "store"), comparison).run()

    assert not comparison.differences, "\n".join(comparison.differences)


def test_every_deviation_is_met_by_a_recorded_request() -> None:
    """The table lists nothing that the recordings do not show."""
    everything = [exchange for file in PLAYED for exchange in _exchanges(file)]

    for row in DEVIATIONS:
        assert any(row.applies(exchange) for exchange in everything), row.what


def test_every_code_and_refusal_is_among_the_recordings() -> None:
    """The comparison would prove nothing for an answer that was never recorded."""
    answers: dict[int, set[int]] = defaultdict(set)
    asked: set[int] = set()
    for file in PLAYED:
        for exchange in _exchanges(file):
            asked.add(exchange.request.code)
            if exchange.code is not None and _deviation(exchange) is None:
                answers[exchange.request.code].add(exchange.code)

    assert answers[RequestCode.SEND_MESSAGE] == {0, 13, 29}
    assert answers[RequestCode.SEND_MESSAGE_V2] == {0, 1, 13, 16, 17, 26, 29}
    assert answers[RequestCode.SEND_BATCH_MESSAGE] == {0, 1, 13}
    assert answers[RequestCode.PULL_MESSAGE] == {0, 1, 16, 17, 19, 20, 21, 23, 24, 25, 26, 29}
    assert answers[RequestCode.LITE_PULL_MESSAGE] == {0}
    assert answers[RequestCode.END_TRANSACTION] == {0, 1}
    assert answers[RequestCode.CONSUMER_SEND_MSG_BACK] == {0, 1, 26}
    assert answers[RequestCode.GET_ROUTEINFO_BY_TOPIC] == {0, 17}
    assert asked >= SERVED
