"""The JSON header, which every official client writes.

Decoding has three steps, each slower and more tolerant than the previous one:

1. The first twelve bytes, ``{"code":310,``, name the request, so msgspec builds envelope and typed
   struct in one pass over the bytes. All official clients write ``code`` first.
2. Any other header of the usual shape, above all a response: one pass with the ext fields as a map
   of texts.
3. Everything else that official servers are known to accept: numbers, booleans, nulls and objects
   as ext values, numbers as text, missing or unknown languages, raw control characters.

Source: RocketMQ ``RemotingCommand``, ``RemotingSerializable``; frames recorded from 5.3.3.
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, Final, NoReturn

import msgspec

from .codes import FLAG_RESPONSE, HeaderType, LanguageCode
from .command import RemotingCommand
from .errors import HeaderError
from .ext_fields import Int32, Texts
from .header_tables import REQUEST_HEADERS, typed_request_header
from .request_sizes import FIELDS_MAX

LANGUAGE_NAMES: Final = {int(language): language.name for language in LanguageCode}
_LANGUAGE_NUMBERS: Final = {name: number for number, name in LANGUAGE_NAMES.items()} | {
    str(number): number for number in LANGUAGE_NAMES
}
_UNKNOWN_LANGUAGE: Final = int(LanguageCode.OTHER)

_PEEK: Final = len(b'{"code":310,')
"""Bytes of a prefix that identifies a request code. It also distinguishes two-digit codes: a quote
follows their comma."""

_JSON: Final = int(HeaderType.JSON)  # looking up an enum member costs more than the rest of a test

# In the order of the official writer, so that our frames can be compared with recorded ones.
_TEMPLATE: Final = (
    b'{"code":%d,%b"flag":%d,"language":"%b","opaque":%d,%b'
    b'"serializeTypeCurrentRPC":"JSON","version":%d}'
)

_NUMBER: Final = re.compile(r"-?[0-9]{1,20}")


class _Envelope(msgspec.Struct, gc=False, kw_only=True):
    code: Int32
    opaque: Int32 = 0
    flag: Int32 = 0
    language: str = "JAVA"
    version: Int32 = 0
    remark: str | None = None


class _TextEnvelope(_Envelope, gc=False, kw_only=True):
    header: Texts | None = msgspec.field(default=None, name="extFields")


def decode_request(raw: bytes, body: bytes) -> RemotingCommand:
    """Read the header of a peer that mostly sends requests.

    Raises:
        HeaderError: Not one UTF-8 JSON object, or a number of the envelope is no int32.
    """
    code = _CODES.get(raw[:_PEEK])
    if code is not None:
        try:
            envelope = _typed_decoder(code)(raw)
            raw.isascii() or raw.decode()  # msgspec does not validate the keys that it skips
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return _decode_tolerantly(raw, body)
        # A response may have the code of a known request; its ext fields are different ones.
        if not envelope.flag & FLAG_RESPONSE:
            return RemotingCommand(
                envelope.code,
                envelope.opaque,
                envelope.flag,
                _LANGUAGE_NUMBERS.get(envelope.language, _UNKNOWN_LANGUAGE),
                envelope.version,
                envelope.remark,
                envelope.header,
                body,
                _JSON,
                None,
                raw,
            )
    return decode_response(raw, body)


def decode_response(raw: bytes, body: bytes) -> RemotingCommand:
    """Read the header of a peer that mostly sends responses; decode requests as well."""
    try:
        envelope = _decode_texts(raw)
        raw.isascii() or raw.decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _decode_tolerantly(raw, body)
    header: object = envelope.header
    header_error = None
    if not envelope.flag & FLAG_RESPONSE:
        header, header_error = typed_request_header(envelope.code, envelope.header)
    return RemotingCommand(
        envelope.code,
        envelope.opaque,
        envelope.flag,
        _LANGUAGE_NUMBERS.get(envelope.language, _UNKNOWN_LANGUAGE),
        envelope.version,
        envelope.remark,
        header,
        body,
        _JSON,
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
    texts: Mapping[str, str] | None,
) -> bytes:
    """Write a header; None is left out, an empty map is written as ``{}``."""
    return _TEMPLATE % (
        code,
        b"" if texts is None else b'"extFields":%b,' % _encode(texts),
        flag,
        LANGUAGE_NAMES.get(language, "OTHER").encode(),
        opaque,
        b"" if remark is None else b'"remark":%b,' % _encode(remark),
        version,
    )


def ext_texts(raw: bytes) -> dict[str, str]:
    """Return all ext fields of a header as received: in order, with the digits of numbers kept."""
    try:
        return _decode_texts(raw).header or {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass  # not all of them are texts, or worse
    return _texts(_parse(raw).get("extFields")) or {}


@cache  # on first use: all of them take longer than most imports of a client
def _typed_decoder(code: int) -> Callable[[bytes], Any]:
    kind = REQUEST_HEADERS[code]
    optional = not any(field.required for field in msgspec.structs.fields(kind))
    header = msgspec.field(name="extFields", **({"default_factory": kind} if optional else {}))
    envelope = msgspec.defstruct(
        f"{kind.__name__}Envelope",
        [
            # A second "code" later in the header must not make it another request's.
            ("code", Annotated[int, msgspec.Meta(ge=int(code), le=int(code))]),
            ("header", kind, header),
        ],
        bases=(_Envelope,),
        gc=False,
        kw_only=True,
    )
    return msgspec.json.Decoder(envelope, strict=False).decode


def _prefix(code: int) -> bytes:
    return (b'{"code":%d,"' % code)[:_PEEK]


_CODES: Final = {
    _prefix(code): code
    for code in REQUEST_HEADERS
    if len(_prefix(code)) == _PEEK and code < 1000  # longer codes would share a prefix
}
_decode_texts: Final = msgspec.json.Decoder(_TextEnvelope).decode
_encode: Final = msgspec.json.Encoder().encode


def _decode_tolerantly(raw: bytes, body: bytes) -> RemotingCommand:
    fields = _parse(raw)
    code = _int32(fields, "code", required=True)
    flag = _int32(fields, "flag")
    header: object = _texts(fields.get("extFields"))
    header_error = None
    if not flag & FLAG_RESPONSE:
        header, header_error = typed_request_header(code, _texts(fields.get("extFields")))
    remark = fields.get("remark")
    return RemotingCommand(
        code=code,
        opaque=_int32(fields, "opaque"),
        flag=flag,
        language=_language(fields.get("language")),
        version=_int32(fields, "version"),
        remark=None if remark is None else _text(remark),
        header=header,
        body=body,
        header_error=header_error,
        raw_header=raw,
    )


def _parse(raw: bytes) -> dict[str, Any]:
    """Parse one JSON object; keep numbers as text, so that their digits survive."""
    try:
        # strict=False allows control characters in strings; properties are full of them.
        fields = json.loads(
            raw.decode(), parse_int=str, parse_float=str, parse_constant=_refuse, strict=False
        )
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"header is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise HeaderError("header is no JSON object")
    return fields


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _int32(fields: Mapping[str, Any], name: str, *, required: bool = False) -> int:
    value = fields.get(name)
    if value is None and not required:
        return 0
    if not isinstance(value, str) or not _NUMBER.fullmatch(value):
        raise HeaderError(f"{name} is no number")
    number = int(value)
    if not -(2**31) <= number < 2**31:
        raise HeaderError(f"{name} is beyond int32")
    return number


def _language(value: object) -> int:
    """Convert a language name or number to its number; an unknown one becomes OTHER."""
    if value is None:
        return int(LanguageCode.JAVA)
    return _LANGUAGE_NUMBERS.get(str(value), _UNKNOWN_LANGUAGE)


def _texts(value: object) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise HeaderError("extFields is no JSON object")
    if len(value) > FIELDS_MAX:
        raise HeaderError(f"more than {FIELDS_MAX} ext fields")
    return {_text(name): _text(text) for name, text in value.items() if text is not None}


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON can spell half a surrogate pair, UTF-8 cannot; Java writes a question mark.
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    return json.dumps(value, separators=(",", ":"))
