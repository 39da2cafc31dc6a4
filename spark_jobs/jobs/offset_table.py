"""Read the offsets of consumer groups, which a broker keeps in ``config/consumerOffset.json``.

The file is seconds old while a broker runs (``flushConsumerOffsetInterval``), and its ``.bak`` is
the previous version.

Source: RocketMQ ``ConsumerOffsetManager``, ``SubscriptionGroupManager``, ``ConfigManager``.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..errors import PlaceError
from ..log.files import child, exists, is_folder, location, name_of, parent
from ..log.store_files import load_table, with_backup

FILE: Final = "consumerOffset.json"
GROUPS_FILE: Final = "subscriptionGroup.json"
DDL: Final = "`consumerGroup` string, `topic` string, `partition` int, `nextOffset` bigint"
# Made by the broker itself, for its own work and for tools.
_BROKERS_GROUPS: Final = frozenset({"TOOLS_CONSUMER", "FILTERSRV_CONSUMER", "SELF_TEST_C_GROUP"})
_BROKERS_PREFIXES: Final = ("CID_RMQ_SYS_", "CID_ONSAPI_", "CID_ONS-HTTP-PROXY")
_SEPARATOR: Final = "@"  # between topic and group; neither name can have it
_INT32_MAX: Final = 2**31 - 1
_INT64_MAX: Final = 2**63 - 1


class StoredOffset(NamedTuple):
    """Where a group continues in one queue: the columns of ``DDL``."""

    group: str
    topic: str
    queue: int
    next_offset: int  # queue offset of the first message that it has not consumed


class OffsetTable(NamedTuple):
    """The offsets of all groups."""

    path: str  # the file they are from
    is_backup: bool  # the file itself was missing or damaged
    offsets: list[StoredOffset]


def offset_file(directory: str | Path) -> str:
    """Return the path of a store's table, which may be missing.

    For a folder of segments, it is that of the store around it.
    """
    root = location(directory)
    if name_of(root) == "commitlog" and not is_folder(child(root, "commitlog")):
        root = parent(root)
    return child(child(root, "config"), FILE)


def read_offsets(path: str, *, may_be_missing: bool = False) -> OffsetTable:
    """Read the table at ``path``, or its ``.bak`` if that is missing or damaged.

    A broker writes it when a consumer has stored an offset. With ``may_be_missing``, the table of a
    store without it is empty.

    Raises:
        PlaceError: Neither can be read.
    """
    candidates = with_backup(path)
    is_store = is_folder(child(parent(parent(path)), "commitlog"))
    if may_be_missing and is_store and not any(map(exists, candidates)):
        return OffsetTable(path, is_backup=False, offsets=[])
    reasons = []
    for candidate in candidates:
        try:
            offsets = list(_offsets(load_table(candidate)))
        except FileNotFoundError:
            reasons.append("it is missing")
        except (OSError, ValueError) as error:
            reasons.append(getattr(error, "strerror", None) or str(error))
        else:
            return OffsetTable(candidate, candidate != path, offsets)
    raise PlaceError(path, f"{reasons[0]}; .bak: {reasons[1]}")


def known_groups(config: str) -> frozenset[str]:
    """Return the consumer groups in a broker's ``config`` folder, without its own."""
    for candidate in with_backup(child(config, GROUPS_FILE)):
        with suppress(OSError, ValueError, KeyError, TypeError):
            table = load_table(candidate)["subscriptionGroupTable"]
            return frozenset(group for group in table if not is_brokers_own(group))
    return frozenset()


def is_brokers_own(group: str) -> bool:
    """Return whether a group belongs to the broker itself or to its tools."""
    return group in _BROKERS_GROUPS or group.startswith(_BROKERS_PREFIXES)


def _offsets(table: Mapping[str, Any]) -> Iterator[StoredOffset]:
    by_key = table.get("offsetTable")
    if not isinstance(by_key, dict):
        raise ValueError("it has no offsetTable")  # noqa: TRY004  as for any other wrong content
    for key, queues in by_key.items():
        topic, _, group = key.partition(_SEPARATOR)
        if not isinstance(queues, dict) or not topic or not group:
            raise ValueError(f"{key!r} is not topic@group with a table of queues")
        for queue, next_offset in queues.items():
            yield StoredOffset(
                group, topic, _integer(queue, _INT32_MAX), _integer(next_offset, _INT64_MAX)
            )


def _integer(value: object, largest: int) -> int:
    if isinstance(value, float):
        raise ValueError(f"{value} is no offset")  # noqa: TRY004  as for any other wrong content
    number = int(str(value))
    if abs(number) > largest:
        raise ValueError(f"{number} is too large")
    return number
