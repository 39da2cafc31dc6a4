"""Attributes of topics: allowed names and values, and changes as operators write them.

A change is a list such as ``+message.type=FIFO,-reserve.time``.
Source: RocketMQ `AttributeParser`, `AttributeUtil`, `TopicAttributes`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from halfmq.remoting.codes import INT64_MAX

from ..errors import RequestRefusedError, invalid_parameter

MESSAGE_TYPE: Final = "message.type"
MIXED: Final = "MIXED"


@dataclass(frozen=True, slots=True)
class _Attribute:
    values: frozenset[str] | range
    is_changeable: bool = True  # after the topic was created
    unsupported: frozenset[str] = frozenset()  # values of RocketMQ that halfmq does not have


TOPIC_ATTRIBUTES: Final[Mapping[str, _Attribute]] = {
    "queue.type": _Attribute(
        frozenset({"BatchCQ", "SimpleCQ"}), is_changeable=False, unsupported=frozenset({"BatchCQ"})
    ),
    "cleanup.policy": _Attribute(
        frozenset({"DELETE", "COMPACTION"}),
        is_changeable=False,
        unsupported=frozenset({"COMPACTION"}),
    ),
    MESSAGE_TYPE: _Attribute(
        frozenset({"UNSPECIFIED", "NORMAL", "FIFO", "DELAY", "TRANSACTION", MIXED}),
        unsupported=frozenset({MIXED}),
    ),
    "reserve.time": _Attribute(range(-1, INT64_MAX + 1)),
}


def parse_change(text: str) -> dict[str, str | None]:
    """Return the change by attribute: its new value, or None if it is removed.

    Raises:
        RequestRefusedError: The text is not such a list.
    """
    change: dict[str, str | None] = {}
    for part in text.split(",") if text else ():
        key, equals, value = part.partition("=")
        sign, name = key[:1], key[1:]
        if sign != ("+" if equals else "-"):
            kind = "add/alter" if equals else "delete"
            raise RequestRefusedError(f"{kind} attribute format is wrong: {key}")
        if not name or "+" in name or "-" in name:
            raise RequestRefusedError("kv string format wrong.")
        if name in change:
            raise RequestRefusedError(f"alter duplication key. key: {name}")
        change[name] = value if equals else None
    return change


def altered(
    known: Mapping[str, object] | None, change: Mapping[str, str | None]
) -> dict[str, object]:
    """Return the attributes of a topic after a change; ``known`` is None for a new topic.

    Raises:
        RequestRefusedError: An attribute or value does not exist, or cannot be changed.
    """
    attributes = dict(known or {})
    for name, value in change.items():
        if value is None and known is None:
            raise RequestRefusedError(
                f"only add attribute is supported while creating topic. key: {name}"
            )
        if value is None and name not in attributes:
            raise RequestRefusedError(f"attempt to delete a nonexistent key: {name}")
        _check(name, value, is_new=known is None)
        if value is None:
            del attributes[name]
        else:
            attributes[name] = value
    return attributes


def _check(name: str, value: str | None, *, is_new: bool) -> None:
    attribute = TOPIC_ATTRIBUTES.get(name)
    if attribute is None:
        raise RequestRefusedError(f"unsupported key: {name}")
    if not is_new and not attribute.is_changeable:
        raise RequestRefusedError(f"attempt to update an unchangeable attribute. key: {name}")
    if value is None:
        return
    if value in attribute.unsupported:
        raise invalid_parameter(
            f"{value} {'message type' if name == MESSAGE_TYPE else name} is not supported."
        )
    if isinstance(attribute.values, range):
        if not _is_in(value, attribute.values):
            low, high = attribute.values[0], attribute.values[-1]
            raise RequestRefusedError(f"value is not in range({low}, {high})")
    elif value not in attribute.values:
        raise RequestRefusedError(f"value is not in set: [{', '.join(sorted(attribute.values))}]")


def _is_in(value: str, values: range) -> bool:
    try:
        return len(value) <= len(str(INT64_MAX)) + 1 and int(value) in values
    except ValueError:
        return False
