"""Digests and scrubs in the life of a store: what its owner calls, and when.

Nothing of this is worth a failed start or stop, or a lost message: what goes wrong is logged, and
digests are left alone for the rest of the run.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from .consume_queue import ConsumeQueue, QueueTable
from .digests import (
    IndexDigests,
    IndexExtent,
    LogDigests,
    QueueDigests,
    remove_all,
    remove_orphans,
)
from .format.index import slot_position
from .log_search import Damage
from .mapped_file_queue import MappedFileQueue
from .scrub import ROUND_STEPS, IndexScrub, LogScrub, QueueScrub, mend_log

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# Bytes taken in by one round of the helper thread, which comes once per second: a fiftieth of a
# processor. Batches may come faster; then it falls behind, and catches up when it can.
ROUND_BYTES: Final = 128 << 20
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
        self._queue_scrub = QueueScrub(root, queues, files)
        self._index_scrub = IndexScrub(root, slot_position(index_slots))
        self._log_scrub = LogScrub(root, files)
        self._usable = True

    def before_recovery(self, *, is_ours: bool) -> None:
        """Turn flipped bits back in queues; those are loaded.

        If the store ``is_ours`` no more, because another broker had it last, all digests go.
        """
        if is_ours:
            self._attempt(self._queue_scrub.before_recovery)
        else:
            self._attempt(lambda: remove_all(self._root))

    def mend_log(self, start: int) -> int:
        """Turn flipped bits back in the log from a physical offset on; see ``scrub.mend_log``."""
        return self._attempt(lambda: mend_log(self._root, self._files, start)) or start

    @property
    def damaged_queues(self) -> Mapping[ConsumeQueue, int]:
        """Queues to be made anew, with the first queue offset that is damaged."""
        return self._queue_scrub.damaged

    def before_index(
        self, end_offset: int, damages: Iterable[Damage], *, clean: bool, queues_rebuilt: bool
    ) -> None:
        """Mend index files or give them up, while nothing is served yet.

        The log ends at ``end_offset``, and fillers were put on ``damages``. With ``clean``, the
        last stop was an ordered one of ours.
        """
        self._attempt(lambda: self._log.start(end_offset, damages))
        if queues_rebuilt:
            self._attempt(self._queue_scrub.forget)
        self._attempt(lambda: self._index_scrub.give_up_damaged(clean=clean))

    def start(self, index_files: Sequence[IndexExtent]) -> None:
        """Begin the run; ``index_files`` are all, the newest last."""
        self._queues.start()
        self._attempt(lambda: self._start_index(index_files))
        self._attempt(lambda: remove_orphans(self._root))

    def _start_index(self, index_files: Sequence[IndexExtent]) -> None:
        written = self._index_scrub.opened(path for path, _ in index_files)
        self._index.start(index_files, self._index_scrub.kept, written)

    def work(self, durable_offset: int, index_files: Sequence[IndexExtent]) -> None:
        """Do a little of what there is to do; called on the helper thread, once per second."""
        self._attempt(lambda: self._log.advance(durable_offset, ROUND_BYTES))
        self._attempt(self._queues.advance)
        self._attempt(lambda: self._index.advance(index_files, ROUND_BYTES))
        self._attempt(lambda: self._queue_scrub.work(ROUND_STEPS))
        self._attempt(lambda: self._index_scrub.run(ROUND_STEPS))
        self._attempt(lambda: self._log_scrub.run(ROUND_STEPS))

    def close(self, durable_offset: int, index_files: Sequence[IndexExtent]) -> None:
        """Take in what changes no more: everything is on disk, and nothing is written."""
        self._queue_scrub.close()
        self._index_scrub.close()
        self._log_scrub.close()
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
