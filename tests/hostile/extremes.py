"""Requests of every code that are valid and extreme: long names, long lists, large numbers."""

from __future__ import annotations

import json
from typing import Any, Final

from halfmq.remoting.codes import INT32_MAX, INT32_MIN, INT64_MAX, HeaderType, RequestCode
from halfmq.remoting.errors import RemotingError
from halfmq.remoting.ext_fields import fields_of
from halfmq.remoting.header_tables import REQUEST_HEADERS
from halfmq.remoting.replies import encode_request
from halfmq.remoting.request_sizes import NAME_LENGTH_MAX, REQUEST_SIZES, SMALL

from .attacker import Attacker, frame

LARGE: Final = 15 << 20
"""Bytes of a field, a name or a body that still fits into a frame."""

NOT_SENT: Final = frozenset(
    {
        RequestCode.UPDATE_BROKER_CONFIG,
        RequestCode.UPDATE_NAMESRV_CONFIG,
        RequestCode.DELETE_EXPIRED_COMMITLOG,
        RequestCode.DRAIN_BROKER,
    }
)
"""They change what the whole broker does, or end it; whoever may send them is no stranger."""

SENT: Final = tuple(code for code in RequestCode if code not in NOT_SENT)

NUMBERS: Final = (0, 1, -1, 31, 1_000, INT32_MAX, INT32_MIN, INT64_MAX)


def extremes(attacker: Attacker) -> None:
    """Send what the codec accepts at its limits, at random; a name is never one in use."""
    for _ in range(10):
        codes = attacker.random.sample(SENT, len(SENT))
        attacker.flood(*[_request(attacker, code) for code in codes])


def long_names(attacker: Attacker) -> None:
    """Fill every text of every request, up to its header's size and far above."""
    for size in (NAME_LENGTH_MAX, 30_000, LARGE):
        text = "n" * size
        for code, kind in REQUEST_HEADERS.items():
            if code in NOT_SENT or (size == LARGE and code % 10):
                continue
            fields = {field.name: "1" for field in fields_of(kind)}
            texts = [field.name for field in fields_of(kind) if field.kind is str]
            if texts:
                fields |= {texts[0]: text} if size == LARGE else dict.fromkeys(texts, text)
                attacker.flood(frame(code, fields))


def _request(attacker: Attacker, code: RequestCode) -> bytes:
    random = attacker.random
    kind = REQUEST_HEADERS.get(code)
    header = {field.name: _value(attacker, field.kind) for field in fields_of(kind)} if kind else {}
    body = random.choice((_heartbeat, _queues, _nested, _nothing))(attacker)
    try:
        return encode_request(
            code,
            opaque=random.randrange(INT32_MAX),
            header=header,
            body=body[: REQUEST_SIZES.get(code, SMALL).body],
            one_way=random.randrange(4) == 0,
            header_type=random.choice((HeaderType.JSON, HeaderType.ROCKETMQ)),
        )
    except RemotingError:  # a code above the 16 bits of a ROCKETMQ header
        return encode_request(code, opaque=1, header=header)


def _value(attacker: Attacker, kind: type) -> str:
    random = attacker.random
    if kind is bool:
        return random.choice(("true", "false"))
    if kind is int:
        return str(random.choice(NUMBERS))
    return _name(attacker)


def _name(attacker: Attacker) -> str:
    random = attacker.random
    size = random.choice((1, 20, 127, NAME_LENGTH_MAX - 8))
    return f"x{random.randrange(1 << 32):08x}".ljust(size, random.choice("x_\u00e9\U0001f40d"))


def _heartbeat(attacker: Attacker) -> bytes:
    topics = [
        {"topic": _name(attacker), "subString": "||".join(map(str, range(50))), "subVersion": 1}
        for _ in range(attacker.random.choice((1, 1_000)))
    ]
    data = {"groupName": _name(attacker), "subscriptionDataSet": topics}
    return _json({"clientID": _name(attacker), "consumerDataSet": [data]})


def _queues(attacker: Attacker) -> bytes:
    queues = [
        {"brokerName": "b", "topic": _name(attacker), "queueId": number}
        for number in range(attacker.random.choice((1, 4_000)))
    ]
    names = {"clientId": _name(attacker), "consumerGroup": _name(attacker)}
    return _json(names | {"mqSet": queues})


def _nested(attacker: Attacker) -> bytes:
    depth = attacker.random.choice((60, 2_000, 60_000))
    return attacker.random.choice((b"[" * depth + b"]" * depth, b'{"a":' * depth, b"{1:2," * depth))


def _nothing(_attacker: Attacker) -> bytes:
    return b""


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
