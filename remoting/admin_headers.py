"""Headers of administrative requests: topics, groups, statistics, clients, name-server settings.

They follow the rules of ``headers``, whose tables of request codes include them.

Source: RocketMQ ``remoting/protocol/header``.
"""

from .codes import RequestCode
from .ext_fields import Header, Int32, Int64, Name, answer_header, request_header


@request_header(RequestCode.UPDATE_AND_CREATE_TOPIC)
class CreateTopicRequestHeader(Header, frozen=True, kw_only=True):
    topic: Name
    default_topic: Name
    read_queue_nums: Int32
    write_queue_nums: Int32
    perm: Int32
    topic_filter_type: Name
    topic_sys_flag: Int32 | None = None
    order: bool = False
    attributes: str | None = None
    force: bool = False


@request_header(
    RequestCode.GET_TOPIC_STATS_INFO,
    RequestCode.DELETE_TOPIC_IN_BROKER,
    RequestCode.REGISTER_TOPIC_IN_NAMESRV,
    RequestCode.QUERY_TOPIC_CONSUME_BY_WHO,
    RequestCode.GET_TOPIC_CONFIG,
)
class TopicRequestHeader(Header, frozen=True, kw_only=True):
    """Requests about one topic: 202, 215, 217, 300, 351."""

    topic: Name


@request_header(RequestCode.DELETE_TOPIC_IN_NAMESRV)
class DeleteTopicFromNamesrvRequestHeader(Header, frozen=True, kw_only=True):
    topic: Name
    cluster_name: Name | None = None


@request_header(RequestCode.GET_ALL_TOPIC_CONFIG)
class GetAllTopicConfigRequestHeader(Header, frozen=True, kw_only=True):
    """GET_ALL_TOPIC_CONFIG (21): a page of topics; without ``topic_seq`` all of them."""

    topic_seq: Int32 | None = None
    data_version: Name | None = None
    max_topic_num: Int32 | None = None


@answer_header(RequestCode.GET_ALL_TOPIC_CONFIG)
class GetAllTopicConfigResponseHeader(Header, frozen=True, kw_only=True):
    total_topic_num: Int32 | None = None


@request_header(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
class GetAllSubscriptionGroupRequestHeader(Header, frozen=True, kw_only=True):
    """GET_ALL_SUBSCRIPTIONGROUP_CONFIG (201): a page of groups; without ``group_seq`` all."""

    group_seq: Int32 | None = None
    data_version: Name | None = None
    max_group_num: Int32 | None = None


@request_header(RequestCode.QUERY_TOPICS_BY_CONSUMER, RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG)
class GetSubscriptionGroupConfigRequestHeader(Header, frozen=True, kw_only=True):
    """GET_SUBSCRIPTIONGROUP_CONFIG (352) and QUERY_TOPICS_BY_CONSUMER (343)."""

    group: Name


@request_header(RequestCode.DELETE_SUBSCRIPTIONGROUP)
class DeleteSubscriptionGroupRequestHeader(Header, frozen=True, kw_only=True):
    group_name: Name
    clean_offset: bool = False


@request_header(RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN)
class GroupForbiddenRequestHeader(Header, frozen=True, kw_only=True):
    group: Name
    topic: Name
    readable: bool | None = None


@request_header(RequestCode.GET_CONSUME_STATS)
class GetConsumeStatsRequestHeader(Header, frozen=True, kw_only=True):
    consumer_group: Name
    topic: Name | None = None
    topic_list: str | None = None  # "a;b;"


@request_header(RequestCode.GET_PRODUCER_CONNECTION_LIST)
class ProducerGroupRequestHeader(Header, frozen=True, kw_only=True):
    producer_group: Name


@request_header(RequestCode.QUERY_CONSUME_TIME_SPAN, RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER)
class GroupAndTopicRequestHeader(Header, frozen=True, kw_only=True):
    """QUERY_CONSUME_TIME_SPAN (303) and QUERY_SUBSCRIPTION_BY_CONSUMER (345)."""

    group: Name
    topic: Name


@request_header(RequestCode.VIEW_BROKER_STATS_DATA)
class ViewBrokerStatsDataRequestHeader(Header, frozen=True, kw_only=True):
    stats_name: Name
    stats_key: str


@request_header(RequestCode.GET_BROKER_CONSUME_STATS)
class GetBrokerConsumeStatsRequestHeader(Header, frozen=True, kw_only=True):
    is_order: bool


@request_header(RequestCode.QUERY_CONSUME_QUEUE)
class QueryConsumeQueueRequestHeader(Header, frozen=True, kw_only=True):
    topic: Name
    queue_id: Int32
    index: Int64
    count: Int32
    consumer_group: Name | None = None


@request_header(RequestCode.CLONE_GROUP_OFFSET)
class CloneGroupOffsetRequestHeader(Header, frozen=True, kw_only=True):
    src_group: Name
    dest_group: Name
    topic: Name | None = None
    offline: bool = False


@request_header(RequestCode.QUERY_CORRECTION_OFFSET)
class QueryCorrectionOffsetHeader(Header, frozen=True, kw_only=True):
    topic: Name
    compare_group: Name
    filter_groups: str | None = None  # "a,b"


@answer_header(RequestCode.GET_BROKER_CONFIG)
class GetBrokerConfigResponseHeader(Header, frozen=True, kw_only=True):
    version: str  # data version as JSON text


@request_header(RequestCode.BROKER_HEARTBEAT)
class BrokerHeartbeatRequestHeader(Header, frozen=True, kw_only=True):
    cluster_name: Name
    broker_addr: Name
    broker_name: Name
    broker_id: Int64 | None = None


@request_header(RequestCode.GET_BROKER_MEMBER_GROUP)
class GetBrokerMemberGroupRequestHeader(Header, frozen=True, kw_only=True):
    cluster_name: Name
    broker_name: Name


@request_header(RequestCode.GET_TOPICS_BY_CLUSTER)
class GetTopicsByClusterRequestHeader(Header, frozen=True, kw_only=True):
    cluster: Name


@request_header(RequestCode.PUT_KV_CONFIG)
class PutKVConfigRequestHeader(Header, frozen=True, kw_only=True):
    namespace: Name
    key: str
    value: str


@request_header(RequestCode.GET_KV_CONFIG, RequestCode.DELETE_KV_CONFIG)
class KVConfigRequestHeader(Header, frozen=True, kw_only=True):
    """GET_KV_CONFIG (101) and DELETE_KV_CONFIG (102)."""

    namespace: Name
    key: str


@answer_header(RequestCode.GET_KV_CONFIG)
class GetKVConfigResponseHeader(Header, frozen=True, kw_only=True):
    value: str | None = None


@request_header(RequestCode.GET_KVLIST_BY_NAMESPACE)
class GetKVListByNamespaceRequestHeader(Header, frozen=True, kw_only=True):
    namespace: Name


@request_header(RequestCode.WIPE_WRITE_PERM_OF_BROKER, RequestCode.ADD_WRITE_PERM_OF_BROKER)
class BrokerNameRequestHeader(Header, frozen=True, kw_only=True):
    """WIPE_WRITE_PERM_OF_BROKER (205) and ADD_WRITE_PERM_OF_BROKER (327)."""

    broker_name: Name


@request_header(RequestCode.DRAIN_BROKER)
class DrainBrokerRequestHeader(Header, frozen=True, kw_only=True):
    """DRAIN_BROKER (9006): send producers to other brokers, then stop."""

    wait_millis: Int32  # until messages are refused


@answer_header(RequestCode.WIPE_WRITE_PERM_OF_BROKER)
class WipeWritePermOfBrokerResponseHeader(Header, frozen=True, kw_only=True):
    wipe_topic_count: Int32


@answer_header(RequestCode.ADD_WRITE_PERM_OF_BROKER)
class AddWritePermOfBrokerResponseHeader(Header, frozen=True, kw_only=True):
    add_topic_count: Int32


@request_header(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET)
class ResetOffsetRequestHeader(Header, frozen=True, kw_only=True):
    """RESET_CONSUMER_CLIENT_OFFSET (220) to a client, INVOKE_BROKER_TO_RESET_OFFSET (222)."""

    topic: Name
    group: Name
    timestamp: Int64  # ms; negative: to the end
    is_force: bool
    queue_id: Int32 = -1  # all
    offset: Int64 | None = None  # negative or absent: by timestamp


@request_header(
    RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS
)
class GetConsumerStatusRequestHeader(Header, frozen=True, kw_only=True):
    """Consumer offsets: request 221 to a client, 223 to a broker."""

    topic: Name
    group: Name
    client_addr: Name | None = None


@request_header(RequestCode.GET_CONSUMER_RUNNING_INFO)
class GetConsumerRunningInfoRequestHeader(Header, frozen=True, kw_only=True):
    consumer_group: Name
    client_id: Name
    jstack_enable: bool = False


@request_header(RequestCode.CONSUME_MESSAGE_DIRECTLY)
class ConsumeMessageDirectlyRequestHeader(Header, frozen=True, kw_only=True):
    consumer_group: Name
    client_id: Name | None = None
    msg_id: Name | None = None
    broker_name: Name | None = None
    topic: Name | None = None
    topic_sys_flag: Int32 | None = None
    group_sys_flag: Int32 | None = None
