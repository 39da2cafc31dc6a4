"""From a whole frame to a command and back, for each of the three header types.

A frame is a length (int32, of all that follows), a word whose top byte is the header type and
whose low 24 bits are the header's length, the header, and the body. Source: RocketMQ
``RemotingCommand``, ``NettyDecoder``, ``NettyEncoder``.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from . import json_header, msgpack_header, rocketmq_header
from .codes import HeaderType
from .command import RemotingCommand
from .errors import HeaderError
from .ext_fields import texts_of

FRAME_HEAD: Final = Struct(">iI")  # length of all that follows; header type and length
HEADER_SIZE_MAX: Final = 0xFFFFFF  # bytes: 24 bits of the second word

_SECOND_WORD: Final = Struct(">I")


def decode_command(
    data: bytes, start: int, end: int, *, responses_first: bool = False
) -> RemotingCommand:
    """Read the frame whose second word stands at ``start`` and whose last byte is before ``end``.

    Raises:
        HeaderError: The header contradicts its length, its type or its encoding.
    """
    if end - start < 4:
        raise HeaderError("frame without a header length")
    (word,) = _SECOND_WORD.unpack_from(data, start)
    header_end = start + 4 + (word & HEADER_SIZE_MAX)
    if header_end > end:
        raise HeaderError("header is longer than its frame")
    raw = data[start + 4 : header_end]
    header_type = word >> 24
    if header_type == HeaderType.JSON:
        if responses_first:
            return json_header.decode_response(raw, data[header_end:end])
        return json_header.decode_request(raw, data[header_end:end])
    if header_type == HeaderType.MSGPACK:
        return msgpack_header.decode(raw, data[header_end:end])
    if header_type == HeaderType.ROCKETMQ:
        return rocketmq_header.decode(raw, data[header_end:end])
    raise HeaderError(f"header type {header_type}")


def encode_frame(command: RemotingCommand) -> bytes:
    """Return the whole frame of a command, its 4 length bytes included."""
    return join_frame(
        command.header_type,
        encode_header(
            command.header_type,
            command.code,
            command.opaque,
            command.flag,
            command.language,
            command.version,
            command.remark,
            command.header,
        ),
        command.body,
    )


def encode_header(
    header_type: int,
    code: int,
    opaque: int,
    flag: int,
    language: int,
    version: int,
    remark: str | None,
    header: object,
) -> bytes:
    """Return the header alone; ``header`` is a struct of ``headers``, a map or None."""
    if header_type == HeaderType.MSGPACK:
        return msgpack_header.encode(code, opaque, flag, language, version, remark, header)
    encode = rocketmq_header.encode if header_type == HeaderType.ROCKETMQ else json_header.encode
    return encode(code, opaque, flag, language, version, remark, texts_of(header))


def join_frame(header_type: int, header: bytes, body: bytes) -> bytes:
    """Put length words in front of a header and its body."""
    return frame_head(header_type, len(header), len(body)) + header + body


def frame_head(header_type: int, header_size: int, body_size: int) -> bytes:
    """Return the 8 bytes in front of a header.

    Raises:
        HeaderError: The header is too long for its 24 bits.
    """
    if header_size > HEADER_SIZE_MAX:
        raise HeaderError(f"header of {header_size} bytes")
    return FRAME_HEAD.pack(4 + header_size + body_size, header_type << 24 | header_size)


def ext_fields(command: RemotingCommand) -> dict[str, str]:
    """Return every ext field that a decoded command came with, unknown ones too, as text.

    In the order received; numbers digit by digit. This is what signatures cover. (A MSGPACK array
    has no names: of a typed request its fields come back under their official names, of a response
    nothing does.)
    """
    if command.header_type == HeaderType.MSGPACK:
        return msgpack_header.ext_texts(command)
    if command.header_type == HeaderType.ROCKETMQ:
        return rocketmq_header.ext_texts(command.raw_header)
    return json_header.ext_texts(command.raw_header)
