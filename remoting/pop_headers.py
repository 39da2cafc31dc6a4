"""Headers of pop requests: consumption message by message.

Source: RocketMQ ``PopMessageRequestHeader`` and its neighbours.
"""

from __future__ import annotations

from msgspec import field

from .codes import RequestCode
from .ext_fields import Header, Int32, Int64, Name, answer_header, request_header


@request_header(RequestCode.POP_MESSAGE)
class PopMessageRequestHeader(Header, frozen=True, kw_only=True):
    """POP_MESSAGE (200050): get messages and hide them from the other members of the group."""

    consumer_group: Name
    topic: Name
    queue_id: Int32  # -1: any
    max_msg_nums: Int32
    invisible_time: Int64  # ms
    poll_time: Int64  # ms to wait for a message
    born_time: Int64 = 0  # ms, by the client's clock
    init_mode: Int32 = 0  # where a new group begins: 0 at the first message, 1 at the end
    exp_type: Name | None = None
    exp: str | None = None
    order: bool = False
    attempt_id: Name | None = None
    broker_name: Name | None = field(default=None, name="bname")


@answer_header(RequestCode.POP_MESSAGE, RequestCode.PEEK_MESSAGE)
class PopMessageResponseHeader(Header, frozen=True, kw_only=True):
    """Answer to POP_MESSAGE; the body has the stored records, one after the other."""

    pop_time: Int64
    invisible_time: Int64
    revive_qid: Int32
    rest_num: Int64
    start_offset_info: str | None = None
    msg_offset_info: str | None = None
    order_count_info: str | None = None


@request_header(RequestCode.PEEK_MESSAGE)
class PeekMessageRequestHeader(Header, frozen=True, kw_only=True):
    """PEEK_MESSAGE (200052): see the next messages without taking them."""

    consumer_group: Name
    topic: Name
    queue_id: Int32
    max_msg_nums: Int32
    broker_name: Name | None = field(default=None, name="bname")


@request_header(RequestCode.ACK_MESSAGE)
class AckMessageRequestHeader(Header, frozen=True, kw_only=True):
    """ACK_MESSAGE (200051): the message is consumed."""

    consumer_group: Name
    topic: Name  # where the message was popped, perhaps a retry topic
    queue_id: Int32
    extra_info: str  # the handle
    offset: Int64
    broker_name: Name | None = field(default=None, name="bname")


@request_header(RequestCode.CHANGE_MESSAGE_INVISIBLETIME)
class ChangeInvisibleTimeRequestHeader(AckMessageRequestHeader, frozen=True, kw_only=True):
    """CHANGE_MESSAGE_INVISIBLETIME (200053): hide a popped message for so long from now on."""

    invisible_time: Int64  # ms


@answer_header(RequestCode.CHANGE_MESSAGE_INVISIBLETIME)
class ChangeInvisibleTimeResponseHeader(Header, frozen=True, kw_only=True):
    """Answer to CHANGE_MESSAGE_INVISIBLETIME: what the new handle is made of."""

    pop_time: Int64
    invisible_time: Int64
    revive_qid: Int32


@request_header(RequestCode.NOTIFICATION)
class NotificationRequestHeader(Header, frozen=True, kw_only=True):
    """NOTIFICATION (200054): wait until there are messages, without popping them."""

    consumer_group: Name
    topic: Name
    queue_id: Int32
    poll_time: Int64
    born_time: Int64 = 0
    order: bool = False
    attempt_id: Name | None = None
    exp_type: Name | None = None
    exp: str | None = None
    broker_name: Name | None = field(default=None, name="bname")


@answer_header(RequestCode.NOTIFICATION)
class NotificationResponseHeader(Header, frozen=True, kw_only=True):
    """Answer to NOTIFICATION."""

    has_msg: bool
    polling_full: bool = False


@request_header(RequestCode.POLLING_INFO)
class PollingInfoRequestHeader(Header, frozen=True, kw_only=True):
    """POLLING_INFO (200055): how many pops wait."""

    consumer_group: Name
    topic: Name
    queue_id: Int32
    broker_name: Name | None = field(default=None, name="bname")


@answer_header(RequestCode.POLLING_INFO)
class PollingInfoResponseHeader(Header, frozen=True, kw_only=True):
    """Answer to POLLING_INFO."""

    polling_num: Int32
