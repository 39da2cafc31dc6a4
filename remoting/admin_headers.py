"""Headers of what tools ask for: topics, groups, statistics, clients, name-server settings.

The rest of ``headers``, under the same rules; its tables of request codes hold these too.

Source: RocketMQ ``remoting/protocol/header``.
"""

from __future__ import annotations

from .ext_fields import Header, Int32, Int64


class CreateTopicRequestHeader(Header, frozen=True, kw_only=True):
    """17."""

    topic: str
    default_topic: str
    read_queue_nums: Int32
    write_queue_nums: Int32
    perm: Int32
    topic_filter_type: str
    topic_sys_flag: Int32 | None = None
    order: bool = False
    attributes: str | None = None
    force: bool = False


class TopicRequestHeader(Header, frozen=True, kw_only=True):
    """Requests about one topic: 202, 215, 217, 300, 351."""

    topic: str


class DeleteTopicFromNamesrvRequestHeader(Header, frozen=True, kw_only=True):
    """216."""

    topic: str
    cluster_name: str | None = None


class GetAllTopicConfigRequestHeader(Header, frozen=True, kw_only=True):
    """21: a page of topics; without ``topic_seq`` all of them."""

    topic_seq: Int32 | None = None
    data_version: str | None = None
    max_topic_num: Int32 | None = None


class GetAllTopicConfigResponseHeader(Header, frozen=True, kw_only=True):
    """Answer to 21."""

    total_topic_num: Int32 | None = None


class GetAllSubscriptionGroupRequestHeader(Header, frozen=True, kw_only=True):
    """201: a page of groups; without ``group_seq`` all of them."""

    group_seq: Int32 | None = None
    data_version: str | None = None
    max_group_num: Int32 | None = None


class GetSubscriptionGroupConfigRequestHeader(Header, frozen=True, kw_only=True):
    """352 and 343."""

    group: str


class DeleteSubscriptionGroupRequestHeader(Header, frozen=True, kw_only=True):
    """207."""

    group_name: str
    clean_offset: bool = False


class GroupForbiddenRequestHeader(Header, frozen=True, kw_only=True):
    """353."""

    group: str
    topic: str
    readable: bool | None = None


class GetConsumeStatsRequestHeader(Header, frozen=True, kw_only=True):
    """208."""

    consumer_group: str
    topic: str | None = None
    topic_list: str | None = None  # "a;b;"


class ConsumerGroupRequestHeader(Header, frozen=True, kw_only=True):
    """203."""

    consumer_group: str


class ProducerGroupRequestHeader(Header, frozen=True, kw_only=True):
    """204."""

    producer_group: str


class GroupAndTopicRequestHeader(Header, frozen=True, kw_only=True):
    """303 and 345."""

    group: str
    topic: str


class ViewBrokerStatsDataRequestHeader(Header, frozen=True, kw_only=True):
    """315."""

    stats_name: str
    stats_key: str


class GetBrokerConsumeStatsRequestHeader(Header, frozen=True, kw_only=True):
    """317."""

    is_order: bool


class QueryConsumeQueueRequestHeader(Header, frozen=True, kw_only=True):
    """321."""

    topic: str
    queue_id: Int32
    index: Int64
    count: Int32
    consumer_group: str | None = None


class CloneGroupOffsetRequestHeader(Header, frozen=True, kw_only=True):
    """314."""

    src_group: str
    dest_group: str
    topic: str | None = None
    offline: bool = False


class GetBrokerConfigResponseHeader(Header, frozen=True, kw_only=True):
    """Answer to 26."""

    version: str  # data version as JSON text


class BrokerHeartbeatRequestHeader(Header, frozen=True, kw_only=True):
    """904."""

    cluster_name: str
    broker_addr: str
    broker_name: str
    broker_id: Int64 | None = None


class GetBrokerMemberGroupRequestHeader(Header, frozen=True, kw_only=True):
    """901."""

    cluster_name: str
    broker_name: str


class GetTopicsByClusterRequestHeader(Header, frozen=True, kw_only=True):
    """224."""

    cluster: str


class PutKVConfigRequestHeader(Header, frozen=True, kw_only=True):
    """100."""

    namespace: str
    key: str
    value: str


class KVConfigRequestHeader(Header, frozen=True, kw_only=True):
    """101 and 102."""

    namespace: str
    key: str


class GetKVConfigResponseHeader(Header, frozen=True, kw_only=True):
    """Answer to 101."""

    value: str | None = None


class GetKVListByNamespaceRequestHeader(Header, frozen=True, kw_only=True):
    """219."""

    namespace: str


class BrokerNameRequestHeader(Header, frozen=True, kw_only=True):
    """205 and 327."""

    broker_name: str


class WipeWritePermOfBrokerResponseHeader(Header, frozen=True, kw_only=True):
    """Answer to 205."""

    wipe_topic_count: Int32


class AddWritePermOfBrokerResponseHeader(Header, frozen=True, kw_only=True):
    """Answer to 327."""

    add_topic_count: Int32


class ResetOffsetRequestHeader(Header, frozen=True, kw_only=True):
    """220 to a client, 222 to a broker."""

    topic: str
    group: str
    timestamp: Int64  # ms; negative: to the end
    is_force: bool
    queue_id: Int32 = -1  # all
    offset: Int64 | None = None  # negative or absent: by timestamp


class GetConsumerStatusRequestHeader(Header, frozen=True, kw_only=True):
    """221 to a client, 223 to a broker."""

    topic: str
    group: str
    client_addr: str | None = None


class GetConsumerRunningInfoRequestHeader(Header, frozen=True, kw_only=True):
    """307."""

    consumer_group: str
    client_id: str
    jstack_enable: bool = False


class ConsumeMessageDirectlyRequestHeader(Header, frozen=True, kw_only=True):
    """309."""

    consumer_group: str
    client_id: str | None = None
    msg_id: str | None = None
    broker_name: str | None = None
    topic: str | None = None
    topic_sys_flag: Int32 | None = None
    group_sys_flag: Int32 | None = None
