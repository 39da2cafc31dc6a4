"""The MSGPACK header of halfmq: ``[code, opaque, flag, language, version, remark, ext]``.

``ext`` is nil, or the array of the header's fields in the declared order of its class (by request
code in ``header_tables``: ``REQUEST_HEADERS``, for a response ``RESPONSE_HEADERS``), or a map of
text to text. The array holds native MSGPACK numbers and booleans. It may stop early if only
optional fields would follow, and a reader ignores fields it does not know, so fields can be added
at the end of a class.

Only the sender of a request knows the class of its response. So the ext of a response stays
undecoded (``msgspec.Raw``) until ``header_tables.response_header`` decodes it.

A signed request has two more elements: the access key, and the 20 bytes of its signature.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import msgspec

from .codes import FLAG_RESPONSE, HeaderType
from .command import RemotingCommand
from .errors import HeaderError
from .ext_fields import ARRAY_MARKS, MAP_MARKS, Header, Int32, Texts, array_variant, texts_of
from .header_tables import REQUEST_HEADERS, typed_request_header
from .signature import DIGEST_SIZE, Signer

_NINE: Final = 0x99  # a fixed array of nine: a signed request
_OURS: Final = frozenset({0x97, _NINE})  # a fixed array of seven, or of nine
_NINE_MARK: Final = bytes([_NINE])
_SIGNATURE_MARK: Final = bytes([0xC4, DIGEST_SIZE])  # binary of 20 bytes
_SIGNATURE_SIZE: Final = len(_SIGNATURE_MARK) + DIGEST_SIZE
_UINT8: Final = 0xCC
_UINT16: Final = 0xCD
_NIL: Final = 0xC0
_MSGPACK: Final = int(HeaderType.MSGPACK)


class _Envelope(msgspec.Struct, gc=False, array_like=True):
    code: Int32
    opaque: Int32
    flag: Int32
    language: Int32
    version: Int32
    remark: str | None


class _RawEnvelope(_Envelope, gc=False, array_like=True):
    header: msgspec.Raw = msgspec.Raw(b"\xc0")


class _SignedEnvelope(_RawEnvelope, gc=False, array_like=True):
    access_key: str = ""
    signature: bytes = b""


def decode_request(raw: bytes, body: bytes) -> RemotingCommand:
    """Read the header of a peer that mostly sends requests.

    Raises:
        HeaderError: Not one MSGPACK array of this shape, or a number of the envelope is no int32.
    """
    code = _peek_code(raw)
    if code in REQUEST_HEADERS:
        try:
            envelope = _typed_decoder(code)(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return decode_response(raw, body)
        if not envelope.flag & FLAG_RESPONSE:
            return RemotingCommand(
                envelope.code,
                envelope.opaque,
                envelope.flag,
                envelope.language,
                envelope.version,
                envelope.remark,
                envelope.header,
                body,
                _MSGPACK,
                None,
                raw,
            )
    return decode_response(raw, body)


def decode_response(raw: bytes, body: bytes) -> RemotingCommand:
    """Read the header of a peer that mostly sends responses; decode requests as well."""
    try:
        envelope = _decode_raw(raw)
        header, header_error = _header(envelope)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HeaderError(f"MSGPACK header: {error}") from error
    return RemotingCommand(
        envelope.code,
        envelope.opaque,
        envelope.flag,
        envelope.language,
        envelope.version,
        envelope.remark,
        header,
        body,
        _MSGPACK,
        header_error,
        raw,
    )


def encode(
    code: int,
    opaque: int,
    flag: int,
    language: int,
    version: int,
    remark: str | None,
    header: object,
) -> bytes:
    """Write a header: a struct as an array, a map as a map, None as nil."""
    if isinstance(header, Header):
        header = msgspec.structs.astuple(header)
    elif header is not None and not isinstance(header, msgspec.Raw):
        header = texts_of(header)
    return _encode((code, opaque, flag, language, version, remark, header))


def ext_texts(command: RemotingCommand) -> dict[str, str]:
    """Return the ext fields of a decoded command; the array of a response has no names."""
    header = command.header
    if isinstance(header, msgspec.Raw):
        return {} if memoryview(header)[0] in ARRAY_MARKS else _decode_map(header)
    return texts_of(header) or {}


def sign(raw: bytes, body: bytes, access_key: str, signer: Signer) -> bytes:
    """Return a request's header with two more elements: the access key and the signature.

    The signature covers the bytes of the eight elements before it and the body. Unlike an official
    signature it thereby covers the request code and the opaque.
    """
    text = raw[1:] + _encode(access_key)
    return _NINE_MARK + text + _SIGNATURE_MARK + signer.digest(text, body)


def split_signature(raw: bytes) -> tuple[str, bytes, bytes]:
    """Return access key, signature and signed text of a header; all empty if it is not signed."""
    if not raw or raw[0] != _NINE or raw[-_SIGNATURE_SIZE:-DIGEST_SIZE] != _SIGNATURE_MARK:
        return "", b"", b""
    try:
        access_key = _decode_signed(raw).access_key
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "", b"", b""
    return access_key, raw[-DIGEST_SIZE:], raw[1:-_SIGNATURE_SIZE]


def _peek_code(raw: bytes) -> int:
    """Return the code of a header in the form that our own writer produces, else -1."""
    if len(raw) < 4 or raw[0] not in _OURS:
        return -1
    first = raw[1]
    if first < 0x80:
        return first
    if first == _UINT16:
        return raw[2] << 8 | raw[3]
    return raw[2] if first == _UINT8 else -1


@cache  # on first use, as those for JSON
def _typed_decoder(code: int) -> Callable[[bytes], Any]:
    kind = array_variant(REQUEST_HEADERS[code])
    envelope = msgspec.defstruct(
        f"{kind.__name__}Envelope",
        [("header", kind)],
        bases=(_Envelope,),
        gc=False,
        array_like=True,
    )
    return msgspec.msgpack.Decoder(envelope, strict=False).decode


_decode_signed: Final = msgspec.msgpack.Decoder(_SignedEnvelope).decode
_decode_raw: Final = msgspec.msgpack.Decoder(_RawEnvelope).decode
_decode_map: Final = msgspec.msgpack.Decoder(Texts).decode
_encode: Final = msgspec.msgpack.Encoder().encode


def _header(envelope: _RawEnvelope) -> tuple[object, str | None]:
    """Return ``header`` and ``header_error``."""
    ext, code = envelope.header, envelope.code
    mark = memoryview(ext)[0]
    if mark != _NIL and mark not in ARRAY_MARKS and mark not in MAP_MARKS:
        raise HeaderError("MSGPACK header: ext is neither nil, an array nor a map")
    if envelope.flag & FLAG_RESPONSE:
        return (None if mark == _NIL else ext), None
    if mark in ARRAY_MARKS:
        return _typed_array(code, ext)
    return typed_request_header(code, None if mark == _NIL else _decode_map(ext))


def _typed_array(code: int, ext: msgspec.Raw) -> tuple[object, str | None]:
    kind = REQUEST_HEADERS.get(code)
    if kind is None:
        return ext, None
    try:
        return msgspec.msgpack.decode(ext, type=array_variant(kind), strict=False), None
    except msgspec.ValidationError as error:
        return {}, str(error)
