"""Where all queues end below one record of the log, as one checksum for the checkpoint.

A queue file that is lost, cut or zeroed is not visible from the other queues, and its records may
lie far before the part of the log that a start scans. So each checkpoint says where the queues
ended, and a start rebuilds them from the log if they end elsewhere. The checksum is a sum over all
queues: only changed ones cost time at each checkpoint, and their order does not matter.
"""

from collections.abc import Iterable

from ..format.crc import crc32
from .consume_queue import ConsumeQueue


def checksum(queue: ConsumeQueue, end: int) -> int:
    """Return one queue's part of the sum; 0 for a queue without entries, which needs no file."""
    return crc32(f"{queue.topic}:{queue.queue_id}:{end}".encode()) if end else 0


class QueueEnds:
    """The ends of all queues below a record that moves; used by one thread at a time."""

    def __init__(self) -> None:
        self.offset = -1  # physical offset of that record
        self.checksum = 0
        self._ends: dict[ConsumeQueue, int] = {}

    def start(self, queues: Iterable[ConsumeQueue], physical_offset: int) -> None:
        """Begin with a record, while nothing is appended."""
        self.offset = physical_offset
        for queue in queues:
            self._set(queue, queue.find_physical(physical_offset))

    def move(self, queues: Iterable[ConsumeQueue], physical_offset: int) -> None:
        """Continue to a later record; all entries of records before it are on disk."""
        self.offset = physical_offset
        for queue in queues:
            known = self._ends.get(queue, 0)
            if known != queue.flushed_offset:
                self._set(queue, queue.first_at_or_after(physical_offset, known))

    def forget(self, queues: Iterable[ConsumeQueue]) -> None:
        """Leave out deleted queues."""
        for queue in queues:
            self.checksum -= checksum(queue, self._ends.pop(queue, 0))

    def _set(self, queue: ConsumeQueue, end: int) -> None:
        self.checksum += checksum(queue, end) - checksum(queue, self._ends.get(queue, 0))
        self._ends[queue] = end
