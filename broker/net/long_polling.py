"""Pulls that wait for a message.

Pulls are kept per topic and queue. An append only tests whether a pull waits for its queue, and
then marks the queue with the end of the log. Marked queues are searched after each flush
(SYNC_FLUSH), or after the pass of the loop that appended (ASYNC_FLUSH).

Under SYNC_FLUSH a message is appended some time before it can be read. A mark therefore stays until
the log is readable up to it, because the next flush may have begun before the append. A pull that
arrives in between finds nothing, and the append did not find the pull; so such a pull marks its
queue itself.

Thousands of consumers may wait for one message, and thousands of pulls may time out together. So
pulls are answered in slices. Those not processed yet stay in the table that appends test, in front
of those that continue to wait.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec

from halfmq.remoting.codes import ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.store.message_store import MessageStore

from ..errors import RequestRefusedError
from ..filters.compiled_filter import CompiledFilter
from ..limits.budget import Budget
from ..limits.kept import HELD_PULL_BYTES, Kept, Limit
from ..loop.slices import Slice
from ..ports import Connection

QueueKey = tuple[str, int]

Wanted = frozenset[int] | CompiledFilter | None
"""What a pull selects: messages whose tag has one of these hashes, or that match a filter. None
selects all messages."""

HELD_SIZE: Final = 256
"""Bytes of a held pull without its texts and what is kept of it as received."""

TAG_SIZE: Final = 64
"""Bytes of a hash in a set of them."""

GROUP_SHARE: Final = 2
"""One group may hold one of so many parts of all pulls: its consumers have one for each queue."""

SWEEP_S: Final = 0.5
"""Seconds between two scans for timed-out pulls: an answer is at most this late. RocketMQ's broker
is up to 5 s late."""


class HeldPull(msgspec.Struct, gc=False):
    """A pull that found nothing; no connection refers to its pulls."""

    key: QueueKey
    command: RemotingCommand
    connection: Connection
    deadline: float  # loop time, seconds
    next_offset: int  # of the queue, where the search continues: earlier entries do not match
    wanted: Wanted
    searched_until: int  # the log's readable offset before the search for messages
    group: str
    size: int  # bytes


Answer = Callable[[HeldPull, bool], bytes | None]
"""`(held, timed_out)` → the reply, or None to keep holding; never None after a time-out."""


class LongPolling:
    """Holds waiting pulls and answers them when a message arrives or they time out."""

    def __init__(self, limit: Limit = HELD_PULL_BYTES) -> None:
        self._limit = limit
        self.waiting: dict[QueueKey, deque[HeldPull]] = {}  # read by the append path
        self._count = 0
        self._budget = Budget(self._limit)
        self._of_group: dict[str, int] = {}  # bytes
        self._arrived: dict[QueueKey, int] = {}  # marked queues: search until this is readable
        self._woken: dict[QueueKey, int] = {}  # marked queues to be searched now
        self._to_sweep: list[QueueKey] = []  # queues whose deadlines are to be tested
        self._search: Iterator[None] | None = None  # in progress; there is only one
        self._slice_scheduled = False  # whether the next slice of the search is scheduled
        self._wake_scheduled = False
        self._answer: Answer | None = None
        self._log: MessageStore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sweep_handle: asyncio.TimerHandle | None = None

    def answer_by(self, answer: Answer, log: MessageStore) -> None:
        """Set the log, and the function of the pull handler that answers held pulls."""
        self._answer = answer
        self._log = log

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._sweep_handle = self._loop.call_later(SWEEP_S, self._sweep)

    async def stop(self) -> None:
        """Drop all pulls; their connections are closed."""
        if self._sweep_handle is not None:
            self._sweep_handle.cancel()
        self._search = None
        for state in (self.waiting, self._arrived, self._woken, self._to_sweep):
            state.clear()
        self._count = 0
        self._budget = Budget(self._limit)
        self._of_group.clear()

    @property
    def count(self) -> int:
        """Number of pulls held now."""
        return self._count

    @property
    def bytes(self) -> int:
        return self._budget.used

    def hold(self, held: HeldPull) -> None:
        """Hold a pull until a message arrives or its time is over.

        Raises:
            RequestRefusedError: Its connection or its group holds too many.
        """
        connection, limit = held.connection, self._limit
        of_connection = self._budget.held(connection) + held.size
        if of_connection > limit.of_connection:
            raise _too_many("this connection", of_connection, limit.of_connection)
        of_group = self._of_group.get(held.group, 0) + held.size
        if of_group > limit.most // GROUP_SHARE:
            raise _too_many("this group", of_group, limit.most // GROUP_SHARE)
        queue = self.waiting.setdefault(held.key, deque())
        if queue:
            held.key = queue[0].key  # one tuple for all: a tenth of their memory
        queue.append(held)
        self._count += 1
        self._of_group[held.group] = of_group
        self._budget.hold(connection, of_connection)
        assert self._log is not None
        end = self._log.write_offset
        if end > held.searched_until:
            self._arrived[held.key] = end

    def _release(self, held: HeldPull) -> None:
        self._count -= 1
        # A connection that the budget has ended holds nothing there.
        self._budget.hold(held.connection, max(self._budget.held(held.connection) - held.size, 0))
        left = self._of_group.pop(held.group) - held.size
        if left:
            self._of_group[held.group] = left

    def mark_arrivals(self, queues: Iterable[QueueKey]) -> None:
        """Mark the queues, of those with new messages, for which pulls wait."""
        assert self._log is not None
        waiting, end = self.waiting, self._log.write_offset
        self._arrived.update([(key, end) for key in queues if key in waiting])

    def wake(self) -> None:
        """Search for messages for the pulls of marked queues, in slices."""
        if self._arrived:
            self._woken.update(self._arrived)
            self._arrived.clear()
        if self._woken:
            self._run_slice()

    def search_again(self, queues: Iterable[QueueKey]) -> None:
        """Search again for the pulls of these queues, although no message has arrived."""
        for key in queues:
            if key in self.waiting:
                self._woken.setdefault(key, 0)
        if self._woken:
            self._run_slice()

    def wake_soon(self) -> None:
        """Call `wake` after this pass of the loop, if a queue is marked."""
        if self._arrived and not self._wake_scheduled and self._loop is not None:
            self._wake_scheduled = True
            self._loop.call_soon(self._scheduled_wake)

    def _scheduled_wake(self) -> None:
        self._wake_scheduled = False
        self.wake()

    def _sweep(self) -> None:
        assert self._loop is not None
        if not self._to_sweep:
            self._to_sweep = list(self.waiting)
            self._run_slice()
        self._sweep_handle = self._loop.call_later(SWEEP_S, self._sweep)

    def _run_slice(self) -> None:
        if self._search is None:
            self._search = self._search_queues()
        if Slice().advance(self._search):
            self._search = None
        elif not self._slice_scheduled and self._loop is not None:
            self._slice_scheduled = True
            self._loop.call_soon(self._scheduled_slice)

    def _scheduled_slice(self) -> None:
        self._slice_scheduled = False
        if self._search is not None:
            self._run_slice()

    def _search_queues(self) -> Iterator[None]:
        """Process one queue after the other, those with new messages first."""
        while self._woken or self._to_sweep:
            woken, self._woken = self._woken, {}
            for key, end in woken.items():
                yield from self._search_messages(key, end)
            if self._to_sweep and not self._woken:
                yield from self._answer_pulls(self._to_sweep.pop(), is_sweep=True)

    def _search_messages(self, key: QueueKey, end: int) -> Iterator[None]:
        assert self._log is not None
        readable = self._log.readable_offset  # before the search
        yield from self._answer_pulls(key, is_sweep=False)
        if end > readable and key in self.waiting:
            # A wake during the search did not include this queue, so it is searched again; if
            # there was none, a wake follows.
            has_advanced = self._log.readable_offset > readable
            marks = self._woken if has_advanced else self._arrived
            marks[key] = max(end, marks.get(key, 0))

    def _answer_pulls(self, key: QueueKey, *, is_sweep: bool) -> Iterator[None]:
        """Answer the pulls of a queue that match a message or, in a sweep, that are overdue."""
        assert self._answer is not None
        waiters = self.waiting.get(key)
        if waiters is None:
            return
        for _ in range(len(waiters)):
            held = waiters.popleft()
            timed_out = is_sweep and self._is_overdue(held)
            reply = None
            if not held.connection.closed:
                reply = self._answer(held, timed_out) if timed_out or not is_sweep else None
                if reply is None:
                    waiters.append(held)
                    yield
                    continue
            self._release(held)
            if reply is not None:
                held.connection.respond(held.command, reply)
            yield
        if not waiters:
            del self.waiting[key]

    def _is_overdue(self, held: HeldPull) -> bool:
        return self._loop is not None and held.deadline <= self._loop.time()

    def kept(self) -> Kept:
        return {self._limit: self._budget.used}


def size_of(request: RemotingCommand, wanted: Wanted, kept: RemotingCommand | None = None) -> int:
    """Return the bytes that a waiting pull takes; ``kept`` is what waits, if not all of it."""
    kept = kept or request
    size = HELD_SIZE + len(request.raw_header) + len(kept.raw_header) + len(kept.body)
    if isinstance(wanted, CompiledFilter):
        return size + wanted.own_size
    return size if wanted is None else size + TAG_SIZE * len(wanted)


def _too_many(whose: str, size: int, limit: int) -> RequestRefusedError:
    return RequestRefusedError(
        f"{whose} has pulls that wait for messages with {size} bytes, the limit is {limit}: "
        "pull fewer queues at once",
        ResponseCode.SYSTEM_BUSY,
    )
