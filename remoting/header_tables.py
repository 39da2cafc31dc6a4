"""Which header class each request and each answer has, and how ext fields become one.

Source: RocketMQ ``remoting/protocol/header``.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from .access_bodies import (
    AclRequestHeader,
    DeleteAclRequestHeader,
    GetBrokerAclConfigResponseHeader,
    ListAclsRequestHeader,
    ListUsersRequestHeader,
    UserRequestHeader,
)
from .admin_headers import (
    AddWritePermOfBrokerResponseHeader,
    BrokerHeartbeatRequestHeader,
    BrokerNameRequestHeader,
    CloneGroupOffsetRequestHeader,
    ConsumeMessageDirectlyRequestHeader,
    ConsumerGroupRequestHeader,
    CreateTopicRequestHeader,
    DeleteSubscriptionGroupRequestHeader,
    DeleteTopicFromNamesrvRequestHeader,
    GetAllSubscriptionGroupRequestHeader,
    GetAllTopicConfigRequestHeader,
    GetAllTopicConfigResponseHeader,
    GetBrokerConfigResponseHeader,
    GetBrokerConsumeStatsRequestHeader,
    GetBrokerMemberGroupRequestHeader,
    GetConsumerRunningInfoRequestHeader,
    GetConsumerStatusRequestHeader,
    GetConsumeStatsRequestHeader,
    GetKVConfigResponseHeader,
    GetKVListByNamespaceRequestHeader,
    GetSubscriptionGroupConfigRequestHeader,
    GetTopicsByClusterRequestHeader,
    GroupAndTopicRequestHeader,
    GroupForbiddenRequestHeader,
    KVConfigRequestHeader,
    ProducerGroupRequestHeader,
    PutKVConfigRequestHeader,
    QueryConsumeQueueRequestHeader,
    QueryCorrectionOffsetHeader,
    ResetOffsetRequestHeader,
    TopicRequestHeader,
    ViewBrokerStatsDataRequestHeader,
    WipeWritePermOfBrokerResponseHeader,
)
from .codes import RequestCode
from .command import RemotingCommand
from .errors import HeaderError
from .ext_fields import ARRAY_MARKS, FieldError, Header, array_variant, parse_texts
from .headers import (
    BrokerIdentityRequestHeader,
    CheckTransactionStateRequestHeader,
    ConsumerSendMsgBackRequestHeader,
    EndTransactionRequestHeader,
    GetConsumerListByGroupRequestHeader,
    GetConsumerListByGroupResponseHeader,
    GetEarliestMsgStoretimeRequestHeader,
    GetEarliestMsgStoretimeResponseHeader,
    GetMaxOffsetRequestHeader,
    GetMaxOffsetResponseHeader,
    GetMinOffsetRequestHeader,
    GetMinOffsetResponseHeader,
    GetRouteInfoRequestHeader,
    HeartbeatRequestHeader,
    HeartbeatResponseHeader,
    NotifyConsumerIdsChangedRequestHeader,
    PullMessageRequestHeader,
    PullMessageResponseHeader,
    QueryConsumerOffsetRequestHeader,
    QueryConsumerOffsetResponseHeader,
    QueryConsumersRequestHeader,
    QueryConsumersResponseHeader,
    QueryDataVersionResponseHeader,
    QueryMessageRequestHeader,
    QueryMessageResponseHeader,
    QueryTimersRequestHeader,
    QueryTimersResponseHeader,
    RecallMessageRequestHeader,
    RecallMessageResponseHeader,
    RegisterBrokerRequestHeader,
    RegisterBrokerResponseHeader,
    ReplyMessageRequestHeader,
    ResumeCheckHalfMessageRequestHeader,
    SearchOffsetRequestHeader,
    SearchOffsetResponseHeader,
    SendMessageRequestHeader,
    SendMessageRequestHeaderV2,
    SendMessageResponseHeader,
    UnregisterClientRequestHeader,
    UnregisterClientResponseHeader,
    UpdateConsumerOffsetRequestHeader,
    UpdateConsumerOffsetResponseHeader,
    ViewMessageRequestHeader,
)
from .transaction_headers import (
    DecideTransactionRequestHeader,
    DecideTransactionResponseHeader,
    EndTransactionResponseHeader,
    EndTransactionsRequestHeader,
    PrepareTransactionRequestHeader,
    QueryTransactionsRequestHeader,
    QueryTransactionsResponseHeader,
)

H = TypeVar("H", bound=Header)


REQUEST_HEADERS: Final[dict[int, type[Header]]] = {
    RequestCode.SEND_MESSAGE: SendMessageRequestHeader,
    RequestCode.PULL_MESSAGE: PullMessageRequestHeader,
    RequestCode.QUERY_MESSAGE: QueryMessageRequestHeader,
    RequestCode.QUERY_CONSUMER_OFFSET: QueryConsumerOffsetRequestHeader,
    RequestCode.UPDATE_CONSUMER_OFFSET: UpdateConsumerOffsetRequestHeader,
    RequestCode.UPDATE_AND_CREATE_TOPIC: CreateTopicRequestHeader,
    RequestCode.GET_ALL_TOPIC_CONFIG: GetAllTopicConfigRequestHeader,
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: SearchOffsetRequestHeader,
    RequestCode.GET_MAX_OFFSET: GetMaxOffsetRequestHeader,
    RequestCode.GET_MIN_OFFSET: GetMinOffsetRequestHeader,
    RequestCode.GET_EARLIEST_MSG_STORETIME: GetEarliestMsgStoretimeRequestHeader,
    RequestCode.VIEW_MESSAGE_BY_ID: ViewMessageRequestHeader,
    RequestCode.HEART_BEAT: HeartbeatRequestHeader,
    RequestCode.UNREGISTER_CLIENT: UnregisterClientRequestHeader,
    RequestCode.CONSUMER_SEND_MSG_BACK: ConsumerSendMsgBackRequestHeader,
    RequestCode.END_TRANSACTION: EndTransactionRequestHeader,
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: GetConsumerListByGroupRequestHeader,
    RequestCode.CHECK_TRANSACTION_STATE: CheckTransactionStateRequestHeader,
    RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: NotifyConsumerIdsChangedRequestHeader,
    RequestCode.PUT_KV_CONFIG: PutKVConfigRequestHeader,
    RequestCode.GET_KV_CONFIG: KVConfigRequestHeader,
    RequestCode.DELETE_KV_CONFIG: KVConfigRequestHeader,
    RequestCode.REGISTER_BROKER: RegisterBrokerRequestHeader,
    RequestCode.UNREGISTER_BROKER: BrokerIdentityRequestHeader,
    RequestCode.GET_ROUTEINFO_BY_TOPIC: GetRouteInfoRequestHeader,
    RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: GetAllSubscriptionGroupRequestHeader,
    RequestCode.GET_TOPIC_STATS_INFO: TopicRequestHeader,
    RequestCode.GET_CONSUMER_CONNECTION_LIST: ConsumerGroupRequestHeader,
    RequestCode.GET_PRODUCER_CONNECTION_LIST: ProducerGroupRequestHeader,
    RequestCode.WIPE_WRITE_PERM_OF_BROKER: BrokerNameRequestHeader,
    RequestCode.DELETE_SUBSCRIPTIONGROUP: DeleteSubscriptionGroupRequestHeader,
    RequestCode.GET_CONSUME_STATS: GetConsumeStatsRequestHeader,
    RequestCode.DELETE_TOPIC_IN_BROKER: TopicRequestHeader,
    RequestCode.DELETE_TOPIC_IN_NAMESRV: DeleteTopicFromNamesrvRequestHeader,
    RequestCode.REGISTER_TOPIC_IN_NAMESRV: TopicRequestHeader,
    RequestCode.GET_KVLIST_BY_NAMESPACE: GetKVListByNamespaceRequestHeader,
    RequestCode.RESET_CONSUMER_CLIENT_OFFSET: ResetOffsetRequestHeader,
    RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: GetConsumerStatusRequestHeader,
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: ResetOffsetRequestHeader,
    RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: GetConsumerStatusRequestHeader,
    RequestCode.GET_TOPICS_BY_CLUSTER: GetTopicsByClusterRequestHeader,
    RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: TopicRequestHeader,
    RequestCode.QUERY_CONSUME_TIME_SPAN: GroupAndTopicRequestHeader,
    RequestCode.GET_CONSUMER_RUNNING_INFO: GetConsumerRunningInfoRequestHeader,
    RequestCode.QUERY_CORRECTION_OFFSET: QueryCorrectionOffsetHeader,
    RequestCode.CONSUME_MESSAGE_DIRECTLY: ConsumeMessageDirectlyRequestHeader,
    RequestCode.SEND_MESSAGE_V2: SendMessageRequestHeaderV2,
    RequestCode.CLONE_GROUP_OFFSET: CloneGroupOffsetRequestHeader,
    RequestCode.VIEW_BROKER_STATS_DATA: ViewBrokerStatsDataRequestHeader,
    RequestCode.GET_BROKER_CONSUME_STATS: GetBrokerConsumeStatsRequestHeader,
    RequestCode.SEND_BATCH_MESSAGE: SendMessageRequestHeaderV2,
    RequestCode.QUERY_CONSUME_QUEUE: QueryConsumeQueueRequestHeader,
    RequestCode.QUERY_DATA_VERSION: BrokerIdentityRequestHeader,
    RequestCode.RESUME_CHECK_HALF_MESSAGE: ResumeCheckHalfMessageRequestHeader,
    RequestCode.SEND_REPLY_MESSAGE: SendMessageRequestHeader,
    RequestCode.SEND_REPLY_MESSAGE_V2: SendMessageRequestHeaderV2,
    RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT: ReplyMessageRequestHeader,
    RequestCode.ADD_WRITE_PERM_OF_BROKER: BrokerNameRequestHeader,
    RequestCode.QUERY_TOPICS_BY_CONSUMER: GetSubscriptionGroupConfigRequestHeader,
    RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER: GroupAndTopicRequestHeader,
    RequestCode.GET_TOPIC_CONFIG: TopicRequestHeader,
    RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: GetSubscriptionGroupConfigRequestHeader,
    RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN: GroupForbiddenRequestHeader,
    RequestCode.LITE_PULL_MESSAGE: PullMessageRequestHeader,
    RequestCode.RECALL_MESSAGE: RecallMessageRequestHeader,
    RequestCode.GET_BROKER_MEMBER_GROUP: GetBrokerMemberGroupRequestHeader,
    RequestCode.BROKER_HEARTBEAT: BrokerHeartbeatRequestHeader,
    RequestCode.AUTH_CREATE_USER: UserRequestHeader,
    RequestCode.AUTH_UPDATE_USER: UserRequestHeader,
    RequestCode.AUTH_DELETE_USER: UserRequestHeader,
    RequestCode.AUTH_GET_USER: UserRequestHeader,
    RequestCode.AUTH_LIST_USER: ListUsersRequestHeader,
    RequestCode.AUTH_CREATE_ACL: AclRequestHeader,
    RequestCode.AUTH_UPDATE_ACL: AclRequestHeader,
    RequestCode.AUTH_DELETE_ACL: DeleteAclRequestHeader,
    RequestCode.AUTH_GET_ACL: AclRequestHeader,
    RequestCode.AUTH_LIST_ACL: ListAclsRequestHeader,
    RequestCode.QUERY_TRANSACTIONS: QueryTransactionsRequestHeader,
    RequestCode.END_TRANSACTIONS: EndTransactionsRequestHeader,
    RequestCode.PREPARE_TRANSACTION: PrepareTransactionRequestHeader,
    RequestCode.DECIDE_TRANSACTION: DecideTransactionRequestHeader,
    RequestCode.QUERY_CONSUMERS: QueryConsumersRequestHeader,
    RequestCode.QUERY_TIMERS: QueryTimersRequestHeader,
}
"""Request code to the class of its header."""


RESPONSE_HEADERS: Final[dict[int, type[Header]]] = {
    RequestCode.SEND_MESSAGE: SendMessageResponseHeader,
    RequestCode.SEND_MESSAGE_V2: SendMessageResponseHeader,
    RequestCode.SEND_BATCH_MESSAGE: SendMessageResponseHeader,
    RequestCode.SEND_REPLY_MESSAGE: SendMessageResponseHeader,
    RequestCode.SEND_REPLY_MESSAGE_V2: SendMessageResponseHeader,
    RequestCode.PULL_MESSAGE: PullMessageResponseHeader,
    RequestCode.LITE_PULL_MESSAGE: PullMessageResponseHeader,
    RequestCode.QUERY_MESSAGE: QueryMessageResponseHeader,
    RequestCode.QUERY_CONSUMER_OFFSET: QueryConsumerOffsetResponseHeader,
    RequestCode.UPDATE_CONSUMER_OFFSET: UpdateConsumerOffsetResponseHeader,
    RequestCode.GET_ALL_TOPIC_CONFIG: GetAllTopicConfigResponseHeader,
    RequestCode.GET_BROKER_CONFIG: GetBrokerConfigResponseHeader,
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: SearchOffsetResponseHeader,
    RequestCode.GET_MAX_OFFSET: GetMaxOffsetResponseHeader,
    RequestCode.GET_MIN_OFFSET: GetMinOffsetResponseHeader,
    RequestCode.GET_EARLIEST_MSG_STORETIME: GetEarliestMsgStoretimeResponseHeader,
    RequestCode.HEART_BEAT: HeartbeatResponseHeader,
    RequestCode.UNREGISTER_CLIENT: UnregisterClientResponseHeader,
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: GetConsumerListByGroupResponseHeader,
    RequestCode.GET_KV_CONFIG: GetKVConfigResponseHeader,
    RequestCode.REGISTER_BROKER: RegisterBrokerResponseHeader,
    RequestCode.WIPE_WRITE_PERM_OF_BROKER: WipeWritePermOfBrokerResponseHeader,
    RequestCode.ADD_WRITE_PERM_OF_BROKER: AddWritePermOfBrokerResponseHeader,
    RequestCode.QUERY_DATA_VERSION: QueryDataVersionResponseHeader,
    RequestCode.RECALL_MESSAGE: RecallMessageResponseHeader,
    RequestCode.GET_BROKER_CLUSTER_ACL_INFO: GetBrokerAclConfigResponseHeader,
    RequestCode.END_TRANSACTION: EndTransactionResponseHeader,
    RequestCode.QUERY_TRANSACTIONS: QueryTransactionsResponseHeader,
    RequestCode.DECIDE_TRANSACTION: DecideTransactionResponseHeader,
    RequestCode.QUERY_CONSUMERS: QueryConsumersResponseHeader,
    RequestCode.QUERY_TIMERS: QueryTimersResponseHeader,
}
"""Request code to the class of its answer's header; all other answers have no ext fields."""


def typed_request_header(code: int, texts: dict[str, str] | None) -> tuple[object, str | None]:
    """Return ``header`` and ``header_error`` of a request with these ext fields."""
    kind = REQUEST_HEADERS.get(code)
    if kind is None:
        return texts, None
    texts = texts or {}
    try:
        return parse_texts(kind, texts), None
    except FieldError as error:
        return texts, str(error)


def response_header(command: RemotingCommand, kind: type[H]) -> H:
    """Decode a response's ext fields as the class that its request requires.

    Raises:
        HeaderError: The peer left out a required field, or a value does not parse.
    """
    try:
        if isinstance(command.header, msgspec.Raw):
            return _from_msgpack(command.header, kind)
        texts = command.header or {}
        assert isinstance(texts, dict), "a response is not typed by its decoder"
        return parse_texts(kind, texts)
    except FieldError as error:
        raise HeaderError(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HeaderError(f"response header: {error}") from error


def _from_msgpack(raw: msgspec.Raw, kind: type[H]) -> H:
    if memoryview(raw)[0] in ARRAY_MARKS:
        header: H = msgspec.msgpack.decode(raw, type=array_variant(kind), strict=False)
        return header
    return parse_texts(kind, msgspec.msgpack.decode(raw, type=dict[str, str]))
