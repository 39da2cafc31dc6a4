"""Texts of peers as they are shown: in remarks of answers, and in the log.

A peer chooses names, ids and reasons. They may have 16 MB, and characters that move the cursor of
a terminal or begin a new line of a log.
"""

from typing import Final

VALUE_MAX: Final = 1_024
"""Characters of one value; four times the longest name that RocketMQ allows."""

REMARK_MAX: Final = 4_096
"""Characters of a remark, a few values and what is said about them."""


def shown(text: str, most: int = VALUE_MAX, *, keep: str = "") -> str:
    """Return a text with its middle cut and its control characters, except ``keep``, escaped."""
    if len(text) > most:
        tail = most // 4
        text = f"{text[: most - tail]}…({len(text):,} characters)…{text[-tail:]}"
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one in keep else one.encode("unicode_escape").decode()
        for one in text
    )
