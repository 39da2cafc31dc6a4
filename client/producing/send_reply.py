"""Replies of consumers to requests; the broker pushes them to the client that waits.

Source: RocketMQ ``MessageUtil.createReplyMessage``.
"""

from __future__ import annotations

from collections.abc import Mapping

from halfmq.remoting.codes import RequestCode
from halfmq.remoting.headers import SendMessageRequestHeaderV2
from halfmq.store.format import properties as names
from halfmq.store.format.record import Record
from halfmq.store.format.topics import DEFAULT_TOPIC

from ..config import ClientConfig
from ..errors import InvalidMessageError, MessageTooLargeError
from ..net.compression import compress_body
from ..net.response_errors import expect_success
from ..net.session import Session, wall_clock_ms


async def send_reply(
    session: Session,
    config: ClientConfig,
    group: str,
    record: Record,
    broker_name: str,
    address: str,
    body: bytes,
    properties: Mapping[str, str] | None = None,
) -> None:
    """Send the reply to a request.

    Raises:
        InvalidMessageError: The message asks for no reply, the body is not bytes, or a property
            cannot be used.
        MessageTooLargeError: The body is above its limit.
        ClientError: A broker does not answer, or refuses: the client that waits is gone.
    """
    given: object = body
    if not isinstance(given, bytes):
        raise InvalidMessageError(f"the body is {type(body).__name__}, expected bytes")
    if len(body) > config.message_size_max:
        raise MessageTooLargeError("body", len(body), config.message_size_max)
    request = record.property_map
    names_to_copy = names.PROPERTY_CORRELATION_ID, names.PROPERTY_REPLY_TO_CLIENT
    if not all(request.get(name) for name in names_to_copy):
        raise InvalidMessageError("this message asks for no reply: it was sent with send")
    reply = {**(properties or {}), **{name: request[name] for name in names_to_copy}}
    reply[names.PROPERTY_TTL] = request.get(names.PROPERTY_TTL, "0")
    reply[names.PROPERTY_TYPE] = "reply"
    packed, sys_flag = compress_body(body, config.compress_over, config.compression)
    topic = f"{request.get(names.PROPERTY_CLUSTER, 'DefaultCluster')}_REPLY_TOPIC"
    header = SendMessageRequestHeaderV2(
        producer_group=group,
        topic=topic,
        default_topic=DEFAULT_TOPIC,
        default_topic_queue_nums=config.default_topic_queues,
        queue_id=0,
        sys_flag=sys_flag,
        born_timestamp=wall_clock_ms(),
        flag=0,
        properties="".join(f"{name}\x01{value}\x02" for name, value in reply.items()),
        broker_name=broker_name,
    )
    code = RequestCode.SEND_REPLY_MESSAGE_V2
    expect_success(await session.call(address, code, header, packed))
