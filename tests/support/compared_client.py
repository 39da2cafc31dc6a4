"""A client whose requests are answered by two brokers, and what it sees at each.

A script is a function of a `ComparedClient`: it sends requests one by one, each under a name, and
waits for requests of the broker. What it sees is made comparable: addresses, times, physical
offsets and generated ids are replaced by words, records are decoded field by field.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from halfmq.remoting.codes import RequestCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.errors import RemotingError
from halfmq.remoting.ext_fields import Header, texts_of
from halfmq.remoting.fastjson import parse
from halfmq.remoting.replies import encode_reply
from halfmq.store.format.errors import CorruptRecordError
from halfmq.store.format.properties import decode_properties
from halfmq.store.format.record import PREFIX, Record, decode_records
from tests.support.patience import PATIENCE_S
from tests.support.rocketmq_broker import Wire

_POLL_S: Final = 0.05
_OF_THE_DAY: Final = {
    "msgId": "ID",
    "offsetMsgId": "ID",
    "indexLastUpdateTimestamp": "TIME",
    "indexLastUpdatePhyoffset": "PLACE",
    "commitLogOffset": "PLACE",
    "storeTimestamp": "TIME",
    "bornHost": "ADDRESS",
    "storeHost": "ADDRESS",
    "timestamp": "TIME",
}
"""Ext fields whose values two runs do not share, and the words for them."""
_WORDS: Final = (
    (re.compile(r"\b\d{1,3}(\.\d{1,3}){3}:\d+\b"), "ADDRESS"),
    (re.compile(r"\b[0-9A-F]{32}\b"), "ID"),
    (re.compile(r"\b1[6-9]\d{11}\b"), "TIME"),
)


class Seen(NamedTuple):
    """One thing that the client saw, under the name of the step."""

    step: str
    what: dict[str, Any]


class ComparedClient(Wire):
    """A connection that keeps what it is answered and asked."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.address = address
        self.seen: list[Seen] = []
        self._asked: list[RemotingCommand] = []  # requests of the broker that nobody waited for

    def on_request(self, request: RemotingCommand) -> None:
        self._asked.append(request)
        if not request.is_one_way:
            self.send(encode_reply(request))

    def step(
        self, name: str, code: int, header: Header | None = None, body: bytes = b""
    ) -> RemotingCommand:
        """Send a request, keep its answer under a name, and return it."""
        answer = self.ask(code, header, body)
        self.seen.append(Seen(name, answer_of(answer)))
        return answer

    def until(
        self,
        name: str,
        is_there: Callable[[RemotingCommand], bool],
        code: int,
        header: Header | None = None,
    ) -> RemotingCommand:
        """Send a request again and again until its answer is as wanted; keep that one."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_there(answer := self.ask(code, header)):
            assert time.monotonic() < deadline, f"{name}: {answer}"
            time.sleep(_POLL_S)
        self.seen.append(Seen(name, answer_of(answer)))
        return answer

    def asked(self, name: str, code: RequestCode, body: bytes = b"") -> None:
        """Wait for a request of the broker, with these bytes in its body, and keep it."""
        while not (found := [one for one in self._asked if one.code == code and body in one.body]):
            self.receive()
        self._asked.clear()
        fields = _words_for(texts_of(found[0].header) or {})
        kept = {"code": code, "one-way": found[0].is_one_way, "fields": fields}
        self.seen.append(Seen(name, kept | _body_of(found[0])))


def answer_of(answer: RemotingCommand) -> dict[str, Any]:
    """Return what a program reads of an answer; the words of a remark are for people."""
    fields = answer.header
    assert fields is None or isinstance(fields, dict)
    kept = {"code": answer.code, "fields": _words_for(fields or {})}
    if answer.code:
        kept["has remark"] = bool(answer.remark)
    return kept | _body_of(answer)


def _words_for(fields: dict[str, str]) -> dict[str, Any]:
    shown: dict[str, Any] = {
        name: _OF_THE_DAY.get(name) or _shown(value) for name, value in fields.items()
    }
    if "properties" in shown:  # in any order
        shown["properties"] = decode_properties(shown["properties"])
    return shown


def _shown(text: str) -> str:
    for pattern, word in _WORDS:
        text = pattern.sub(word, text)
    return text


def _body_of(command: RemotingCommand) -> dict[str, Any]:
    if not command.body:
        return {}
    try:
        return {"records": [record_fields(one) for one in decode_records(command.body)]}
    except CorruptRecordError:
        pass
    try:
        body = parse(_shown(command.body.decode()).encode())
    except (RemotingError, UnicodeDecodeError):
        return {"body": command.body}
    if isinstance(body, dict):  # sets are in any order
        body = {name: _sorted(value) for name, value in body.items()}
    return {"body": body}


def _sorted(value: Any) -> Any:
    return sorted(value, key=str) if isinstance(value, list) else value


def record_fields(record: Record) -> dict[str, Any]:
    """Return a record field by field; what two runs do not share is replaced by words."""
    properties = {name: _shown(value) for name, value in record.property_map.items()}
    return {
        "topic": record.topic,
        "queue": record.queue_id,
        "offset": record.queue_offset,
        "flag": record.flag,
        "sysFlag": record.sys_flag,
        "version": record.magic,
        "bornTimestamp": "TIME" if record.born_timestamp >> 40 else record.born_timestamp,
        "reconsumeTimes": record.reconsume_times,
        "linked": record.prepared_transaction_offset > 0,
        "body": bytes(record.body),
        "properties": properties,
    }


def stored_records(log: Path) -> list[Record]:
    """Return the records of a log of one file, in log order."""
    content = (log / f"{0:020}").read_bytes()
    end = 0
    while (size := PREFIX.unpack_from(content, end)[0]) > 0:
        end += size
    return decode_records(content[:end])
