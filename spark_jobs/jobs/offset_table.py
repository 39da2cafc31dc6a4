"""How far consumer groups have come, as the broker keeps it in ``config/consumerOffset.json``.

RocketMQ writes the table with bare numbers as keys, which is no JSON; halfmq writes JSON. Both are
read here. The file is seconds old while a broker runs (``flushConsumerOffsetInterval``), and its
``.bak`` is the one before.

Source: RocketMQ ``ConsumerOffsetManager``, ``SubscriptionGroupManager``, ``ConfigManager``.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..errors import PlaceError

FILE: Final = "consumerOffset.json"
GROUPS_FILE: Final = "subscriptionGroup.json"
DDL: Final = "`consumerGroup` string, `topic` string, `partition` int, `nextOffset` bigint"
# Made by the broker itself, for its own work and for tools.
_BROKERS_GROUPS: Final = frozenset({"TOOLS_CONSUMER", "FILTERSRV_CONSUMER", "SELF_TEST_C_GROUP"})
_BROKERS_PREFIXES: Final = ("CID_RMQ_SYS_", "CID_ONSAPI_", "CID_ONS-HTTP-PROXY")
_SEPARATOR: Final = "@"  # between topic and group; neither name can have it
_INT32_MAX: Final = 2**31 - 1
_INT64_MAX: Final = 2**63 - 1

# A string, or a number where a key stands. Strings are matched to be passed over.
_STRING_OR_BARE_KEY: Final = re.compile(r'("(?:[^"\\]|\\.)*")|([{,]\s*)(-?\d+)(\s*:)')


class GroupOffset(NamedTuple):
    """Where a group goes on in one queue: the columns of ``DDL``."""

    group: str
    topic: str
    queue: int
    next_offset: int  # queue offset of the first message that it has not consumed


class OffsetTable(NamedTuple):
    """The offsets of all groups."""

    path: Path  # the file they are from
    is_backup: bool  # the file itself was missing or damaged
    offsets: list[GroupOffset]


def offset_file(directory: str | Path) -> Path:
    """Return where a store keeps the table; for a folder of segments, where its store does.

    The file may be missing.
    """
    root = Path(directory).absolute()
    if not (root / "commitlog").is_dir() and root.name == "commitlog":
        root = root.parent
    return root / "config" / FILE


def read_offsets(path: Path, *, may_be_missing: bool = False) -> OffsetTable:
    """Read the table at ``path``, or its ``.bak`` where that is missing or damaged.

    A broker writes it when a consumer has stored an offset: a store without consumers has none,
    which is an empty table if it ``may_be_missing`` from a store.

    Raises:
        PlaceError: Neither can be read.
    """
    backup = path.with_name(f"{path.name}.bak")
    is_store = (path.parent.parent / "commitlog").is_dir()
    if may_be_missing and is_store and not path.exists() and not backup.exists():
        return OffsetTable(path, is_backup=False, offsets=[])
    reasons = []
    for candidate in (path, backup):
        try:
            offsets = list(_offsets(_load(candidate)))
        except (OSError, ValueError, RecursionError) as error:
            reasons.append(_reason(error))
        else:
            return OffsetTable(candidate, candidate == backup, offsets)
    raise PlaceError(str(path), f"{reasons[0]}; .bak: {reasons[1]}")


def known_groups(config: Path) -> frozenset[str]:
    """Return the consumer groups that a broker knows, without its own; none if it does not tell."""
    path = config / GROUPS_FILE
    for candidate in (path, path.with_name(f"{GROUPS_FILE}.bak")):
        try:
            table = _load(candidate)["subscriptionGroupTable"]
        except (OSError, ValueError, RecursionError, KeyError):
            continue
        if isinstance(table, dict):
            return frozenset(group for group in table if not is_brokers_own(group))
    return frozenset()


def is_brokers_own(group: str) -> bool:
    """Tell whether a group belongs to the broker itself or to its tools."""
    return group in _BROKERS_GROUPS or group.startswith(_BROKERS_PREFIXES)


def _load(path: Path) -> Mapping[str, Any]:
    text = path.read_text("utf-8")
    table = json.loads(_STRING_OR_BARE_KEY.sub(_with_quoted_key, text))
    if not isinstance(table, dict):
        raise ValueError("it is no table")  # noqa: TRY004  as for any other wrong content
    return table


def _with_quoted_key(match: re.Match[str]) -> str:
    return match[1] or f'{match[2]}"{match[3]}"{match[4]}'


def _offsets(table: Mapping[str, Any]) -> Iterator[GroupOffset]:
    by_key = table.get("offsetTable")
    if not isinstance(by_key, dict):
        raise ValueError("it has no offsetTable")  # noqa: TRY004  as for any other wrong content
    for key, queues in by_key.items():
        topic, _, group = key.partition(_SEPARATOR)
        if not isinstance(queues, dict) or not topic or not group:
            raise ValueError(f"{key!r} is not topic@group with a table of queues")
        for queue, next_offset in queues.items():
            yield GroupOffset(
                group, topic, _integer(queue, _INT32_MAX), _integer(next_offset, _INT64_MAX)
            )


def _integer(value: object, largest: int) -> int:
    if isinstance(value, float):
        raise ValueError(f"{value} is no offset")  # noqa: TRY004  as for any other wrong content
    number = int(str(value))
    if abs(number) > largest:
        raise ValueError(f"{number} is too large")
    return number


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "it is missing"
    return getattr(error, "strerror", None) or str(error)
