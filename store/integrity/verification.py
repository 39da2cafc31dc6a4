"""Digests and scrubs in the life of a store: what its owner calls, and when.

Nothing of this is worth a failed start or stop, or a lost message: what goes wrong is logged, and
digests are left alone for the rest of the run.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

from ..files.checkpoint import rebuild_marker
from ..files.mapped_file_queue import MappedFileQueue
from ..format.index import slot_position
from ..log.resync import Damage
from ..queue.consume_queue import QueueTable
from .digests import IndexDigests, IndexExtent, LogDigests, QueueDigests, remove_all, remove_orphans
from .scrub import (
    START_BYTES,
    Comparison,
    Target,
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

# Bytes taken in by one round of the helper thread, which comes once per second: a fiftieth of a
# processor. Batches may come faster; then it falls behind, and catches up when it can.
ROUND_BYTES: Final = 128 << 20
# Blocks that a round compares of each of log, queues and index: 8 MiB. A disk that reads 100 MB/s
# keeps three quarters of that for consumers, and a log of 100 GB takes three and a half hours.
ROUND_BLOCKS: Final = 128
CLOSE_BYTES: Final = 256 << 20  # of log at an ordered stop: a tenth of a second; later more


class Integrity:
    """The digests of one store."""

    def __init__(
        self,
        root: Path,
        files: MappedFileQueue,
        queues: QueueTable,
        index_slots: int,
    ) -> None:
        """``files`` are those of the log; ``index_slots`` is how many an index file has."""
        self._root = root
        self._log = LogDigests(root, files)
        self._queues = QueueDigests(root, queues)
        self._index = IndexDigests(root, slot_position(index_slots))
        self._files = files
        self._queue_table = queues
        self._slots_end = slot_position(index_slots)
        self._index_before: list[Path] = []  # its files before it was opened
        self._passes: list[Comparison] = []  # over log, queues and index
        self._usable = True

    def before_recovery(self, *, is_ours: bool) -> None:
        """Turn flipped bits back in queues; those are loaded.

        If the store ``is_ours`` no more, because another broker had it last, all digests go.
        """
        if is_ours:
            self._attempt(lambda: repair_queues(self._root, self._queue_table, self._files))
        else:
            self._attempt(lambda: remove_all(self._root))

    def repair_log(self, start: int) -> int:
        """Turn flipped bits back in the log from a physical offset on; see ``scrub.repair_log``."""
        return self._attempt(lambda: repair_log(self._root, self._files, start)) or start

    def before_index(
        self, end_offset: int, damages: Iterable[Damage], *, clean: bool, queues_rebuilt: bool
    ) -> None:
        """Mend index files, or delete them to be rebuilt, while nothing is served yet.

        The log ends at ``end_offset``, and fillers were put on ``damages``. With ``clean``, the
        last stop was an ordered one of ours.
        """
        self._attempt(lambda: self._log.start(end_offset, damages))
        if queues_rebuilt:
            self._attempt(lambda: remove_all(self._root, "consumequeue"))
        self._attempt(lambda: self._before_index(clean=clean))

    def _before_index(self, *, clean: bool) -> None:
        paths = self._index_before = repair_index(self._root)
        self._index.write_to(paths[-1] if paths else None, keep=clean)

    def start(self, index_files: Sequence[IndexExtent]) -> None:
        """Begin the run; ``index_files`` are all, the newest last."""
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

    def _written_index(self) -> list[Target]:
        """Return the index file that is written to: what a start did not compare, but for slots."""
        path, start = self._index.path, max(self._slots_end, START_BYTES)
        rebuild = rebuild_marker(self._root, "index")
        return [] if path is None else [Target(path, self._index.digest, start, rebuild=rebuild)]

    def work(self, durable_offset: int, index_files: Sequence[IndexExtent]) -> None:
        """Do a little of what there is to do; called on the helper thread, once per second."""
        self._attempt(lambda: self._log.advance(durable_offset, ROUND_BYTES))
        self._attempt(self._queues.advance)
        self._attempt(lambda: self._index.advance(index_files, ROUND_BYTES))
        self._attempt(self._compare)

    def _compare(self) -> None:
        for one in self._passes:
            for _ in islice(one, ROUND_BLOCKS):
                pass

    def close(self, durable_offset: int, index_files: Sequence[IndexExtent]) -> None:
        """Take in what changes no more: everything is on disk, and nothing is written."""
        for one in self._passes:
            one.close()
        self._attempt(lambda: self._log.advance(durable_offset, CLOSE_BYTES))
        self._attempt(lambda: self._queues.advance(closing=True))
        self._attempt(lambda: self._index.close(index_files))

    def _attempt(self, work: Callable[[], _T]) -> _T | None:
        if not self._usable:
            return None
        try:
            return work()
        except OSError as error:
            self._usable = False
            logger.warning("event=digests_stopped error=%r", str(error))
            return None
