"""One struct per request and response header, under RocketMQ's names.

Attributes are the snake_case of the official names; ``rename`` and ``field(name=...)`` give the
names on the wire. ``| None`` marks optional fields without an official default. The declared order
is the order of the MSGPACK array, so **new fields go to the end** of their class.

Fields that any request may carry (``lo``, ``ns``, ``nsd``, ``ReqT``, signatures) are not declared
here; ``serialization.ext_fields`` returns every field of a frame.

Source: RocketMQ ``remoting/protocol/header``.
"""

from typing import Final

from msgspec import field

from .codes import RequestCode
from .ext_fields import Header, Int32, Int64, Name, answer_header, request_header

RECOGNITION_FIELD: Final = "halfmq"
"""Ext field by which halfmq peers recognise each other. A client sends it with a route request, and
it is in the answer if all brokers are halfmq's; our brokers register with it. Such pairs speak
MSGPACK headers and know halfmq's own requests. Official peers ignore the field."""


@request_header(RequestCode.SEND_MESSAGE, RequestCode.SEND_REPLY_MESSAGE)
class SendMessageRequestHeader(Header, frozen=True, kw_only=True):
    """Requests 10 and 324: a message to store; its body is the frame's body."""

    producer_group: Name
    topic: Name
    default_topic: Name
    default_topic_queue_nums: Int32
    queue_id: Int32  # negative: the broker chooses
    sys_flag: Int32
    born_timestamp: Int64  # ms
    flag: Int32
    properties: str | None = None
    reconsume_times: Int32 = 0
    unit_mode: bool = False
    max_reconsume_times: Int32 | None = None
    batch: bool = False  # this field, not the code, makes a batch
    broker_name: Name | None = field(default=None, name="bname")


@request_header(
    RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2
)
class SendMessageRequestHeaderV2(SendMessageRequestHeader, frozen=True, kw_only=True):
    """Requests 310, 320 and 325: SendMessageRequestHeader with one-letter names."""

    producer_group: Name = field(name="a")
    topic: Name = field(name="b")
    default_topic: Name = field(name="c")
    default_topic_queue_nums: Int32 = field(name="d")
    queue_id: Int32 = field(name="e")
    sys_flag: Int32 = field(name="f")
    born_timestamp: Int64 = field(name="g")
    flag: Int32 = field(name="h")
    properties: str | None = field(default=None, name="i")
    reconsume_times: Int32 = field(default=0, name="j")
    unit_mode: bool = field(default=False, name="k")
    max_reconsume_times: Int32 | None = field(default=None, name="l")
    batch: bool = field(default=False, name="m")
    broker_name: Name | None = field(default=None, name="n")


@answer_header(
    RequestCode.SEND_MESSAGE,
    RequestCode.SEND_MESSAGE_V2,
    RequestCode.SEND_BATCH_MESSAGE,
    RequestCode.SEND_REPLY_MESSAGE,
    RequestCode.SEND_REPLY_MESSAGE_V2,
)
class SendMessageResponseHeader(Header, frozen=True, kw_only=True):
    """Where a message was stored; the ids of a batch are joined by commas."""

    msg_id: str  # offset message id
    queue_id: Int32
    queue_offset: Int64
    transaction_id: str | None = None  # the message's UNIQ_KEY
    batch_uniq_id: str | None = None
    msg_region: str | None = field(default=None, name="MSG_REGION")
    trace_on: str | None = field(default=None, name="TRACE_ON")
    recall_handle: str | None = None


@request_header(RequestCode.CONSUMER_SEND_MSG_BACK)
class ConsumerSendMsgBackRequestHeader(Header, frozen=True, kw_only=True):
    """CONSUMER_SEND_MSG_BACK (36): redeliver this message to the group after a delay."""

    offset: Int64  # physical offset of the record
    group: Name
    delay_level: Int32  # negative: to the dead letters; 0: by the number of deliveries
    origin_msg_id: Name | None = None
    origin_topic: Name | None = None
    unit_mode: bool = False
    max_reconsume_times: Int32 | None = None
    broker_name: Name | None = field(default=None, name="bname")
    reason: Name | None = None  # halfmq's: why it failed, "" if unknown; kept in the copy
    delay_ms: Int64 | None = None  # halfmq's: the exact delay; `delay_level` is the next longer one


@request_header(RequestCode.RECALL_MESSAGE)
class RecallMessageRequestHeader(Header, frozen=True, kw_only=True):
    """RECALL_MESSAGE (370): cancel a timer message."""

    topic: Name
    recall_handle: str
    producer_group: Name | None = None


@answer_header(RequestCode.RECALL_MESSAGE)
class RecallMessageResponseHeader(Header, frozen=True, kw_only=True):
    msg_id: str
    msg_region: str | None = field(default=None, name="MSG_REGION")


@request_header(RequestCode.QUERY_DELAYED)
class QueryDelayedRequestHeader(Header, frozen=True, kw_only=True):
    """QUERY_DELAYED (9005): a page of the messages that wait for their delivery."""

    topic: Name | None = None  # only those of this topic
    after: Int64 = -1  # the last page's ``nextAfter``
    max_count: Int32 = 100  # messages to look at
    broker_name: Name | None = field(default=None, name="bname")


@answer_header(RequestCode.QUERY_DELAYED, RequestCode.QUERY_TRANSACTIONS)
class PageResponseHeader(Header, frozen=True, kw_only=True):
    """Answer to 9000 and 9005."""

    next_after: Int64 | None = None  # the next request's ``after``; None: this is the last page


@request_header(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT)
class ReplyMessageRequestHeader(Header, frozen=True, kw_only=True):
    """PUSH_REPLY_MESSAGE_TO_CLIENT (326): a reply for the client that waits for it."""

    producer_group: Name
    topic: Name
    default_topic: Name
    default_topic_queue_nums: Int32
    queue_id: Int32
    sys_flag: Int32
    born_timestamp: Int64
    flag: Int32
    born_host: str  # "ip:port"
    store_host: str
    store_timestamp: Int64
    properties: str | None = None
    reconsume_times: Int32 = 0
    unit_mode: bool = False


@request_header(RequestCode.END_TRANSACTION)
class EndTransactionRequestHeader(Header, frozen=True, kw_only=True):
    """END_TRANSACTION (37): the producer's decision about a half message."""

    producer_group: Name
    tran_state_table_offset: Int64  # queue offset in the half topic
    commit_log_offset: Int64  # physical offset of the half record
    commit_or_rollback: Int32  # 8 commit, 12 rollback, 0 not known yet
    msg_id: str
    topic: Name | None = None
    from_transaction_check: bool = False
    transaction_id: str | None = None
    broker_name: Name | None = field(default=None, name="bname")


@request_header(RequestCode.CHECK_TRANSACTION_STATE)
class CheckTransactionStateRequestHeader(Header, frozen=True, kw_only=True):
    """CHECK_TRANSACTION_STATE (39): a check from the broker; the body is the half's record."""

    tran_state_table_offset: Int64
    commit_log_offset: Int64
    topic: Name | None = None  # the half topic
    msg_id: str | None = None  # UNIQ_KEY
    transaction_id: str | None = None  # UNIQ_KEY too
    offset_msg_id: Name | None = None
    broker_name: Name | None = field(default=None, name="bname")


@request_header(RequestCode.RESUME_CHECK_HALF_MESSAGE)
class ResumeCheckHalfMessageRequestHeader(Header, frozen=True, kw_only=True):
    """RESUME_CHECK_HALF_MESSAGE (323): check a parked half message again."""

    msg_id: str | None = None
    topic: Name | None = None


@request_header(RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE)
class PullMessageRequestHeader(Header, frozen=True, kw_only=True):
    """PULL_MESSAGE (11) and LITE_PULL_MESSAGE (361)."""

    consumer_group: Name
    topic: Name
    queue_id: Int32
    queue_offset: Int64  # the next one wanted
    max_msg_nums: Int32
    sys_flag: Int32  # 1 commit, 2 may wait, 4 has subscription, 8 class filter, 16 lite pull
    commit_offset: Int64
    suspend_timeout_millis: Int64
    sub_version: Int64
    subscription: str | None = None
    expression_type: Name | None = None
    max_msg_bytes: Int32 | None = None
    request_source: Int32 | None = None
    proxy_froward_client_id: Name | None = None  # official spelling
    broker_name: Name | None = field(default=None, name="bname")


@answer_header(RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE)
class PullMessageResponseHeader(Header, frozen=True, kw_only=True):
    """Answer to PULL_MESSAGE; required with the response codes 0, 19, 20 and 21."""

    suggest_which_broker_id: Int64
    next_begin_offset: Int64
    min_offset: Int64
    max_offset: Int64  # the next one to be written
    offset_delta: Int64 | None = None
    topic_sys_flag: Int32 | None = None
    group_sys_flag: Int32 | None = None
    forbidden_type: Int32 | None = None


@request_header(RequestCode.QUERY_CONSUMER_OFFSET)
class QueryConsumerOffsetRequestHeader(Header, frozen=True, kw_only=True):
    consumer_group: Name
    topic: Name
    queue_id: Int32
    set_zero_if_not_found: bool | None = None


@request_header(RequestCode.UPDATE_CONSUMER_OFFSET)
class UpdateConsumerOffsetRequestHeader(Header, frozen=True, kw_only=True):
    consumer_group: Name
    topic: Name
    queue_id: Int32
    commit_offset: Int64


@answer_header(
    RequestCode.QUERY_CONSUMER_OFFSET,
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
    RequestCode.GET_MAX_OFFSET,
    RequestCode.GET_MIN_OFFSET,
)
class OffsetResponseHeader(Header, frozen=True, kw_only=True):
    """Answer to 14, 29, 30 (the next offset to be written) and 31."""

    offset: Int64


@answer_header(
    RequestCode.UPDATE_CONSUMER_OFFSET,
    RequestCode.UNREGISTER_CLIENT,
    RequestCode.GET_CONSUMER_LIST_BY_GROUP,
)
class EmptyResponseHeader(Header, frozen=True, kw_only=True):
    """Answer to 15, 35 and 38: ext fields, but none in them."""


@request_header(RequestCode.GET_MIN_OFFSET, RequestCode.GET_EARLIEST_MSG_STORETIME)
class QueueRequestHeader(Header, frozen=True, kw_only=True):
    """Requests about one queue: 31, 32."""

    topic: Name
    queue_id: Int32


@request_header(
    RequestCode.GET_CONSUMER_CONNECTION_LIST,
    RequestCode.GET_CONSUMER_LIST_BY_GROUP,
    RequestCode.NOTIFY_CONSUMER_IDS_CHANGED,
)
class ConsumerGroupRequestHeader(Header, frozen=True, kw_only=True):
    """Requests about one group: 203, 38, and 40 (its members changed) from the broker."""

    consumer_group: Name


@request_header(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP)
class SearchOffsetRequestHeader(Header, frozen=True, kw_only=True):
    topic: Name
    queue_id: Int32
    timestamp: Int64  # ms
    boundary_type: Name | None = None  # LOWER (also when absent) or UPPER


@request_header(RequestCode.GET_MAX_OFFSET)
class GetMaxOffsetRequestHeader(Header, frozen=True, kw_only=True):
    topic: Name
    queue_id: Int32
    committed: bool = True


@answer_header(RequestCode.GET_EARLIEST_MSG_STORETIME)
class GetEarliestMsgStoretimeResponseHeader(Header, frozen=True, kw_only=True):
    timestamp: Int64  # -1 if the queue is empty


@request_header(RequestCode.VIEW_MESSAGE_BY_ID)
class ViewMessageRequestHeader(Header, frozen=True, kw_only=True):
    offset: Int64  # physical
    topic: Name | None = None


@request_header(RequestCode.QUERY_MESSAGE)
class QueryMessageRequestHeader(Header, frozen=True, kw_only=True):
    topic: Name
    key: str
    max_num: Int32
    begin_timestamp: Int64
    end_timestamp: Int64
    unique_key_query: bool = field(default=False, name="_UNIQUE_KEY_QUERY")


@answer_header(RequestCode.QUERY_MESSAGE)
class QueryMessageResponseHeader(Header, frozen=True, kw_only=True):
    """Answer to QUERY_MESSAGE (12), also if nothing was found."""

    index_last_update_timestamp: Int64
    index_last_update_phyoffset: Int64


@request_header(RequestCode.HEART_BEAT)
class HeartbeatRequestHeader(Header, frozen=True, kw_only=True):
    """HEART_BEAT (34); everything is in the body."""


@answer_header(RequestCode.HEART_BEAT)
class HeartbeatResponseHeader(Header, frozen=True, kw_only=True):
    """Answer to HEART_BEAT (34).

    The last three are halfmq's: another member of the group subscribes differently.
    """

    is_support_heart_beat_v2: bool = field(default=False, name="IS_SUPPORT_HEART_BEAT_V2")
    is_sub_change: bool = field(default=True, name="IS_SUB_CHANGE")
    unequal_topic: str | None = None
    unequal_client_id: str | None = None  # the other member
    unequal_filter: str | None = None  # its filter; None: it does not subscribe to the topic


@request_header(RequestCode.QUERY_CONSUMERS)
class QueryConsumersRequestHeader(Header, frozen=True, kw_only=True):
    """QUERY_CONSUMERS (9004): a page of consumer group members, by group and client id."""

    consumer_group: Name | None = None  # None: all groups
    after_group: Name = ""  # of the last member of the previous page
    after_client: Name = ""
    max_count: Int32 = 100  # at most own_requests.CONSUMERS_MAX; the last member's are whole
    broker_name: Name | None = field(default=None, name="bname")


@answer_header(RequestCode.QUERY_CONSUMERS)
class QueryConsumersResponseHeader(Header, frozen=True, kw_only=True):
    """Answer to QUERY_CONSUMERS (9004): the next request's ``after``; None: no more pages."""

    next_group: str | None = None
    next_client: str | None = None


@request_header(RequestCode.UNREGISTER_CLIENT)
class UnregisterClientRequestHeader(Header, frozen=True, kw_only=True):
    client_id: Name = field(name="clientID")
    producer_group: Name | None = None
    consumer_group: Name | None = None


@request_header(RequestCode.GET_ROUTEINFO_BY_TOPIC)
class GetRouteInfoRequestHeader(Header, frozen=True, kw_only=True):
    topic: Name
    accept_standard_json_only: bool | None = None


@request_header(RequestCode.REGISTER_BROKER)
class RegisterBrokerRequestHeader(Header, frozen=True, kw_only=True):
    broker_name: Name
    broker_addr: Name
    cluster_name: Name
    ha_server_addr: Name
    broker_id: Int64
    heartbeat_timeout_millis: Int64 | None = None
    enable_acting_master: bool | None = None
    compressed: bool = False
    body_crc32: Int32 = field(default=0, name="bodyCrc32")


@answer_header(RequestCode.REGISTER_BROKER)
class RegisterBrokerResponseHeader(Header, frozen=True, kw_only=True):
    ha_server_addr: str | None = None
    master_addr: str | None = None


@request_header(RequestCode.UNREGISTER_BROKER, RequestCode.QUERY_DATA_VERSION)
class BrokerIdentityRequestHeader(Header, frozen=True, kw_only=True):
    """UNREGISTER_BROKER (104) and QUERY_DATA_VERSION (322)."""

    broker_name: Name
    broker_addr: Name
    cluster_name: Name
    broker_id: Int64


@answer_header(RequestCode.QUERY_DATA_VERSION)
class QueryDataVersionResponseHeader(Header, frozen=True, kw_only=True):
    changed: bool
