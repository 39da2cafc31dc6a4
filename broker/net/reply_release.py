"""Replies: when they are written, and what happens while the disk is too slow for them.

If a slave has to confirm the log, *durable* and *on disk* here mean both: flushed and confirmed.

A reply that need not wait for the disk is written at the end of the pass of the event loop, after
all readable sockets were served. A written reply wakes its receiver, and the scheduler may run the
receiver at once instead of this loop; so the replies to all peers are written together, joined per
connection.

A reply about an append waits until the log is on disk. A flush is requested once per pass, so that
one fdatasync covers all its requests; while it runs, the next group accumulates. When it returns,
every reply up to the durable position is written, joined per connection.

If the disk is too slow, the broker reacts in three steps. First it stops reading from peers: most
bursts last a fraction of a second, and no client notices. But decisions, which reduce the load, may
wait in the same sockets. So if the overload lasts, peers are read again, and their requests are
refused, except for decisions. When decisions alone have filled the second limit, nothing is read
until the disk has caught up. No decision is dropped in any step.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from halfmq.remoting.codes import FLAG_ONE_WAY, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.framing import FrameDecoder
from halfmq.remoting.replies import encode_reply
from halfmq.store.message_store import MessageStore

from ..disk.send_refusal import SendRefusal
from ..limits.kept import UNFLUSHED_BYTES, Kept
from ..ports import Connection

logger = logging.getLogger(__name__)

UNFLUSHED_DECISIONS_MAX: Final = 128 << 20
"""Bytes of log that may wait for the disk while only decisions are accepted: twice as many, since a
commit is as long as its half."""

STALLED_S_MAX: Final = 1.0
"""Seconds for which peers are not read before messages are refused instead. A client waits three
seconds for an answer; by then the refusal has to arrive and the request to be repeated."""

CAUSE: Final = "disk_behind"

PEERS_PER_TURN: Final = 64
"""Connections written to in one pass of the loop, which takes one or two milliseconds. The others
follow in the next passes, between which the first ones may send again."""

READY_BYTES_MAX: Final = 1 << 20
"""Bytes of replies kept for the end of a pass; if there are more, they are written at once. A busy
broker has fewer in one pass; the limit bounds memory for a peer that does not read."""


LARGE_GROUP: Final = 32
"""Records of a group for which a flush is requested at once, instead of at the end of the loop's
pass: during its flush the next group is processed."""


class ReplyRelease:
    """Writes replies together, when the commit log is durable up to their position."""

    def __init__(
        self,
        log: MessageStore,
        refusal: SendRefusal | None = None,
        *,
        on_released: Callable[[], None] = lambda: None,
    ) -> None:
        """Wire it.

        ``refusal`` is set while messages are refused. ``on_released`` is called after each release.
        """
        self._log = log
        self._refusal = refusal or SendRefusal()
        self._end_of_pass_scheduled = False
        self._before_replies: list[Callable[[], None]] = []  # called at the end of this pass
        self._ready: dict[Connection, list[bytes]] = {}  # to be written at the end of this pass
        self._ready_bytes = 0
        self._waiting: deque[tuple[int, Connection, bytes]] = deque()
        self._stalled: list[Callable[[], None]] = []
        self._flush_scheduled = False
        self._has_more = False  # whether durable replies are left for the next pass
        self._on_released = on_released
        self._idle_futures: list[asyncio.Future[None]] = []
        self._failure: str | None = None  # why no reply can wait for the disk any more
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self.refusing = False
        """Whether messages and halves are refused because the disk has been too slow for long."""

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the event loop of the connections; before this no reply can wait."""
        self._loop = loop

    def respond(
        self, connection: Connection, request: RemotingCommand, reply: bytes, durable_at: int = 0
    ) -> None:
        """Answer a request; see `ports.Connection.respond`."""
        waits = durable_at and durable_at > self._log.durable_offset
        if waits and self._failure is not None:
            reply, waits = _refused(reply, self._failure), False
        if waits:
            if not request.flag & FLAG_ONE_WAY:
                self._waiting.append((durable_at, connection, reply))
            self.request_flush()
        elif not (request.flag & FLAG_ONE_WAY or connection.closed):
            self._ready_bytes += len(reply)
            replies = self._ready.get(connection)
            if replies is None:
                self._ready[connection] = [reply]
                self._schedule_end_of_pass()
            else:
                replies.append(reply)
            if self._ready_bytes > READY_BYTES_MAX:
                self.write_ready()

    def before_replies(self, work: Callable[[], None]) -> None:
        """Call `work` at the end of this pass, before its replies are written."""
        self._before_replies.append(work)
        self._schedule_end_of_pass()

    def request_flush(self) -> None:
        """Request a flush of the log in the next pass.

        By then the sockets that are readable now were served, so it covers their requests too.
        """
        if not self._flush_scheduled and self._loop is not None:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _schedule_end_of_pass(self) -> None:
        if not self._end_of_pass_scheduled and self._loop is not None:
            self._end_of_pass_scheduled = True
            self._loop.call_soon(self._end_pass)

    def _end_pass(self) -> None:
        """Run the work that was left to the end of this pass, then write its replies.

        One callback does both: a second one would cost the loop another poll of its sockets.
        """
        work, self._before_replies = self._before_replies, []
        try:
            for call in work:
                call()
        finally:
            self._end_of_pass_scheduled = False
        self.write_ready()

    def write_ready(self) -> None:
        """Write the replies that were kept for the end of this pass, if there are any."""
        ready, self._ready, self._ready_bytes = self._ready, {}, 0
        _write(ready)

    def over_limit(self) -> bool:
        """Return whether too much waits for the disk to read more from the network."""
        limit = UNFLUSHED_DECISIONS_MAX if self.refusing else UNFLUSHED_BYTES.most
        return self._log.write_offset - self._log.durable_offset > limit

    def stall(self, resume: Callable[[], None]) -> None:
        """Call `resume` when the disk has caught up, or when messages are refused."""
        self._stalled.append(resume)
        if self._stall_timer is None and not self.refusing and self._loop is not None:
            self._stall_timer = self._loop.call_later(STALLED_S_MAX, self._refuse)

    def _refuse(self) -> None:
        self._stall_timer = None
        if self.over_limit():
            waiting = self._log.write_offset - self._log.durable_offset
            reason = (
                f"[OVERLOAD]{waiting} bytes wait for the disk, which has been too slow for more "
                f"than {STALLED_S_MAX:g} s: try again later, send less, or use a faster disk"
            )
            self.refusing = True
            self._refusal.begin(CAUSE, ResponseCode.SYSTEM_BUSY, reason)
            logger.warning("event=overload refusal=%r", reason)
            self._resume_stalled()

    def _resume_stalled(self) -> None:
        stalled, self._stalled = self._stalled, []
        for resume in stalled:
            resume()

    def _caught_up(self) -> None:
        """Accept messages again as soon as half of the limit is free."""
        if self.refusing:
            waiting = self._log.write_offset - self._log.durable_offset
            if waiting <= UNFLUSHED_BYTES.most // 2:
                self.refusing = False
                self._refusal.end(CAUSE)
                logger.warning("event=overload_over bytes_waiting=%d", waiting)
        if self._stalled and not self.over_limit():
            if self._stall_timer is not None:
                self._stall_timer.cancel()
                self._stall_timer = None
            self._resume_stalled()

    @property
    def idle(self) -> bool:
        return not self._waiting

    def notify_when_idle(self, future: asyncio.Future[None]) -> None:
        """Complete `future` as soon as no reply is waiting."""
        if self.idle:
            future.set_result(None)
        else:
            self._idle_futures.append(future)

    def _flush(self) -> None:
        self._flush_scheduled = False
        self._log.request_flush()
        # A reply that was queued after its flush had ended is released here only.
        if self._waiting and self._waiting[0][0] <= self._log.durable_offset:
            self.release()

    def _release_more(self) -> None:
        self._has_more = False
        self.release()

    def durable_from_thread(self) -> None:
        """Release replies after a flush; called on the flush thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.release)

    def fail_from_thread(self, reason: str) -> None:
        """Refuse what waits for the disk, because it was lost; any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._fail, reason)

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self.release()
        durable = self._log.durable_offset
        waiting, self._waiting = self._waiting, deque()
        for durable_at, connection, reply in waiting:
            connection.write(reply if durable_at <= durable else _refused(reply, reason))
        self.release()  # nothing waits: a stop may go on

    def release(self) -> None:
        """Write every reply whose position is durable; call it on the event loop.

        Replies to many peers are written in several passes.
        """
        if self._has_more:
            return  # the next pass continues
        durable = self._log.durable_offset
        waiting = self._waiting
        ready: dict[Connection, list[bytes]] = {}
        while waiting and waiting[0][0] <= durable and len(ready) < PEERS_PER_TURN:
            _, connection, reply = waiting.popleft()
            replies = ready.get(connection)
            if replies is None:
                ready[connection] = [reply]
            else:
                replies.append(reply)
        _write(ready)
        if self._stalled or self.refusing:
            self._caught_up()
        if waiting and waiting[0][0] <= durable and self._loop is not None:
            self._has_more = True
            self._loop.call_soon(self._release_more)
        elif waiting:
            self.request_flush()
        elif self._idle_futures:
            idle, self._idle_futures = self._idle_futures, []
            for future in idle:
                if not future.done():
                    future.set_result(None)
        self._on_released()

    def kept(self) -> Kept:
        return {UNFLUSHED_BYTES: self._log.write_offset - self._log.durable_offset}


def _refused(reply: bytes, reason: str) -> bytes:
    """Return the refusal of a request instead of its answer."""
    (answer,) = FrameDecoder(responses_first=True).receive_data(reply)
    return encode_reply(answer, ResponseCode.SERVICE_NOT_AVAILABLE, header={}, remark=reason)


def _write(ready: Mapping[Connection, Sequence[bytes]]) -> None:
    for connection, replies in ready.items():
        connection.write(replies[0] if len(replies) == 1 else b"".join(replies))
