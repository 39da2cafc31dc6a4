"""How large each request may be: bytes of its header and of its body, by request code.

A server reads nothing larger: it closes the connection when a frame announces more, or before it
parses the body of one that has come whole. The limits leave room for many times what official
clients send (frames recorded in ``tests/golden/frames``), and bound what one request costs to
parse. What a handler refuses with an answer, such as a message above ``maxMessageSize``, is below
them.
"""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from .codes import HeaderType, RequestCode, ResponseCode

FRAME_SIZE_MAX: Final = 16_777_216
"""Bytes of a whole frame, its 4 length bytes included. Source: RocketMQ ``NettyDecoder``."""

NAME_LENGTH_MAX: Final = 255
"""Characters of a name in a header or a body: topics, groups, client ids, message ids. The longest
are dead-letter topics, whose length a record keeps in one byte."""

FIELDS_MAX: Final = 256
"""Ext fields of one header; official requests have at most thirty, with those that every request
may carry."""


class RequestSize(NamedTuple):
    """What one request may have, bytes."""

    header: int
    body: int


HEADER_MAX: Final = 256 << 10
"""The largest header. A message has up to 32,767 bytes of properties, which JSON makes six times as
long if all of them are control characters; a pull has a filter of up to 65,536 characters."""

_ANY_HEADER: Final = 64 << 10  # thirty names, each six times as long in JSON, have 46 KiB
_NO_BODY: Final = 4 << 10  # some clients send a few bytes that nobody reads

SMALL: Final = RequestSize(_ANY_HEADER, _NO_BODY)
"""Requests that have names and numbers only; codes without a row have this size too."""

_MESSAGE: Final = RequestSize(HEADER_MAX, FRAME_SIZE_MAX)  # `maxMessageSize` may be set
_FILTER: Final = RequestSize(HEADER_MAX, _NO_BODY)
_SETTINGS: Final = RequestSize(HEADER_MAX, 1 << 20)

REQUEST_SIZES: Final[Mapping[int, RequestSize]] = {
    # The code of answers with a body; the handler that has asked for it limits that.
    ResponseCode.SUCCESS: RequestSize(_ANY_HEADER, FRAME_SIZE_MAX),
    RequestCode.SEND_MESSAGE: _MESSAGE,
    RequestCode.SEND_MESSAGE_V2: _MESSAGE,
    RequestCode.SEND_BATCH_MESSAGE: _MESSAGE,
    RequestCode.SEND_REPLY_MESSAGE: _MESSAGE,
    RequestCode.SEND_REPLY_MESSAGE_V2: _MESSAGE,
    RequestCode.PREPARE_TRANSACTION: _MESSAGE,  # as many as fit into a frame
    RequestCode.PULL_MESSAGE: _FILTER,
    RequestCode.LITE_PULL_MESSAGE: _FILTER,
    RequestCode.POP_MESSAGE: _FILTER,
    RequestCode.NOTIFICATION: _FILTER,
    RequestCode.BATCH_ACK_MESSAGE: RequestSize(_ANY_HEADER, 256 << 10),
    RequestCode.SET_MESSAGE_REQUEST_MODE: RequestSize(_ANY_HEADER, 64 << 10),
    RequestCode.END_TRANSACTION: RequestSize(HEADER_MAX, _NO_BODY),  # the message's unique key
    # A client with 1,000 subscriptions sends 250 KB. Reading a megabyte would take 50 ms.
    RequestCode.HEART_BEAT: RequestSize(_ANY_HEADER, 512 << 10),
    RequestCode.CHECK_CLIENT_CONFIG: RequestSize(_ANY_HEADER, 512 << 10),
    # Up to 10,000 queues of 100 bytes.
    RequestCode.LOCK_BATCH_MQ: RequestSize(_ANY_HEADER, 1 << 20),
    RequestCode.UNLOCK_BATCH_MQ: RequestSize(_ANY_HEADER, 1 << 20),
    RequestCode.QUERY_ASSIGNMENT: RequestSize(_ANY_HEADER, 64 << 10),  # five names
    RequestCode.END_TRANSACTIONS: RequestSize(_ANY_HEADER, 1 << 20),  # 1,024 decisions
    # A broker registers 20,000 topics with 200 bytes each.
    RequestCode.REGISTER_BROKER: RequestSize(_ANY_HEADER, 8 << 20),
    RequestCode.QUERY_DATA_VERSION: RequestSize(_ANY_HEADER, 64 << 10),
    # Lists of 1,000 topics or groups; a group may have 16 KiB, and usual ones have 500 bytes.
    RequestCode.UPDATE_AND_CREATE_TOPIC_LIST: RequestSize(_ANY_HEADER, 4 << 20),
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: RequestSize(_ANY_HEADER, 4 << 20),
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: RequestSize(_ANY_HEADER, 64 << 10),
    RequestCode.UPDATE_AND_CREATE_TOPIC: RequestSize(HEADER_MAX, _NO_BODY),  # attributes
    RequestCode.UPDATE_AND_CREATE_ACL_CONFIG: RequestSize(HEADER_MAX, _NO_BODY),  # all permissions
    RequestCode.PUT_KV_CONFIG: RequestSize(HEADER_MAX, _NO_BODY),  # the order of a topic's queues
    RequestCode.UPDATE_BROKER_CONFIG: _SETTINGS,
    RequestCode.UPDATE_NAMESRV_CONFIG: _SETTINGS,
    RequestCode.AUTH_CREATE_USER: _SETTINGS,
    RequestCode.AUTH_UPDATE_USER: _SETTINGS,
    RequestCode.AUTH_CREATE_ACL: _SETTINGS,
    RequestCode.AUTH_UPDATE_ACL: _SETTINGS,
    # Topics and groups in one field: lists of names.
    RequestCode.GET_CONSUME_STATS: RequestSize(HEADER_MAX, _NO_BODY),
    RequestCode.QUERY_CORRECTION_OFFSET: RequestSize(HEADER_MAX, _NO_BODY),
}
"""Sizes by request code; all others are `SMALL`."""

PEEKED: Final = 20
"""Bytes of a header that name its request if the peer writes the code first, as all official
clients do. Where they do not, the code is known when the header has been read."""

_JSON_CODE: Final = re.compile(rb'\{"code":([0-9]{1,6})[,}]')
_LARGEST: Final = RequestSize(HEADER_MAX, FRAME_SIZE_MAX)


def peek_size(header_type: int, header: bytes) -> RequestSize:
    """Return the size that a request may have, by the first ``PEEKED`` bytes after its head."""
    code = -1
    if header_type == HeaderType.JSON:
        match = _JSON_CODE.match(header)
        code = -1 if match is None else int(match[1])
    elif header_type == HeaderType.ROCKETMQ:
        code = int.from_bytes(header[:2])
    elif header[1] < 0x80:  # MSGPACK: an array whose first element is a small number,
        code = header[1]
    elif header[1] == 0xCC:  # a uint8,
        code = header[2]
    elif header[1] == 0xCD:  # or a uint16
        code = int.from_bytes(header[2:4])
    return _LARGEST if code < 0 else REQUEST_SIZES.get(code, SMALL)
