"""The tables of docs/wire.md agree with the code."""

from __future__ import annotations

import re
from typing import Any, Final, get_args, get_type_hints

import msgspec

from halfmq.remoting import own_requests
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.ext_fields import Header, Int32, Int64, Name
from halfmq.remoting.header_tables import REQUEST_HEADERS, RESPONSE_HEADERS
from halfmq.remoting.own_requests import (
    CONSUMERS_MAX,
    DELAYED_MAX,
    ENDS_MAX,
    GROUP_MESSAGES_MAX,
    MEMBER_TOPICS_MAX,
    TRANSACTIONS_MAX,
    EndEntry,
    TransactionInfo,
)
from tests.support.documents import ROOT

DOCUMENT: Final = (ROOT / "docs" / "wire.md").read_text(encoding="utf-8")
OURS: Final = range(9000, 9100)
LETTERS: Final = {str: "S", Name: "S", Int32: "I", Int64: "L", bool: "B", bytes: "bytes"}
LIMITS: Final = {
    "TransactionEnd": ENDS_MAX,
    "EndResult": ENDS_MAX,
    "PreparedMessage": GROUP_MESSAGES_MAX,
    "PreparedResult": GROUP_MESSAGES_MAX,
    "TransactionInfo": TRANSACTIONS_MAX,
    "ConsumerInfo": CONSUMERS_MAX + MEMBER_TOPICS_MAX,
    "DelayedInfo": DELAYED_MAX,
}


def _rows(title: str) -> list[list[str]]:
    """Return the cells of the table under a title, without its head."""
    section = DOCUMENT.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r" \| ", line.strip("| "))] for line in lines[1:]]


def _letter(declared: Any) -> str:
    kinds = {kind: letter for kind, letter in LETTERS.items() if declared == kind}
    if kinds:
        return next(iter(kinds.values()))
    (inner,) = (part for part in get_args(declared) if part is not type(None))
    return _letter(inner) + "?"


def _fields(kind: type[msgspec.Struct]) -> str:
    """Return the fields of a header or entry as the document writes them."""
    hints = get_type_hints(kind, include_extras=True)
    texts = []
    for field in msgspec.structs.fields(kind):
        name = field.encode_name if issubclass(kind, Header) else field.name
        default = field.default
        text = f"{name} {_letter(hints[field.name])}"
        if default not in (msgspec.NODEFAULT, None):
            text += f" = {msgspec.json.encode(default).decode()}"
        texts.append(text)
    return ", ".join(texts)


def test_every_request_of_halfmq_is_listed_with_its_header() -> None:
    """Authors of other clients need all fields in the order of the MSGPACK array."""
    listed = {int(row[0]): (row[1], row[2], row[4]) for row in _rows("Requests")}

    assert listed == {
        int(code): (
            code.name,
            _fields(REQUEST_HEADERS[code]),
            _fields(RESPONSE_HEADERS[code]) if code in RESPONSE_HEADERS else "none",
        )
        for code in RequestCode
        if code in OURS
    }


def test_every_entry_is_listed_with_its_fields_and_its_limit() -> None:
    """The bodies are arrays without names, so readers depend on the order."""
    kinds = [
        kind
        for kind in vars(own_requests).values()
        if isinstance(kind, type) and issubclass(kind, EndEntry) and kind is not EndEntry
    ]

    assert _rows("Entries of the bodies") == [
        [kind.__name__, _fields(kind), str(LIMITS[kind.__name__])] for kind in kinds
    ]


def test_bodies_and_answers_are_entries_of_the_second_table() -> None:
    """The document describes every body that it refers to."""
    entries = {row[0] for row in _rows("Entries of the bodies")}
    bodies = {cell for row in _rows("Requests") for cell in (row[3], row[5])}

    assert bodies - {"none"} == entries


def test_extended_official_requests_have_their_codes_and_fields() -> None:
    """Codes and names agree, and the answers to 34 and 37 have the documented fields."""
    for code, name, *_ in _rows("Extensions of official requests"):
        assert RequestCode(int(code)).name == name
    assert _fields(RESPONSE_HEADERS[RequestCode.END_TRANSACTION]) == "msgId S?"
    heartbeat = _fields(RESPONSE_HEADERS[RequestCode.HEART_BEAT])
    assert heartbeat.endswith("unequalTopic S?, unequalClientId S?, unequalFilter S?")


def test_an_old_reader_finds_the_group_size_missing() -> None:
    """The one field of a listing that has a default counts the transaction as one message."""
    values = [1, 2, "m", "t", "g", "topic", "", "parked", 5, 6, None, 0, 0, 0, None, None]
    (info,) = own_requests.decode_transactions(msgspec.msgpack.encode([values]))

    assert info.messages == 1
    assert isinstance(info, TransactionInfo)
