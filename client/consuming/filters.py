"""Filter expressions: select messages of a topic by their tag.

An expression is ``*`` (all messages), or tags separated by ``||``. A message has at most one tag
and matches if it is one of them. Brokers accept any text as a tag, so ``a > 5`` or ``a,b`` would
subscribe to a tag that no message has, and nothing would ever be delivered. This client rejects
such text on both sides: in the subscription of a consumer and in the tag of a message.
"""

from __future__ import annotations

import re
from typing import Final

from halfmq.remoting.bodies import SUBSCRIBE_ALL

from ..arguments import NOT_IN_TAGS
from ..errors import FilterError

_BLANKS: Final = " \t\r\n"  # allowed around tags; official clients trim these too
# The first character that cannot follow: a forbidden one, another blank, or a second word.
_MISTAKE: Final = re.compile(rf"(?![{_BLANKS}])[\s{NOT_IN_TAGS}]|(?<=[{_BLANKS}])\S")


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
        return f"{character} cannot be part of a tag; SQL92 filters are not supported"
    if position and tag[position - 1] in _BLANKS:
        return "a tag has no blanks, and tags are separated by ||"
    return f"{character!r} cannot be part of a tag"
