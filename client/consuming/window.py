"""What of one queue is in the hands of a consumer, and how far its offset may be committed.

Messages are pulled in queue order but may be acked in any order. The broker keeps one offset per
group and queue: everything below it counts as consumed. So the offset may only move over a run of
finished messages without a gap; one unacked message holds it back, and what was acked behind that
one is delivered again after a crash.
"""

from __future__ import annotations

from collections import OrderedDict

from ..message import MessageQueue


class QueueWindow:
    """The unfinished messages of one assigned queue, in queue order."""

    __slots__ = ("_unfinished", "active", "bytes", "committed", "next_offset", "queue")

    def __init__(self, queue: MessageQueue, start: int, committed: int | None) -> None:
        self.queue = queue
        self.next_offset = start
        """The queue offset the next pull asks for."""
        self.committed = committed
        """The offset stored for the group, as far as known; None: none."""
        self.active = True
        """False once the queue belongs to another consumer: acks no longer count."""
        self.bytes = 0
        """Size of all unfinished records."""
        # An ordered dict finds its first key at once; a plain dict walks over what was deleted.
        self._unfinished: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._unfinished)

    def __contains__(self, queue_offset: int) -> bool:
        return queue_offset in self._unfinished

    @property
    def commit_offset(self) -> int:
        """The first offset that is not finished: where another consumer would go on."""
        return next(iter(self._unfinished)) if self._unfinished else self.next_offset

    @property
    def span(self) -> int:
        """Offsets from the first unfinished message to the next pull."""
        return self.next_offset - self.commit_offset

    @property
    def uncommitted(self) -> bool:
        """Whether ``commit_offset`` should be told to the broker."""
        return self.commit_offset != self.committed

    def add(self, queue_offset: int, size: int) -> bool:
        """Take in a pulled message; False when it is older than what was asked for."""
        if queue_offset < self.next_offset:
            return False
        self._unfinished[queue_offset] = size
        self.next_offset = queue_offset + 1
        self.bytes += size
        return True

    def skip_to(self, next_offset: int) -> None:
        """Go on at ``next_offset``: what lies before it is filtered out or deleted."""
        self.next_offset = max(self.next_offset, next_offset)

    def finish(self, queue_offset: int) -> int | None:
        """Mark a message as dealt with; its size, or None when it no longer counts here."""
        size = self._unfinished.pop(queue_offset, None) if self.active else None
        if size is not None:
            self.bytes -= size
        return size

    def drop(self) -> int:
        """Give the queue up; returns the bytes that were held. The commit offset stays."""
        commit_offset = self.commit_offset
        held = self.bytes
        self.active = False
        self._unfinished.clear()
        self.bytes = 0
        self.next_offset = commit_offset
        return held
