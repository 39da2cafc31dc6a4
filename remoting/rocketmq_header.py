"""The ROCKETMQ header: binary, compact, and the slowest of the three to decode in Python.

Layout (big-endian): code int16, language byte, version int16, opaque int32, flag int32, remark
length int32 and remark, ext length int32 and ext fields, each of which is key length int16, key,
value length int32, value. Source: RocketMQ ``RocketMQSerializable``.

A key may occur twice (a Java client with an RPC hook writes its fields once from the struct and
once from the map); the values are equal and the last is kept. Codes above 32767 do not fit and
arrive truncated.
"""

from collections.abc import Mapping
from functools import lru_cache
from struct import Struct
from struct import error as struct_error
from typing import Final

from .codes import FLAG_RESPONSE, HeaderType
from .command import RemotingCommand
from .errors import HeaderError
from .header_tables import typed_request_header
from .request_sizes import FIELDS_MAX

_FIXED: Final = Struct(">hBhiii")  # code, language, version, opaque, flag, remark length
_KEY_LENGTH: Final = Struct(">H")
_LENGTH: Final = Struct(">i")
_ROCKETMQ: Final = int(HeaderType.ROCKETMQ)
_unpack_key_length: Final = _KEY_LENGTH.unpack_from
_unpack_length: Final = _LENGTH.unpack_from
_pack_length: Final = _LENGTH.pack
HEADER_SIZE_MIN: Final = _FIXED.size + _LENGTH.size
assert HEADER_SIZE_MIN == 21  # another size is another protocol


def decode(raw: bytes, body: bytes) -> RemotingCommand:
    """Read a header.

    Raises:
        HeaderError: A length contradicts the size of the header, or a text is not UTF-8.
    """
    try:
        code, language, version, opaque, flag, remark_size = _FIXED.unpack_from(raw)
        remark_end = _FIXED.size + remark_size
        (ext_size,) = _LENGTH.unpack_from(raw, remark_end)
        ext_start = remark_end + _LENGTH.size
        if remark_size < 0 or ext_size < 0 or ext_start + ext_size != len(raw):
            raise HeaderError("lengths in the header contradict its size")
        remark = raw[_FIXED.size : remark_end].decode() if remark_size else None
        texts = _decode_ext(raw, ext_start) if ext_size else None
    except (struct_error, UnicodeDecodeError) as error:
        raise HeaderError(f"binary header: {error}") from error
    header: object = texts
    header_error = None
    if not flag & FLAG_RESPONSE:
        header, header_error = typed_request_header(code, texts)
    return RemotingCommand(
        code,
        opaque,
        flag,
        language,
        version,
        remark,
        header,
        body,
        _ROCKETMQ,
        header_error,
        raw,
        texts,
    )


def encode(
    code: int,
    opaque: int,
    flag: int,
    language: int,
    version: int,
    remark: str | None,
    texts: Mapping[str, str] | None,
) -> bytes:
    """Write a header; an empty remark or map is read back as None.

    Raises:
        HeaderError: The code or version does not fit in 16 bits, or a key in its length.
    """
    remark_bytes = (remark or "").encode()
    parts: list[bytes] = []
    for name, text in (texts or {}).items():
        value = text.encode()
        parts += (_key_bytes(name), _pack_length(len(value)), value)
    ext = b"".join(parts)
    try:
        return b"".join(
            (
                _FIXED.pack(code, language, version, opaque, flag, len(remark_bytes)),
                remark_bytes,
                _LENGTH.pack(len(ext)),
                ext,
            )
        )
    except struct_error as error:
        raise HeaderError(f"does not fit the binary header: {error}") from error


def _decode_ext(raw: bytes, position: int) -> dict[str, str]:
    texts: dict[str, str] = {}
    characters = raw.decode("latin-1")  # one per byte: ASCII texts are slices of it
    end = len(raw)
    for _ in range(FIELDS_MAX):
        if position >= end:
            return texts
        (key_size,) = _unpack_key_length(raw, position)
        key_end = position + 2 + key_size
        (value_size,) = _unpack_length(raw, key_end)
        value_start = key_end + 4
        value_end = value_start + value_size
        if value_size < 0 or value_end > end:
            raise HeaderError("an ext field is longer than the header")
        key = characters[position + 2 : key_end]
        if not key.isascii():
            key = raw[position + 2 : key_end].decode()
        value = characters[value_start:value_end]
        if not value.isascii():
            value = raw[value_start:value_end].decode()
        texts[key] = value
        position = value_end
    if position < end:
        raise HeaderError(f"more than {FIELDS_MAX} ext fields")
    return texts


@lru_cache(maxsize=256)  # more than all official field names together
def _key_bytes(name: str) -> bytes:
    key = name.encode()
    if len(key) > 0x7FFF:  # Java reads the length as a signed short
        raise HeaderError("an ext field's name is longer than 32767 bytes")
    return _KEY_LENGTH.pack(len(key)) + key
