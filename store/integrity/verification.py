"""Digests and scrubs during the life cycle of a store; called by ``MessageStore``.

An error here never fails a start, a stop or an append: it is logged, and digests are not used for
the rest of the run.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

from attrs import define, field

from ..files import disk
from ..files.checkpoint import rebuild_marker
from ..files.mapped_file_queue import MappedFileQueue
from ..format.index import slot_position
from ..log.resync import Damage
from ..queue.consume_queue import ConsumeQueue
from ..queue.queue_table import QueueTable
from .digests import IndexDigests, IndexExtent, LogDigests, QueueDigests, remove_all, remove_orphans
from .scrub import (
    START_BYTES,
    Comparison,
    ScrubTarget,
    compare,
    index_targets,
    log_targets,
    queue_targets,
    repair_index,
    repair_log,
    repair_queues,
)

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# Bytes added to digests by one round of the helper thread, once per second: 2 % of a processor.
# Under a faster load, digests lag and catch up later.
ROUND_BYTES: Final = 128 << 20
# Blocks that a round compares of each of log, queues and index: 8 MiB. A disk that reads 100 MB/s
# has three quarters of that left for consumers, and a log of 100 GB takes three and a half hours.
ROUND_BLOCKS: Final = 128
CLOSE_BYTES: Final = 256 << 20  # bytes of log at a clean stop: a tenth of a second


@define(eq=False, repr=False, slots=False)
class Integrity:
    """The digests of one store."""

    _root: Path
    _files: MappedFileQueue  # of the log
    _queue_table: QueueTable = field(alias="queues")
    _index_slots: int  # per index file

    def __attrs_post_init__(self) -> None:
        self._log = LogDigests(self._root, self._files)
        self._queues = QueueDigests(self._root, self._queue_table)
        self._index = IndexDigests(self._root, slot_position(self._index_slots))
        self._slots_end = slot_position(self._index_slots)
        self._index_before: list[Path] = []  # index files before the index was opened
        self._passes: list[Comparison] = []  # over log, queues and index
        self._usable = True

    def before_recovery(self, *, is_ours: bool) -> None:
        """Repair flipped bits in loaded queues.

        Without ``is_ours``, because another broker used the store last, delete all digests.
        """
        if is_ours:
            self._attempt(lambda: repair_queues(self._root, self._queue_table, self._files))
        else:
            self._attempt(lambda: remove_all(self._root))

    def repair_log(self, start: int) -> int:
        """Repair flipped bits in the log from a physical offset on; see ``scrub.repair_log``."""
        return self._attempt(lambda: repair_log(self._root, self._files, start)) or start

    def before_index(
        self, end_offset: int, damages: Iterable[Damage], *, clean: bool, queues_rebuilt: bool
    ) -> None:
        """Repair index files, or delete them to be rebuilt, before the index is opened.

        The log ends at ``end_offset``, and fillers were put on ``damages``. With ``clean``, the
        previous run of halfmq stopped cleanly.
        """
        self._attempt(lambda: self._log.start(end_offset, damages))
        if queues_rebuilt:
            self._attempt(lambda: remove_all(self._root, "consumequeue"))
        self._attempt(lambda: self._before_index(clean=clean))

    def _before_index(self, *, clean: bool) -> None:
        paths = self._index_before = repair_index(self._root)
        self._index.write_to(paths[-1] if paths else None, keep=clean)

    def start(self, index_files: Sequence[IndexExtent]) -> None:
        """Begin after recovery; ``index_files`` are all, the newest last."""
        self._queues.start()
        self._attempt(lambda: self._index.start(index_files, self._index_before))
        self._attempt(lambda: remove_orphans(self._root))
        root, log = self._root, self._files
        paths = [path for path, _ in index_files]
        self._passes = [
            compare(log_targets(root, log, reversed([*log.bases]))),
            compare(queue_targets(root, self._queue_table, log)),
            compare([*self._written_index(), *index_targets(root, paths)]),
        ]

    def _written_index(self) -> list[ScrubTarget]:
        """Return the index file in use: the part after its slots that the start did not compare."""
        path, start = self._index.path, max(self._slots_end, START_BYTES)
        rebuild = rebuild_marker(self._root, "index")
        return (
            [] if path is None else [ScrubTarget(path, self._index.digest, start, rebuild=rebuild)]
        )

    def work(self, durable_offset: int, index_files: Sequence[IndexExtent]) -> None:
        """Extend digests and compare some blocks; called once per second on the helper thread."""
        self._remove_outdated()
        self._attempt(lambda: self._log.advance(durable_offset, ROUND_BYTES))
        self._attempt(self._queues.advance)
        self._attempt(lambda: self._index.advance(index_files, ROUND_BYTES))
        self._attempt(self._compare)

    def _compare(self) -> None:
        for one in self._passes:
            for _ in islice(one, ROUND_BLOCKS):
                pass

    def forget(self, queues: Sequence[ConsumeQueue]) -> None:
        """Delete the digests of deleted queues; called on the helper thread, or by a start."""
        self._attempt(lambda: self._queues.forget(queues))

    def close(self, durable_offset: int, index_files: Sequence[IndexExtent]) -> None:
        """Complete digests at a stop, when everything is on disk and nothing is written."""
        for one in self._passes:
            one.close()
        self._remove_outdated()
        self._attempt(lambda: self._log.advance(durable_offset, CLOSE_BYTES))
        self._attempt(lambda: self._queues.advance(closing=True))
        self._attempt(lambda: self._index.close(index_files))

    def _remove_outdated(self) -> None:
        """Try again, also in a run without digests: the index has changed since."""
        with suppress(OSError):
            self._index.remove_outdated()

    def _attempt(self, work: Callable[[], _T]) -> _T | None:
        if not self._usable:
            return None
        try:
            return work()
        except OSError as error:
            if disk.lacks_descriptors(error):
                return None  # the next round tries again
            self._usable = False
            logger.warning("event=digests_stopped error=%r", str(error))
            return None
