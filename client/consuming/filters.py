"""Filter expressions: select messages of a topic by their tag, or by their properties.

An SQL92 expression (``SqlFilter``) is read by the broker.

An expression of tags is ``*`` (all messages), or tags separated by ``||``. A message has at most
one tag and matches if it is one of them. Brokers accept any text as a tag, so ``a > 5`` or
``a,b`` would subscribe to a tag that no message has, and nothing would ever be delivered. This
client rejects such text on both sides: in the subscription of a consumer and in the tag of a
message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from halfmq.remoting.bodies import SUBSCRIBE_ALL

from ..arguments import NOT_IN_TAGS
from ..errors import ConfigurationError, FilterError

SQL92: Final = "SQL92"
"""The type of such an expression. Source: RocketMQ ``ExpressionType``."""
SQL_EXPECTED: Final = "an SQL92 expression"

_PLACE: Final = re.compile(r"SQL92 filter is wrong at character (\d+): (.*)", re.DOTALL)
_OFFICIAL_PLACE: Final = re.compile(r"(.* at line 1, column (\d+)\.)")
"""How RocketMQ's parser begins; what it expected follows on many lines."""

_BLANKS: Final = " \t\r\n"  # allowed around tags; official clients trim these too
# The first character that cannot follow: a forbidden one, another blank, or a second word.
_MISTAKE: Final = re.compile(rf"(?![{_BLANKS}])[\s{NOT_IN_TAGS}]|(?<=[{_BLANKS}])\S")


@dataclass(frozen=True, slots=True)
class SqlFilter:
    """Selects messages by an SQL92 expression over their properties.

    ::

        Consumer("billing", {"orders": SqlFilter("amount > 100 AND region IN ('EU', 'US')")})

    The broker evaluates it; one with ``enablePropertyFilter=false`` refuses it. What expressions
    mean: ``docs/operations.md``.
    """

    expression: str

    def __post_init__(self) -> None:
        given: object = self.expression
        if not isinstance(given, str) or not given.strip():
            raise ConfigurationError("expression", given, SQL_EXPECTED)


def sql_error(topic: str, expression: str, remark: str) -> FilterError:
    """Return the error for an SQL92 expression that a broker refuses."""
    if (found := _PLACE.fullmatch(remark)) is not None:
        column, reason = found.groups()
    elif (found := _OFFICIAL_PLACE.match(remark)) is not None:
        reason, column = found.groups()
    else:
        column, reason = "1", remark or "it is wrong"
    position = min(int(column) - 1, len(expression))
    return FilterError(topic, expression, position, reason, SQL_EXPECTED)


def normalise_filter(topic: str, expression: str) -> str:
    """Return the normal form of an expression: ``*``, or each tag once, separated by `` || ``.

    Raises:
        FilterError: It is neither; says at which character, and what is expected.
    """
    if expression.strip(_BLANKS) == SUBSCRIBE_ALL:
        return SUBSCRIBE_ALL
    tags: dict[str, None] = {}
    start = 0  # of the part, in the expression
    for part in expression.split("||"):
        tag = part.strip(_BLANKS)
        first = start + len(part) - len(part.lstrip(_BLANKS))
        if not tag:
            raise FilterError(topic, expression, first, "a tag is missing here")
        mistake = _MISTAKE.search(tag)
        if mistake is not None:
            position = first + mistake.start()
            raise FilterError(topic, expression, position, _reason(tag, mistake.start()))
        tags[tag] = None
        start += len(part) + len("||")
    return " || ".join(tags)


def _reason(tag: str, position: int) -> str:
    character = tag[position]
    if character in "|,;":
        return f"tags are separated by ||, not by {character}"
    if character == "*":
        return "* stands alone and means all messages; it is no wildcard"
    if character in "<>=!()&'":
        return f"{character} cannot be part of a tag; SQL92 expressions are given as SqlFilter(…)"
    if position and tag[position - 1] in _BLANKS:
        return "a tag has no blanks, and tags are separated by ||"
    return f"{character!r} cannot be part of a tag"
