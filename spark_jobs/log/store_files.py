"""What a store says beside its log, as far as an audit uses it; every file may be missing.

Source: RocketMQ ``StorePathConfigHelper``, ``TopicConfigManager``, ``ConsumerOffsetManager``.
"""

import json
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Final

from halfmq.store.format.topics import HALF_TOPIC

_HALF_GROUP: Final = "CID_RMQ_SYS_TRANS"  # keeps how far RocketMQ's checks have come
# RocketMQ writes this table with bare numbers as keys, which is no JSON.
_PASSED: Final = re.compile(rf'"{HALF_TOPIC}@{_HALF_GROUP}"\s*:\s*\{{\s*"?0"?\s*:\s*(\d+)'.encode())
_QUEUE_COUNTS: Final = ("readQueueNums", "writeQueueNums")


class StoreFiles:
    """The files of a store root; of a mere folder of segments there are none."""

    def __init__(self, directory: str | Path) -> None:
        root = Path(directory).absolute()
        self._root = root if (root / "commitlog").is_dir() else None

    @property
    def is_root(self) -> bool:
        """Whether there is a store around the log, and not just a folder of segments."""
        return self._root is not None

    @property
    def consume_queues(self) -> Path | None:
        """The folder of the consume queues."""
        folder = self._root / "consumequeue" if self._root else None
        return folder if folder and folder.is_dir() else None

    @property
    def batch_topics(self) -> list[str]:
        """The topics whose queues have another format, with an entry for a batch."""
        folder = self._root / "batchconsumequeue" if self._root else None
        return sorted(path.name for path in folder.iterdir()) if folder and folder.is_dir() else []

    @property
    def has_extension(self) -> bool:
        """Whether entries may have places in a ``consumequeue_ext`` for tags codes."""
        return self._root is not None and (self._root / "consumequeue_ext").is_dir()

    @property
    def was_closed(self) -> bool:
        """Whether the broker stopped in order: no ``abort`` file is left."""
        return self._root is not None and not (self._root / "abort").exists()

    @cached_property
    def queue_counts(self) -> Mapping[str, int] | None:
        """How many queues each topic has; None when that is not told."""
        for content in self._config("topics.json"):
            try:
                table = json.loads(content)["topicConfigTable"]
                return {
                    topic: max(int(entry[count]) for count in _QUEUE_COUNTS)
                    for topic, entry in table.items()
                }
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                continue
        return None

    @cached_property
    def passed_slot(self) -> int:
        """To which half queue offset RocketMQ's checks have come; 0 when that is not told."""
        for content in self._config("consumerOffset.json"):
            passed = _PASSED.search(content)
            if passed is not None:
                return int(passed[1])
        return 0

    def _config(self, name: str) -> list[bytes]:
        """Read a table and its backup, those of them that can be read."""
        if self._root is None:
            return []
        contents = []
        for path in (self._root / "config" / name, self._root / "config" / f"{name}.bak"):
            try:
                contents.append(path.read_bytes())
            except OSError:
                continue
        return contents
