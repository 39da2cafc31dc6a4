"""Encode whole frames: requests and replies, the most frequent of them from byte templates.

A reply has the header type of its request: every official client can read that, and some can read
nothing else. JSON values are always strings, without white space: on anything else the Go client
fails the frame and the C++ client skips the field.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

import msgspec
from msgspec.structs import astuple

from .codes import (
    FLAG_ONE_WAY,
    FLAG_RESPONSE,
    VERSION,
    HeaderType,
    LanguageCode,
    RequestCode,
    ResponseCode,
)
from .command import RemotingCommand
from .ext_fields import Header, texts_of
from .header_tables import RESPONSE_HEADERS
from .headers import PullMessageResponseHeader, SendMessageResponseHeader
from .msgpack_header import sign
from .serialization import (
    FRAME_HEAD,
    HEADER_SIZE_MAX,
    encode_header,
    encode_texts,
    frame_head,
    join_frame,
)
from .shown_text import REMARK_MAX, shown
from .signature import Identity, signed_fields

_REGION: Final = "DefaultRegion"
_JSON: Final = int(HeaderType.JSON)
_MSGPACK: Final = int(HeaderType.MSGPACK)
_MSGPACK_TYPE: Final = _MSGPACK << 24
_PYTHON: Final = int(LanguageCode.PYTHON)
_SUCCESS: Final = int(ResponseCode.SUCCESS)  # a member of an enum takes longer to format
_JSON_TAIL: Final = b'"serializeTypeCurrentRPC":"JSON","version":%d}' % VERSION
_EMPTY_TEMPLATE: Final = b'{"code":%d,%b"flag":1,"language":"PYTHON","opaque":%d,' + _JSON_TAIL
_PULL_TEMPLATE: Final = (
    b'{"code":%d,"extFields":{"suggestWhichBrokerId":"0","nextBeginOffset":"%d","minOffset":"%d",'
    b'"maxOffset":"%d","topicSysFlag":"0","groupSysFlag":"0"},"flag":1,"language":"PYTHON",'
    b'"opaque":%d,%b'
) + _JSON_TAIL
_SEND_TEMPLATE: Final = (
    b'{"code":0,"extFields":{"queueId":"%%d",%b"msgId":"%%b","queueOffset":"%%d","MSG_REGION":"'
    b'DefaultRegion","TRACE_ON":"true"},"flag":1,"language":"PYTHON","opaque":%%d,' + _JSON_TAIL
)
_SEND_TEMPLATES: Final = _SEND_TEMPLATE % b"", _SEND_TEMPLATE % b'"transactionId":%b,'
"""Header of a send's answer, without and with a transaction id."""
_EMPTY: Final[Mapping[str, str]] = {}
_HAVE_EXT_FIELDS: Final = frozenset(RESPONSE_HEADERS) - {RequestCode.END_TRANSACTION}
"""Requests whose official answer has a header class. The one for END_TRANSACTION is halfmq's."""

_encode_json: Final = msgspec.json.Encoder().encode
_encode_msgpack: Final = msgspec.msgpack.Encoder().encode
_pack_head: Final = FRAME_HEAD.pack


def encode_request(
    code: int,
    *,
    opaque: int,
    header: Header | Mapping[str, str] | None = None,
    body: bytes = b"",
    one_way: bool = False,
    header_type: int = HeaderType.JSON,
    remark: str | None = None,
    version: int = VERSION,
    language: int = LanguageCode.PYTHON,
    signed_by: Identity | None = None,
) -> bytes:
    """Return the whole frame of a request, signed if ``signed_by`` is given."""
    flag = FLAG_ONE_WAY if one_way else 0
    if header_type == _MSGPACK and isinstance(header, Header):  # as halfmq's client sends
        fields = astuple(header)
        head = _encode_msgpack((code, opaque, flag, language, version, remark, fields))
        if signed_by is not None:
            head = sign(head, body, *signed_by)
        return frame_head(_MSGPACK, len(head), len(body)) + head + body
    if signed_by is None or header_type == _MSGPACK:
        head = encode_header(header_type, code, opaque, flag, language, version, remark, header)
        if signed_by is not None:
            head = sign(head, body, *signed_by)
    else:
        texts = signed_fields(texts_of(header) or {}, body, *signed_by)
        head = encode_texts(header_type, code, opaque, flag, language, version, remark, texts)
    return join_frame(header_type, head, body)


def encode_reply(
    request: RemotingCommand,
    code: int = _SUCCESS,
    *,
    header: Header | Mapping[str, str] | None = None,
    remark: str | None = None,
    body: bytes = b"",
) -> bytes:
    """Return the whole frame of the answer to a request, in the request's header type.

    If the official answer has a header class, ext fields are present even if empty: Java clients
    read them without checking whether they exist. The remark is cut, because it may quote the
    request. An answer that does not fit into a frame is replaced by one that says so.
    """
    if header is None and request.code in _HAVE_EXT_FIELDS:
        header = _EMPTY
    if not header and remark is None and request.header_type == _JSON:  # as most are
        ext = b"" if header is None else b'"extFields":{},'
        head = _EMPTY_TEMPLATE % (code, ext, request.opaque)
        size = len(head)
        return _pack_head(4 + size + len(body), size) + head + body
    if remark is not None:
        remark = shown(remark, REMARK_MAX, keep="\n\t")  # lines that RocketMQ's remarks have
    head = _reply_header(request, code, header, remark)
    if len(head) > HEADER_SIZE_MAX:
        reason = f"the answer has a header of {len(head)} bytes, the limit is {HEADER_SIZE_MAX}"
        head, body = _reply_header(request, ResponseCode.SYSTEM_ERROR, _EMPTY, reason), b""
    return join_frame(request.header_type, head, body)


def encode_send_reply(
    request: RemotingCommand,
    msg_id: str,
    queue_id: int,
    queue_offset: int,
    transaction_id: str | None,
) -> bytes:
    """Return the whole frame of the answer to a stored message.

    ``msg_id`` is the offset message id; for a batch, all of them joined by commas. A transaction
    producer extracts the half message's physical offset from it.
    """
    if request.header_type == _JSON:
        without_id, with_id = _SEND_TEMPLATES
        if transaction_id:
            # The client chose this text, so it is quoted; our own values need no escaping.
            header = with_id % (
                queue_id,
                _encode_json(transaction_id),
                msg_id.encode(),
                queue_offset,
                request.opaque,
            )
        else:
            header = without_id % (queue_id, msg_id.encode(), queue_offset, request.opaque)
        size = len(header)
        return _pack_head(4 + size, size) + header
    fields = (msg_id, queue_id, queue_offset, transaction_id, None, _REGION, "true")
    if request.header_type == _MSGPACK:
        header = _encode_msgpack((0, request.opaque, FLAG_RESPONSE, _PYTHON, VERSION, None, fields))
        size = len(header)
        return _pack_head(4 + size, _MSGPACK_TYPE | size) + header
    return encode_reply(
        request,
        header=SendMessageResponseHeader(
            msg_id=msg_id,
            queue_id=queue_id,
            queue_offset=queue_offset,
            transaction_id=transaction_id,
            msg_region=_REGION,
            trace_on="true",
        ),
    )


def encode_end_reply(request: RemotingCommand, message_id: str) -> bytes:
    """Return the whole frame of the answer to a commit in MSGPACK.

    Its header is an ``FinalMessageResponseHeader`` with the final message's offset id.
    """
    fields = (message_id,)
    header = _encode_msgpack((0, request.opaque, FLAG_RESPONSE, _PYTHON, VERSION, None, fields))
    size = len(header)
    return _pack_head(4 + size, _MSGPACK_TYPE | size) + header


def encode_pull_reply(
    request: RemotingCommand,
    code: int,
    *,
    next_begin_offset: int,
    min_offset: int,
    max_offset: int,
    remark: str | None,
    body_size: int,
) -> bytes:
    """Return the frame of the answer to a pull without its body; its length counts the body.

    The caller must send ``body_size`` bytes of body next, in any number of pieces.
    """
    if request.header_type == _JSON:
        header = _PULL_TEMPLATE % (
            code,
            next_begin_offset,
            min_offset,
            max_offset,
            request.opaque,
            _json_remark(remark),
        )
    elif request.header_type == _MSGPACK:
        fields = (0, next_begin_offset, min_offset, max_offset, None, 0, 0)
        header = _encode_msgpack(
            (code, request.opaque, FLAG_RESPONSE, _PYTHON, VERSION, remark, fields)
        )
    else:
        offsets = PullMessageResponseHeader(
            suggest_which_broker_id=0,
            next_begin_offset=next_begin_offset,
            min_offset=min_offset,
            max_offset=max_offset,
            topic_sys_flag=0,
            group_sys_flag=0,
        )
        header = _reply_header(request, code, offsets, remark)
    size = len(header)
    return _pack_head(4 + size + body_size, request.header_type << 24 | size) + header


@lru_cache(maxsize=64)
def _json_remark(remark: str | None) -> bytes:
    """Return the remark field. Cached, because the remarks of pulls are a few status names."""
    return b"" if remark is None else b'"remark":%b,' % _encode_json(remark)


def _reply_header(
    request: RemotingCommand,
    code: int,
    header: Header | Mapping[str, str] | None,
    remark: str | None,
) -> bytes:
    if not header and remark is None and request.header_type == _MSGPACK:
        reply = (code, request.opaque, FLAG_RESPONSE, _PYTHON, VERSION, None, None)
        return _encode_msgpack(reply)
    return encode_header(
        request.header_type, code, request.opaque, FLAG_RESPONSE, _PYTHON, VERSION, remark, header
    )
