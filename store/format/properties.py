r"""Message properties: the string of names and values after the topic of every record.

A property is ``name 0x01 value 0x02``; the last 0x02 may be missing (written so by RocketMQ
4.9.1 to 5.1.4). Nothing is escaped. A reader ignores a property with an empty name or value. The
value begins after the *first* 0x01 and may contain more of them. Of two equal names the last
one wins. All functions work on the received bytes, which the store keeps unchanged: a round trip
through a map would reorder them and cost more than the append.

Source: RocketMQ ``MessageDecoder.java`` (``string2messageProperties``), ``MessageConst.java``.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final

from .ids import java_string_hash

NAME_VALUE_SEPARATOR: Final = b"\x01"
PROPERTY_SEPARATOR: Final = b"\x02"
PROPERTIES_SIZE_MAX: Final = 32_767  # bytes; the length is an int16
KEY_SEPARATOR: Final = " "  # between the keys in KEYS
_TAGS: Final = b"TAGS\x01"
_TAGS_BETWEEN: Final = b"\x02TAGS\x01"
_NO_TAIL: Final = bytes(PROPERTIES_SIZE_MAX + 1)  # too long to be the end of any properties

PROPERTY_KEYS: Final = "KEYS"
PROPERTY_TAGS: Final = "TAGS"
PROPERTY_UNIQ_KEY: Final = "UNIQ_KEY"
PROPERTY_WAIT: Final = "WAIT"
PROPERTY_DELAY: Final = "DELAY"
PROPERTY_TRAN_MSG: Final = "TRAN_MSG"
PROPERTY_PGROUP: Final = "PGROUP"
PROPERTY_TRANSACTION_ID: Final = "__transactionId__"
PROPERTY_TRAN_PREPARED_QUEUE_OFFSET: Final = "TRAN_PREPARED_QUEUE_OFFSET"
PROPERTY_TRANSACTION_CHECK_TIMES: Final = "TRANSACTION_CHECK_TIMES"
PROPERTY_TRANSACTION_DELAY_MS: Final = "TRANSACTION_DELAY_MS"
PROPERTY_TRANSACTION_DELIVER_MS: Final = "TRANSACTION_DELIVER_MS"
PROPERTY_TRANSACTION_GROUP: Final = "TRANSACTION_GROUP"
PROPERTY_TRANSACTION_HALVES: Final = "TRANSACTION_HALVES"
PROPERTY_TRANSACTION_HALF_ID: Final = "TRANSACTION_HALF_ID"
PROPERTY_TRANSACTION_PRINCIPAL: Final = "TRANSACTION_PRINCIPAL"
PROPERTY_TRANSACTION_PARKED: Final = "TRANSACTION_PARKED"
PROPERTY_REAL_TOPIC: Final = "REAL_TOPIC"
PROPERTY_REAL_QID: Final = "REAL_QID"
PROPERTY_RETRY_TOPIC: Final = "RETRY_TOPIC"
PROPERTY_ORIGIN_MESSAGE_ID: Final = "ORIGIN_MESSAGE_ID"
PROPERTY_FAILURE_REASON: Final = "FAILURE_REASON"
PROPERTY_FAILURE_TIME: Final = "FAILURE_TIME"
PROPERTY_FAILURE_QUEUE: Final = "FAILURE_QUEUE"
PROPERTY_DLQ_ORIGIN_TOPIC: Final = "DLQ_ORIGIN_TOPIC"
PROPERTY_DLQ_ORIGIN_MESSAGE_ID: Final = "DLQ_ORIGIN_MESSAGE_ID"
PROPERTY_RECONSUME_TIME: Final = "RECONSUME_TIME"
PROPERTY_MAX_RECONSUME_TIMES: Final = "MAX_RECONSUME_TIMES"
PROPERTY_CLUSTER: Final = "CLUSTER"
PROPERTY_CORRELATION_ID: Final = "CORRELATION_ID"  # of a request and its reply
PROPERTY_REPLY_TO_CLIENT: Final = "REPLY_TO_CLIENT"
PROPERTY_TTL: Final = "TTL"  # ms that the sender of a request waits
PROPERTY_TYPE: Final = "MSG_TYPE"  # "reply"
PROPERTY_MSG_REGION: Final = "MSG_REGION"
PROPERTY_TRACE_ON: Final = "TRACE_ON"
PROPERTY_CRC32: Final = "__CRC32#"
PROPERTY_INNER_NUM: Final = "INNER_NUM"
PROPERTY_INNER_BASE: Final = "INNER_BASE"
PROPERTY_INNER_MULTI_DISPATCH: Final = "INNER_MULTI_DISPATCH"
PROPERTY_INNER_MULTI_QUEUE_OFFSET: Final = "INNER_MULTI_QUEUE_OFFSET"
PROPERTY_INSTANCE_ID: Final = "INSTANCE_ID"
PROPERTY_BORN_HOST: Final = "__BORNHOST"
PROPERTY_BORN_TIMESTAMP: Final = "BORN_TIMESTAMP"
PROPERTY_MIN_OFFSET: Final = "MIN_OFFSET"
PROPERTY_MAX_OFFSET: Final = "MAX_OFFSET"
PROPERTY_CONSUME_START_TIME: Final = "CONSUME_START_TIME"
PROPERTY_POP_CK: Final = "POP_CK"
PROPERTY_FIRST_POP_TIME: Final = "1ST_POP_TIME"
PROPERTY_POP_FROM: Final = "POP_FROM"  # halfmq's: the handle of the delivery before a retry
PROPERTY_TIMER_DELAY_SEC: Final = "TIMER_DELAY_SEC"
PROPERTY_TIMER_DELAY_MS: Final = "TIMER_DELAY_MS"
PROPERTY_TIMER_DELIVER_MS: Final = "TIMER_DELIVER_MS"
PROPERTY_TIMER_OUT_MS: Final = "TIMER_OUT_MS"
PROPERTY_TIMER_ENQUEUE_MS: Final = "TIMER_ENQUEUE_MS"
PROPERTY_TIMER_DEQUEUE_MS: Final = "TIMER_DEQUEUE_MS"
PROPERTY_TIMER_ROLL_TIMES: Final = "TIMER_ROLL_TIMES"
PROPERTY_TIMER_DEL_UNIQKEY: Final = "TIMER_DEL_UNIQKEY"

_TAGS_CACHED_MAX: Final = 4096  # distinct TAGS values whose hash is cached, 300 bytes each
_TAG_CACHED_LENGTH_MAX: Final = 64  # longer ones are not: strangers may send some of 32 KB


def encode_properties(properties: Mapping[str, str]) -> bytes:
    """Return the property string of a map, in the map's order; an empty value is left out.

    Raises:
        ValueError: A name is empty or contains a separator, or a value contains 0x02: it could not
            be read back.
    """
    parts: list[str] = []
    for name, value in properties.items():
        if not name or "\x01" in name or "\x02" in name:
            raise ValueError(f"{name!r} cannot be the name of a property")
        if "\x02" in value:
            raise ValueError(f"the value of property {name!r} holds the separator 0x02")
        if value:
            parts += (name, "\x01", value, "\x02")
    return "".join(parts).encode()


def decode_properties(raw: bytes | str) -> dict[str, str]:
    """Return the map of a property string; malformed parts are left out, as in Java."""
    # Batch units are stored unchanged, so the bytes may not be UTF-8; Java replaces these too.
    text = raw if isinstance(raw, str) else raw.decode(errors="replace")
    properties: dict[str, str] = {}
    for segment in text.split("\x02"):
        name, _, value = segment.partition("\x01")
        if name and value:
            properties[name] = value
    return properties


def get_property(raw: bytes, name: bytes) -> bytes | None:
    """Return the bytes of one property without decoding the others; None when it is absent."""
    # A name is at the start or after a separator and contains neither 0x01 nor 0x02. So a match
    # there is a property of exactly that name, and the last of several.
    named = name + b"\x01"
    before, found, after = raw.rpartition(named)  # twice as fast as a search and two slices
    if not found:
        return None
    if not before or before[-1] == 2:
        value = after.partition(PROPERTY_SEPARATOR)[0]
        if value:
            return value
    end = len(raw)
    while (at := raw.rfind(named, 0, end)) >= 0:
        if at == 0 or raw[at - 1] == 2:
            start = at + len(named)
            stop = raw.find(b"\x02", start)
            value = raw[start:] if stop < 0 else raw[start:stop]
            if value:
                return value
        # The end of a longer name, or an empty value, which does not hide an earlier one.
        end = at + len(name)
    return None


def without_properties(raw: bytes, names: Iterable[str]) -> bytes:
    """Return the property string without the named ones; the rest keeps order and bytes."""
    dropped = {name.encode() for name in names}
    kept = [
        segment
        for segment in raw.split(b"\x02")
        if segment and segment.partition(b"\x01")[0] not in dropped
    ]
    return b"".join([segment + b"\x02" for segment in kept])


def terminated(raw: bytes) -> bytes:
    """Return the property string so that another property can be appended to it."""
    return raw if not raw or raw.endswith(b"\x02") else raw + b"\x02"


def tags_code(raw: bytes) -> int:
    """Return the hash of the whole TAGS value by which the broker filters; 0 without tags."""
    # Between separators it is the whole name. Otherwise TAGS is the first property, or absent.
    _, found, rest = raw.rpartition(_TAGS_BETWEEN)
    tags = rest.partition(b"\x02")[0] if found else None
    tags = tags or get_property(raw, b"TAGS")
    return 0 if tags is None else tag_hash(tags.decode(errors="replace"))


def tags_codes(raws: Sequence[bytes]) -> list[int]:
    """Return ``tags_code`` of each property string; three times as fast if tags repeat."""
    tags = [
        # Without TAGS the last part is the whole string, which begins with a separator.
        (b"\x02" + raw).rpartition(_TAGS_BETWEEN)[2].partition(PROPERTY_SEPARATOR)[0]
        for raw in raws
    ]
    codes = {tag: tag_hash(tag.decode(errors="replace")) for tag in set(tags)}
    return [codes[tag] if tag else tags_code(raw) for tag, raw in zip(tags, raws, strict=True)]


class TagsCodeCache:
    """Computes ``tags_code`` of many records, most of which share few tags."""

    def __init__(self) -> None:
        self._codes: dict[bytes, int] = {}
        # The end of the previous properties, from the separator before the tags on, and their
        # code: many senders write the same properties after the tags of all their messages.
        self._tail = _NO_TAIL
        self._code = 0

    def code_at(self, chunk: bytes, start: int, end: int) -> int:
        """Return the code of the properties from ``start`` to ``end`` of a chunk."""
        tail_at = end - len(self._tail)
        if tail_at >= start and chunk.startswith(self._tail, tail_at):
            return self._code
        tags_at = chunk.rfind(_TAGS, start, end)
        if tags_at < 0:
            return 0
        field = chunk[tags_at - 1 : chunk.find(b"\x02", tags_at, end) + 1]
        # With both separators and a value, the code depends on nothing else in the properties.
        if len(field) <= len(_TAGS) + 2 or not field.startswith(b"\x02"):
            return tags_code(chunk[start:end])
        if len(field) > _TAG_CACHED_LENGTH_MAX:
            return tags_code(chunk[start:end])
        code = self._codes.get(field)
        if code is None:
            if len(self._codes) >= _TAGS_CACHED_MAX:
                self._codes.clear()
            code = self._codes[field] = tags_code(chunk[start:end])
        self._tail, self._code = chunk[tags_at - 1 : end], code
        return code


def tag_hash(tag: str) -> int:
    """Return the code that ``tags_code`` gives to messages with this tag."""
    return _cached_hash(tag) if len(tag) <= _TAG_CACHED_LENGTH_MAX else _hash(tag)


def _hash(tag: str) -> int:
    return java_string_hash(tag.encode(errors="replace").decode())


_cached_hash: Final = lru_cache(maxsize=_TAGS_CACHED_MAX)(_hash)
