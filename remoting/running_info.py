"""What a consumer tells operators: its running info (307), and what came of one message (309).

Encoders and decoders follow the rules of ``bodies``.

Source: RocketMQ ``ConsumerRunningInfo``, ``ProcessQueueInfo``, ``ConsumeMessageDirectlyResult``.
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from .bodies import QueueKey, SubscriptionData
from .errors import BodyError
from .ext_fields import Int64
from .fastjson import convert, dump, object_keyed_map, parse


class QueueProgress(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One queue that a consumer pulls."""

    commit_offset: Int64  # where another consumer would resume
    cached_msg_min_offset: Int64 = 0  # of the messages that it has pulled and not acknowledged
    cached_msg_max_offset: Int64 = 0
    cached_msg_count: Int64 = 0
    cached_msg_size_in_mi_b: Int64 = msgspec.field(default=0, name="cachedMsgSizeInMiB")
    locked: bool = False  # of an orderly consumer
    droped: bool = False  # it does not pull the queue any more
    last_pull_timestamp: Int64 = 0  # ms; 0: never
    last_consume_timestamp: Int64 = 0


class RunningInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The body of an answer to GET_CONSUMER_RUNNING_INFO (307)."""

    properties: Mapping[str, str]
    subscriptions: tuple[SubscriptionData, ...]
    queues: Mapping[QueueKey, QueueProgress]
    stacks: str | None = None


class DirectOutcome(StrEnum):
    """What came of a message that a consumer was given directly. Source: ``CMResult``."""

    SUCCESS = "CR_SUCCESS"
    LATER = "CR_LATER"
    ROLLBACK = "CR_ROLLBACK"
    COMMIT = "CR_COMMIT"
    THROW_EXCEPTION = "CR_THROW_EXCEPTION"
    RETURN_NULL = "CR_RETURN_NULL"


class DirectResult(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The body of an answer to CONSUME_MESSAGE_DIRECTLY (309)."""

    consume_result: DirectOutcome | None = None
    remark: str | None = None
    spent_time_mills: Int64 = 0


def encode_running_info(info: RunningInfo) -> bytes:
    """Return the body of an answer to 307. mqadmin fails without the empty tables."""
    stacks = b"" if info.stacks is None else b'"jstack":%b,' % dump(info.stacks)
    return (
        b'{%b"mqPopTable":{},"mqTable":%b,"properties":%b,"statusTable":{},"subscriptionSet":%b,'
        b'"userConsumerInfo":{}}'
    ) % (
        stacks,
        object_keyed_map(info.queues.items()),
        dump(info.properties),
        dump(info.subscriptions),
    )


def decode_running_info(body: bytes) -> RunningInfo:
    """Decode the body of an answer to 307. Raises BodyError."""
    try:
        fields = msgspec.convert(parse(body), dict[str, object])
        queues = msgspec.convert(
            fields.get("mqTable") or {}, dict[str, QueueProgress], strict=False
        )
        return RunningInfo(
            properties={
                name: str(value)
                for name, value in msgspec.convert(
                    fields.get("properties") or {}, dict[str, object]
                ).items()
            },
            subscriptions=msgspec.convert(
                fields.get("subscriptionSet") or (), tuple[SubscriptionData, ...], strict=False
            ),
            queues={
                msgspec.convert(parse(key.encode()), QueueKey, strict=False): progress
                for key, progress in queues.items()
            },
            stacks=msgspec.convert(fields.get("jstack"), str | None),
        )
    except msgspec.ValidationError as error:
        raise BodyError(str(error)) from error


def encode_direct_result(result: DirectResult) -> bytes:
    """Return the body of an answer to 309."""
    return dump(result)


def decode_direct_result(body: bytes) -> DirectResult:
    """Decode the body of an answer to 309. Raises BodyError."""
    return convert(parse(body), DirectResult, "a result")
