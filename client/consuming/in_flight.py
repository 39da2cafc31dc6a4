"""The in-flight window of a queue: messages pulled but not yet acknowledged.

Messages are pulled in queue order but may be acknowledged in any order. The broker keeps one offset
per group and queue: everything below it counts as consumed. So the offset to commit is that of the
first unacknowledged message, and after a crash the acknowledged messages above it are redelivered.
"""

from __future__ import annotations

import time
from collections import OrderedDict

from ..message import MessageQueue


class InFlightWindow:
    """The unacknowledged messages of one assigned queue, in queue order."""

    __slots__ = (
        "_added",
        "_unacked",
        "acknowledged_at",
        "active",
        "bytes",
        "committed",
        "end",
        "next_offset",
        "pulled_at",
        "queue",
    )

    def __init__(self, queue: MessageQueue, start: int, committed: int | None) -> None:
        self.queue = queue
        self.next_offset = start
        """The queue offset of the next pull."""
        self.committed = committed
        """The last offset known to be committed for the group; None if there is none."""
        self.active = True
        """False once the queue is revoked: acknowledgements no longer count."""
        self.end = start
        """The queue offset of the next message to be stored, at the last pull."""
        self.bytes = 0
        """Size of all unacknowledged records."""
        self.pulled_at = 0.0
        """Time of the last pull, in seconds since 1970; 0: none yet."""
        self.acknowledged_at = 0.0
        """Time of the last acknowledgement."""
        self._added = 0  # messages so far
        # By queue offset: size, and number of messages added before. An ordered dict finds its
        # first key at once; a plain dict scans over deleted entries.
        self._unacked: OrderedDict[int, tuple[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._unacked)

    def __contains__(self, queue_offset: int) -> bool:
        return queue_offset in self._unacked

    @property
    def commit_offset(self) -> int:
        """The offset of the first unacknowledged message, where another consumer would resume."""
        return next(iter(self._unacked)) if self._unacked else self.next_offset

    @property
    def lag(self) -> int:
        """Messages that were stored at the last pull, and are not acknowledged."""
        return max(0, self.end - self.commit_offset)

    @property
    def span(self) -> int:
        """Messages from the first unacknowledged one on, acknowledged or not.

        Messages that the filter leaves out do not count: they are never delivered.
        """
        if not self._unacked:
            return 0
        _, earlier = next(iter(self._unacked.values()))
        return self._added - earlier

    def add(self, queue_offset: int, size: int) -> bool:
        """Add a pulled message; return False if it is older than the requested offset."""
        if queue_offset < self.next_offset:
            return False
        self._unacked[queue_offset] = size, self._added
        self._added += 1
        self.next_offset = queue_offset + 1
        self.bytes += size
        return True

    def skip_to(self, next_offset: int) -> None:
        """Continue at ``next_offset``; the messages before it are filtered out or deleted."""
        self.next_offset = max(self.next_offset, next_offset)

    def acknowledge(self, queue_offset: int) -> int | None:
        """Remove a message and return its size; None if it is not in the window any more."""
        found = self._unacked.pop(queue_offset, None) if self.active else None
        if found is None:
            return None
        size, _ = found
        self.bytes -= size
        self.acknowledged_at = time.time()
        return size

    def drop(self) -> int:
        """Deactivate the window after the queue was revoked; return the number of freed bytes.

        The commit offset stays.
        """
        commit_offset = self.commit_offset
        freed = self.bytes
        self.active = False
        self._unacked.clear()
        self.bytes = 0
        self.next_offset = commit_offset
        return freed
