"""Ext fields: the text map in which every RocketMQ header travels, and its typed form.

On the wire a header is a flat map of text to text ("queueId" to "4"). In the program it is a
struct of a class derived from :class:`Header`, whose attributes are the snake_case of the official
names and whose numbers are numbers. This module converts between the two for any such class.

The hot path does not use it: ``json_header`` and ``msgpack_header`` let msgspec build the struct
straight from the bytes. It serves the headers that such a strict reader rejects although official
servers accept them, so :func:`parse_texts` follows Java's reading of text:

* a number is decimal text in the range of its Java type; anything else is an error that names the
  field, because the request around it can still be answered;
* "true" in any case is true, and so is "1", which the C++ client writes; any other text is false;
* an absent field, a null, and an empty text in place of a number are treated alike.
"""

import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Annotated, Any, Final, NamedTuple, TypeVar, Union, cast, get_args, get_origin

import msgspec

from .codes import INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN
from .request_sizes import FIELDS_MAX, NAME_LENGTH_MAX

Int32 = Annotated[int, msgspec.Meta(ge=INT32_MIN, le=INT32_MAX)]
Int64 = Annotated[int, msgspec.Meta(ge=INT64_MIN, le=INT64_MAX)]
"""Bounded as in Java: header values are packed into records and files of these widths."""

Name = Annotated[str, msgspec.Meta(max_length=NAME_LENGTH_MAX)]
"""Text of a request that may be kept or logged. What is longer is refused here, before any handler
or table sees it; a field that is declared as ``str`` has its limit in its handler."""

Texts = Annotated[dict[str, str], msgspec.Meta(max_length=FIELDS_MAX)]
"""Ext fields before they are typed."""

# First bytes of MSGPACK values. Source: msgpack spec.md.
ARRAY_MARKS: Final = frozenset({*range(0x90, 0xA0), 0xDC, 0xDD})
MAP_MARKS: Final = frozenset({*range(0x80, 0x90), 0xDE, 0xDF})

_TRUE_TEXTS: Final = frozenset({"true", "1"})


class Header(msgspec.Struct, frozen=True, gc=False, kw_only=True, rename="camel"):
    """Base of all request and response headers."""


H = TypeVar("H", bound=Header)

REQUEST_HEADERS: Final[dict[int, type[Header]]] = {}
"""Request code to the class of its header; complete when ``header_tables`` is imported."""

RESPONSE_HEADERS: Final[dict[int, type[Header]]] = {}
"""Request code to the class of its answer's header; all other answers have no ext fields."""


def request_header(*codes: int) -> Callable[[type[H]], type[H]]:
    """Declare the class as the header of these requests."""
    return partial(_declare, REQUEST_HEADERS, codes)


def answer_header(*codes: int) -> Callable[[type[H]], type[H]]:
    """Declare the class as the header of the answers to these requests."""
    return partial(_declare, RESPONSE_HEADERS, codes)


def _declare(table: dict[int, type[Header]], codes: Sequence[int], kind: type[H]) -> type[H]:
    for code in codes:
        assert code not in table, f"two header classes for {code!r}"
        table[code] = kind
    return kind


class FieldError(Exception):
    """An ext field is missing or unreadable; the message says which and why."""


class _Field(NamedTuple):
    attribute: str
    name: str  # on the wire
    kind: type  # str, int or bool
    declared: object  # the annotation, with bounds
    required: bool


def parse_texts(kind: type[H], texts: Mapping[str, str]) -> H:
    """Convert ext fields to a struct of this class; ignore unknown fields.

    Raises:
        FieldError: A required field is missing, or a number does not parse.
    """
    try:
        return msgspec.convert(texts, kind, strict=False)
    except msgspec.ValidationError:
        return _parse_tolerantly(kind, texts)


def texts_of(header: object) -> dict[str, str] | None:
    """Convert a typed header, a map or None to ext fields; leave out fields that are None."""
    if header is None:
        return None
    if isinstance(header, Header):
        values = msgspec.structs.astuple(header)
        return {
            name: value if type(value) is str else _text(value)
            for name, value in zip(names_of(type(header)), values, strict=True)
            if value is not None
        }
    if isinstance(header, Mapping):
        return {str(name): _text(value) for name, value in header.items() if value is not None}
    raise TypeError(f"neither a header struct nor a map: {type(header).__name__}")


@cache
def array_variant(kind: type[H]) -> type[H]:
    """Return the subclass of ``kind`` that msgspec reads from an array in the declared order."""
    variant = msgspec.defstruct(
        f"{kind.__name__}Array", [], bases=(kind,), array_like=True, frozen=True, gc=False
    )
    return cast("type[H]", variant)


@cache
def fields_of(kind: type[Header]) -> tuple[_Field, ...]:
    """Return the fields that the class declares, in order."""
    return tuple(
        _Field(f.name, f.encode_name, _plain_type(f.type), f.type, f.required)
        for f in msgspec.structs.fields(kind)
    )


@cache
def names_of(kind: type[Header]) -> tuple[str, ...]:
    """Return the names on the wire, in the declared order."""
    return tuple(field.name for field in fields_of(kind))


def _parse_tolerantly(kind: type[H], texts: Mapping[str, str]) -> H:
    values: dict[str, object] = {}
    for field in fields_of(kind):
        text = texts.get(field.name)
        if text is None or (not text and field.kind is not str):
            if field.required:
                raise FieldError(f"{field.name} is missing")
        elif field.kind is str:
            values[field.attribute] = _fitting(field, text)
        elif field.kind is bool:
            values[field.attribute] = text.lower() in _TRUE_TEXTS
        else:
            values[field.attribute] = _number(field, text)
    return kind(**values)


def _fitting(field: _Field, text: str) -> str:
    try:
        return cast("str", msgspec.convert(text, field.declared))
    except msgspec.ValidationError as error:
        limit = f"{NAME_LENGTH_MAX} are allowed"
        raise FieldError(f"{field.name} has {len(text)} characters, {limit}") from error


def _number(field: _Field, text: str) -> int:
    try:
        # Java takes a leading plus sign, msgspec does not.
        return cast("int", msgspec.convert(text.removeprefix("+"), field.declared, strict=False))
    except msgspec.ValidationError as error:
        raise FieldError(f"{field.name} is not a number in range: {text[:40]!r}") from error


def _text(value: object) -> str:
    if value is True:
        return "true"
    if value is False:
        return "false"
    return str(value)


def _plain_type(declared: Any) -> type:
    """Strip bounds and ``| None`` from an annotation."""
    if get_origin(declared) is Annotated:
        return _plain_type(get_args(declared)[0])
    if get_origin(declared) in {Union, types.UnionType}:
        (inner,) = (part for part in get_args(declared) if part is not types.NoneType)
        return _plain_type(inner)
    return cast("type", declared)
