"""The JSON dialect of fastjson 1, which deviates from the standard.

It differs in three ways: a map with number keys has bare keys (``{0:"a"}``), a map with object keys
has the object in place of the key (``{{"queueId":0}:5}``), and the second occurrence of an object
is a reference (``{"$ref":"$.a[0]"}``). Newer releases also write an object key as a string that
holds its JSON.

:func:`parse` accepts all of these. A bare number key becomes a string, an object key the compact
JSON text of the object (as in newer releases), so callers always get plain dicts.
:func:`object_keyed_map` writes the one form that every official reader accepts.

Source: behaviour of fastjson 1.2.29, 1.2.69 and 1.2.83.
"""

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import msgspec

from .errors import BodyError

_encode: Final = msgspec.json.Encoder(order="deterministic").encode  # sets have no order
_BLANK: Final = re.compile(r"[ \t\r\n]*")
_NUMBER: Final = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS: Final = {"true": True, "false": False, "null": None}
_STEP: Final = re.compile(r"\.([^.\[\]]+)|\[([0-9]+)\]")

S = TypeVar("S")

# strict=False: control characters are allowed in strings, property strings are full of them.
_decode_string: Final = json.JSONDecoder(strict=False).raw_decode

RELAXED_SIZE_MAX: Final = 128 << 10
"""Bytes of a body in the dialect, which takes 0.7 us a byte to parse. Official clients use it in
small bodies, and in tables of offsets that they ask for."""

_DEPTH_MAX: Final = 64  # levels; official bodies have at most six
_NODES_MAX: Final = 100_000  # values after resolving; a few references can expand to millions
_DIGITS_MAX: Final = 40  # of a number; a longer one would be an attack on the parser


def parse(body: bytes, *, relaxed_size_max: int = RELAXED_SIZE_MAX) -> Any:
    """Parse a body as strict JSON, or in fastjson's dialect if that fails and it is not large.

    Raises:
        BodyError: The body is neither.
    """
    if not body:
        raise BodyError("there is no body")
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if len(body) > relaxed_size_max:
            raise BodyError(f"body is no JSON: {error}") from error
        value = _parse_relaxed(body)
    return _Resolver(value).resolve(value) if b'"$ref"' in body else value


def convert(value: object, kind: type[S], what: str = "the body") -> S:
    """Return what was parsed as an instance of a class.

    Raises:
        BodyError: It is not ``what``.
    """
    try:
        return msgspec.convert(value, kind, strict=False, str_keys=True)
    except msgspec.ValidationError as error:
        raise BodyError(f"not {what}: {error}") from error


def json_reader(kind: type[S], what: str, *, empty: bytes = b"") -> Callable[[bytes], S]:
    """Return the decoder of a body in strict JSON; it raises BodyError if that is not ``what``."""
    decode = msgspec.json.Decoder(kind).decode

    def read(body: bytes) -> S:
        try:
            return decode(body or empty)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BodyError(f"not {what}: {error}") from error

    return read


def dump(value: object) -> bytes:
    """Return compact JSON: the Go client splits routes at commas and cannot handle white space."""
    return _encode(value)


def object_keyed_map(pairs: Iterable[tuple[object, object]]) -> bytes:
    """Return ``{{key}:value,...}``, the form of object keys that all official readers take."""
    return b"{%b}" % object_keyed_members(pairs)


def object_keyed_members(pairs: Iterable[tuple[object, object]]) -> bytes:
    """Return the members of such a map, without its braces."""
    return b",".join([b"%b:%b" % (dump(key), dump(value)) for key, value in pairs])


def _parse_relaxed(body: bytes) -> Any:
    try:
        text = body.decode()
        parser = _Parser(text)
        value = parser.value(_DEPTH_MAX)
        parser.end()
    except (ValueError, IndexError) as error:
        raise BodyError(f"body is no JSON: {error}") from error
    return value


class _Parser:
    """Recursive descent over one text; raises ValueError or IndexError if it is not valid."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0

    def value(self, depth: int) -> Any:
        if not depth:
            raise ValueError("nested too deeply")
        character = self._peek()
        if character == "{":
            return self._object(depth - 1)
        if character == "[":
            return self._array(depth - 1)
        if character == '"':
            return self._string()
        for word, meaning in _WORDS.items():
            if self._text.startswith(word, self._position):
                self._position += len(word)
                return meaning
        return self._number()

    def end(self) -> None:
        self._skip()
        if self._position != len(self._text):
            raise ValueError(f"unexpected text at character {self._position}")

    def _object(self, depth: int) -> dict[str, Any]:
        members: dict[str, Any] = {}
        self._take("{")
        while self._peek() != "}":
            key = self._key(depth)
            self._take(":")
            members[key] = self.value(depth)
            if self._peek() != "}":
                self._take(",")
        self._take("}")
        return members

    def _key(self, depth: int) -> str:
        key = self.value(depth)
        return key if isinstance(key, str) else json.dumps(key, separators=(",", ":"))

    def _array(self, depth: int) -> list[Any]:
        items: list[Any] = []
        self._take("[")
        while self._peek() != "]":
            items.append(self.value(depth))
            if self._peek() != "]":
                self._take(",")
        self._take("]")
        return items

    def _string(self) -> str:
        text: str
        text, self._position = _decode_string(self._text, self._position)
        # JSON can spell half a surrogate pair, UTF-8 cannot; Java writes a question mark.
        return text if text.isascii() else text.encode("utf-8", "replace").decode()

    def _number(self) -> int | float:
        match = _NUMBER.match(self._text, self._position)
        if match is None or len(match[0]) > _DIGITS_MAX:
            raise ValueError(f"no value at character {self._position}")
        self._position = match.end()
        return float(match[0]) if match[1] or match[2] else int(match[0])

    def _peek(self) -> str:
        self._skip()
        return self._text[self._position]

    def _take(self, character: str) -> None:
        if self._peek() != character:
            raise ValueError(f"no {character!r} at character {self._position}")
        self._position += 1

    def _skip(self) -> None:
        match = _BLANK.match(self._text, self._position)
        assert match is not None, "the pattern matches nothing too"
        self._position = match.end()


class _Resolver:
    """Replaces references by the values they refer to."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = _NODES_MAX

    def resolve(self, value: Any, depth: int = _DEPTH_MAX) -> Any:
        self._left -= 1
        if not depth or self._left < 0:
            raise BodyError("circular references, or too many")
        if isinstance(value, list):
            return [self.resolve(item, depth - 1) for item in value]
        if not isinstance(value, dict):
            return value
        if set(value) == {"$ref"}:
            return self.resolve(_follow(value["$ref"], self._root), depth - 1)
        return {key: self.resolve(item, depth - 1) for key, item in value.items()}


def _follow(path: object, root: Any) -> Any:
    if not isinstance(path, str) or not path.startswith("$"):
        raise BodyError(f"reference {path!r} does not start at the root")
    position = 1
    try:
        while position < len(path):
            step = _STEP.match(path, position)
            if step is None:
                raise BodyError(f"reference {path!r} is not valid")
            root = root[step[1]] if step[1] is not None else root[int(step[2])]
            position = step.end()
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise BodyError(f"reference {path!r} refers to nothing") from error
    return root
