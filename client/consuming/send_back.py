"""Give a message back to its broker, which delivers it to the group again or keeps it as dead."""

from __future__ import annotations

import logging

from halfmq.remoting.codes import RequestCode
from halfmq.remoting.headers import ConsumerSendMsgBackRequestHeader

from ..errors import ClientError
from ..message import MessageView
from ..net.response_errors import expect_success
from ..net.session import Session
from .delivery import Delivery
from .offsets import broker_address

logger = logging.getLogger(__name__)


async def send_back(
    session: Session, group: str, delivery: Delivery, delay_level: int, retries_max: int | None
) -> bool:
    """Send a message back for redelivery; return whether the broker has accepted it."""
    record, queue = delivery.record, delivery.window.queue
    header = ConsumerSendMsgBackRequestHeader(
        offset=record.physical_offset,
        group=group,
        delay_level=delay_level,
        origin_msg_id=MessageView(record, queue.broker_name).message_id,
        origin_topic=queue.topic,
        max_reconsume_times=retries_max,
        broker_name=queue.broker_name,
        reason=delivery.reason,
        delay_ms=None if delivery.seconds is None else round(delivery.seconds * 1_000),
    )
    try:
        address = broker_address(session, queue)
        expect_success(await session.call(address, RequestCode.CONSUMER_SEND_MSG_BACK, header))
    except ClientError as error:
        logger.info("event=message_not_taken_back queue=%s reason=%r", queue, str(error))
        return False
    return True
