"""Recorded frames of official clients and servers, and random commands of our own."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import assume
from hypothesis import strategies as st

from halfmq.remoting.codes import FLAG_RESPONSE, INT32_MAX, INT32_MIN, HeaderType, LanguageCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.ext_fields import Header, fields_of
from halfmq.remoting.header_tables import REQUEST_HEADERS

FRAMES = Path(__file__).parent.parent / "golden" / "frames"
FILES = sorted(path.name.removesuffix(".jsonl.gz") for path in FRAMES.glob("*.jsonl.gz"))
assert FILES, "tests/golden/frames is empty"


class RecordedFrame(NamedTuple):
    """One line of a recording."""

    file: str
    connection: int
    direction: str
    code: int | None  # None: bytes that are no frame
    opaque: object  # None and texts are among them
    flag: int | None
    header_type: int | None
    meaning: str
    frame: bytes

    @property
    def header(self) -> bytes:
        return self.frame[8 : 8 + int.from_bytes(self.frame[5:8])]

    @property
    def body(self) -> bytes:
        return self.frame[8 + int.from_bytes(self.frame[5:8]) :]


@cache
def recorded(file: str) -> tuple[RecordedFrame, ...]:
    """Return all lines of one recording."""
    lines = gzip.decompress((FRAMES / f"{file}.jsonl.gz").read_bytes()).splitlines()
    return tuple(_line(file, json.loads(line)) for line in lines)


def all_recorded() -> Iterator[RecordedFrame]:
    """Yield every line of every recording."""
    for file in FILES:
        yield from recorded(file)


def _line(file: str, fields: dict[str, Any]) -> RecordedFrame:
    return RecordedFrame(file, **(fields | {"frame": bytes.fromhex(fields["frame"])}))


# -- random commands -----------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)  # all that UTF-8 can say
INT32 = st.integers(min_value=INT32_MIN, max_value=INT32_MAX)
INT16 = st.integers(min_value=-(2**15), max_value=2**15 - 1)
BODIES = st.binary(max_size=100)


def headers(kind: type[Header]) -> st.SearchStrategy[Header]:
    """Random headers of a class."""

    def value(name: str, plain: type) -> st.SearchStrategy[object]:
        if plain is str:
            return TEXTS
        if plain is bool:
            return st.booleans()
        return INT32  # every number field holds at least that

    values = {f.attribute: value(f.name, f.kind) for f in fields_of(kind) if f.required}
    optional = {f.attribute: value(f.name, f.kind) for f in fields_of(kind) if not f.required}
    return st.fixed_dictionaries(values, optional=optional).map(lambda chosen: kind(**chosen))


@st.composite
def requests(draw: st.DrawFn, header_type: HeaderType | None = None) -> RemotingCommand:
    """Random requests of known codes with their typed headers."""
    code = draw(st.sampled_from(sorted(REQUEST_HEADERS)))
    fits = code < 2**15  # the binary header has no room for the codes of pop
    types = [one for one in HeaderType if fits or one is not HeaderType.ROCKETMQ]
    chosen = draw(st.sampled_from(types)) if header_type is None else header_type
    assume(chosen in types)
    return RemotingCommand(
        code=code,
        opaque=draw(INT32),
        flag=draw(st.sampled_from([0, 2])),
        language=draw(st.sampled_from(list(LanguageCode))),
        version=draw(INT16),
        remark=draw(st.none() | TEXTS.filter(bool)),
        header=draw(headers(REQUEST_HEADERS[code])),
        body=draw(BODIES),
        header_type=chosen,
    )


@st.composite
def responses(draw: st.DrawFn) -> RemotingCommand:
    """Random responses with a map of ext fields, which JSON and ROCKETMQ can tell from none."""
    return RemotingCommand(
        code=draw(INT16),
        opaque=draw(INT32),
        flag=FLAG_RESPONSE,
        language=draw(st.sampled_from(list(LanguageCode))),
        version=draw(INT16),
        remark=draw(st.none() | TEXTS.filter(bool)),
        header=draw(st.none() | st.dictionaries(TEXTS, TEXTS, min_size=1, max_size=5)),
        body=draw(BODIES),
        header_type=draw(st.sampled_from([HeaderType.JSON, HeaderType.ROCKETMQ])),
    )
