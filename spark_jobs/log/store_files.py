"""The files of a store besides its log, as far as the jobs use them; each may be missing.

Source: RocketMQ ``StorePathConfigHelper``, ``ConfigManager``, ``TopicConfigManager``,
``ConsumerOffsetManager``.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from halfmq.store.format.topics import HALF_TOPIC

from .files import (
    ANY_NAME,
    child,
    entries,
    exists,
    is_folder,
    location,
    name_of,
    parent,
    read_bytes,
)

_HALF_GROUP: Final = "CID_RMQ_SYS_TRANS"  # keeps how far RocketMQ's checks have come
_QUEUE_COUNTS: Final = ("readQueueNums", "writeQueueNums")
# A string, or a number that is a key. Strings are matched so that nothing in them is.
_STRING_OR_BARE_KEY: Final = re.compile(r'("(?:[^"\\]|\\.)*")|([{,]\s*)(-?\d+)(\s*:)')


def load_table(path: str) -> Mapping[str, Any]:
    """Read a JSON table of a broker; RocketMQ writes numbers as keys without quotes.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no table.
    """
    text = read_bytes(path).decode()
    try:
        table = json.loads(_STRING_OR_BARE_KEY.sub(_with_quoted_key, text))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(table, dict):
        raise ValueError("it is no table")  # noqa: TRY004  as for any other wrong content
    return table


def _with_quoted_key(match: re.Match[str]) -> str:
    return match[1] or f'{match[2]}"{match[3]}"{match[4]}'


def with_backup(path: str) -> tuple[str, str]:
    """Return a table's path and that of the broker's previous version of it."""
    return path, child(parent(path), f"{name_of(path)}.bak")


class StoreFiles:
    """The files of a store root; of a mere folder of segments there are none."""

    def __init__(self, directory: str | Path) -> None:
        root = location(directory)
        self._root = root if is_folder(child(root, "commitlog")) else None

    @property
    def is_root(self) -> bool:
        """Whether there is a store around the log, and not just a folder of segments."""
        return self._root is not None

    @property
    def consume_queues(self) -> str | None:
        """The folder of the consume queues."""
        return self._folder("consumequeue")

    def _folder(self, name: str) -> str | None:
        folder = child(self._root, name) if self._root else ""
        return folder if folder and is_folder(folder) else None

    @property
    def batch_topics(self) -> list[str]:
        """The topics whose queues have another format, with an entry for a batch."""
        folder = self._folder("batchconsumequeue")
        return [topic.name for topic in entries(folder, ANY_NAME)] if folder else []

    @cached_property
    def queue_topics(self) -> frozenset[str]:
        """The topics that have a folder of consume queues."""
        folder = self.consume_queues
        return (
            frozenset(topic.name for topic in entries(folder, ANY_NAME)) if folder else frozenset()
        )

    @property
    def has_extension(self) -> bool:
        """Whether entries may have places in a ``consumequeue_ext`` for tags codes."""
        return self._folder("consumequeue_ext") is not None

    @property
    def was_closed(self) -> bool:
        """Whether the broker stopped in order: no ``abort`` file is left.

        An archive, which has a folder ``manifest``, lacks the newest entries of its queues.
        """
        return self._root is not None and not any(
            exists(child(self._root, name)) for name in ("abort", "manifest")
        )

    @cached_property
    def queue_counts(self) -> Mapping[str, int] | None:
        """How many queues each topic has; None if that is not known."""
        for table in self._tables("topics.json"):
            with suppress(ValueError, TypeError, KeyError, AttributeError):
                return {
                    topic: max(int(entry[count]) for count in _QUEUE_COUNTS)
                    for topic, entry in table["topicConfigTable"].items()
                }
        return None

    @cached_property
    def deleted_topics(self) -> Mapping[str, int]:
        """For each deleted topic, the physical offset below which its old messages lie.

        halfmq notes it in ``topics.json``; RocketMQ does not.
        """
        for table in self._tables("topics.json"):
            with suppress(ValueError, TypeError, AttributeError):
                deleted = table.get("halfmqDeletedTopics", {})
                return {topic: int(end) for topic, end in deleted.items()}
        return {}

    @cached_property
    def passed_slot(self) -> int:
        """The half queue offset up to which RocketMQ has checked; 0 if that is not known."""
        for table in self._tables("consumerOffset.json"):
            with suppress(ValueError, TypeError, KeyError):
                return int(table["offsetTable"][f"{HALF_TOPIC}@{_HALF_GROUP}"]["0"])
        return 0

    def _tables(self, name: str) -> Iterator[Mapping[str, Any]]:
        """Yield a table and its backup if they can be read."""
        if self._root is not None:
            for path in with_backup(child(child(self._root, "config"), name)):
                with suppress(OSError, ValueError):
                    yield load_table(path)
