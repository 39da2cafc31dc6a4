"""Decode whole frames to commands and encode them, for each of the three header types.

A frame is a length (int32, of all that follows), a word whose top byte is the header type and
whose low 24 bits are the header's length, the header, and the body. Source: RocketMQ
``RemotingCommand``, ``NettyDecoder``, ``NettyEncoder``.
"""

from collections.abc import Callable, Mapping
from struct import Struct
from typing import Final

from . import json_header, msgpack_header, rocketmq_header
from .codes import HeaderType
from .command import RemotingCommand
from .errors import HeaderError
from .ext_fields import texts_of

FRAME_HEAD: Final = Struct(">iI")  # length of all that follows; header type and length
HEADER_SIZE_MAX: Final = 0xFFFFFF  # bytes: 24 bits of the second word

Reader = Callable[[bytes, bytes], RemotingCommand]
"""Decodes header and body of one frame; raises HeaderError."""

REQUEST_READERS: Final[dict[int, Reader]] = {
    HeaderType.JSON: json_header.decode_request,
    HeaderType.ROCKETMQ: rocketmq_header.decode,
    HeaderType.MSGPACK: msgpack_header.decode_request,
}
"""Header type to its reader, tuned for a peer that mostly sends requests. Every reader also decodes
responses."""

RESPONSE_READERS: Final[dict[int, Reader]] = {
    HeaderType.JSON: json_header.decode_response,
    HeaderType.ROCKETMQ: rocketmq_header.decode,
    HeaderType.MSGPACK: msgpack_header.decode_response,
}
"""Header type to its reader, tuned for a peer that mostly sends responses. Every reader also
decodes requests."""


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
    return encode_texts(
        header_type, code, opaque, flag, language, version, remark, texts_of(header)
    )


def encode_texts(
    header_type: int,
    code: int,
    opaque: int,
    flag: int,
    language: int,
    version: int,
    remark: str | None,
    texts: Mapping[str, str] | None,
) -> bytes:
    """Return the JSON or ROCKETMQ header alone, of ext fields that are texts already."""
    encode = rocketmq_header.encode if header_type == HeaderType.ROCKETMQ else json_header.encode
    return encode(code, opaque, flag, language, version, remark, texts)


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
    """Return every ext field of a decoded command, unknown ones included, as text.

    Fields are in the order received, and numbers keep their digits: signatures cover exactly this
    text. A MSGPACK array has no field names: a typed request yields its fields under their official
    names, a response yields nothing.
    """
    if command.header_type == HeaderType.MSGPACK:
        return msgpack_header.ext_texts(command)
    if command.header_type == HeaderType.ROCKETMQ:
        return command.texts or {}
    return json_header.ext_texts(command.raw_header)
