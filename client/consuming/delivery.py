"""Between the pulls and the user's loop: what is ready, what is out, and what comes again.

A pulled message is *ready* until the loop takes it, then *out* until it is acked or given back.
Taking happens in one step without a pause, so a cancelled loop never loses a message: it was
either handed over or is still ready. A message that stays out longer than the ack timeout counts
as given back. Whoever gives back tries the broker first, which delivers the message to the group
again after a delay; if the broker does not take it, it becomes ready here again.

All memory is bounded: pulls pause while a queue has too many unfinished messages, spans too many
offsets, or all queues together hold too many bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from typing import Final

from halfmq.store.format.record import Record

from ..config import ClientConfig
from ..message import MessageView
from ..net.loop_binding import LoopBinding
from .window import QueueWindow

logger = logging.getLogger(__name__)

# The broker's delay levels, for messages that it does not take back.
# Source: RocketMQ MessageStoreConfig.messageDelayLevel.
DELAY_SECONDS: Final = (
    1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200,
)  # fmt: skip
GIVE_BACKS_MAX: Final = 32
"""Overdue messages given back to brokers at one time."""


class Delivery:
    """One pulled message, through all its deliveries by this consumer."""

    __slots__ = ("_buffer", "attempts", "record", "window")

    def __init__(self, buffer: DeliveryBuffer, window: QueueWindow, record: Record) -> None:
        self._buffer = buffer
        self.window = window
        self.record = record
        self.attempts = 0
        """How often this consumer has handed it out."""

    @property
    def pending(self) -> bool:
        """Whether it still waits for an ack that counts."""
        return self.window.active and self.record.queue_offset in self.window

    def acknowledge(self) -> bool:
        """Count the message as dealt with; False when it came too late."""
        self._buffer.binding.check()
        return self._buffer.finish(self)

    async def give_back(self, delay_level: int) -> None:
        """Have the message delivered again later."""
        self._buffer.binding.check()
        await self._buffer.give_back(self, delay_level)


class DeliveryBuffer:
    """Holds what a consumer has pulled; see the module's text.

    ``send_back`` asks the broker to deliver a message again and tells whether it will.
    """

    def __init__(
        self,
        config: ClientConfig,
        ack_timeout: float | None,
        send_back: Callable[[Delivery, int], Awaitable[bool]],
    ) -> None:
        self._config = config
        self._ack_timeout = ack_timeout
        self._send_back = send_back
        self._loop = asyncio.get_running_loop()
        self.binding = LoopBinding("the consumer")
        self._ready: deque[Delivery] = deque()
        self._takers: deque[asyncio.Future[None]] = deque()
        self._out: OrderedDict[Delivery, float] = OrderedDict()  # deadlines, the earliest first
        self._timer: asyncio.TimerHandle | None = None
        self._again: set[asyncio.TimerHandle] = set()
        self._giving_back: set[asyncio.Task[None]] = set()
        self._turns = asyncio.Semaphore(GIVE_BACKS_MAX)
        self._bytes = 0
        self._room = asyncio.Event()
        self._closed = False
        self._failure: Exception | None = None

    # -- the pulling side

    async def wait_for_room(self, window: QueueWindow) -> None:
        """Return when this queue may be pulled."""
        while not self._has_room(window):
            self._room.clear()
            await self._room.wait()

    def offer(self, window: QueueWindow, record: Record) -> None:
        """Take in a pulled message; one that the window has seen already is ignored."""
        if window.active and window.add(record.queue_offset, record.total_size):
            self._bytes += record.total_size
            self._make_ready(Delivery(self, window, record))

    def drop(self, window: QueueWindow) -> None:
        """Forget the messages of a queue that is no longer ours."""
        self._bytes -= window.drop()
        self._ready = deque(delivery for delivery in self._ready if delivery.pending)
        for delivery in [delivery for delivery in self._out if not delivery.pending]:
            del self._out[delivery]
        self._room.set()

    # -- the user's side

    async def take(self) -> MessageView | None:
        """The next message, waited for; None once the buffer is closed.

        Raises what ``fail`` was given last.
        """
        while True:
            if self._closed:
                return None
            if self._failure is not None:
                raise self._failure.with_traceback(None)  # it may be raised many times
            message = self._take_ready()
            if message is not None:
                return message
            turn = self._loop.create_future()
            self._takers.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn in self._takers:
                    self._takers.remove(turn)
                elif self._ready:
                    self._wake_taker()  # the turn was ours; pass it on
                raise

    def finish(self, delivery: Delivery) -> bool:
        """The message is dealt with, or in the broker's hands again."""
        self._out.pop(delivery, None)
        size = delivery.window.finish(delivery.record.queue_offset)
        if size is None:
            return False
        self._bytes -= size
        if not self._room.is_set():
            self._room.set()
        return True

    async def give_back(self, delivery: Delivery, delay_level: int) -> None:
        """Have the message delivered again after the delay, by the broker or else by us."""
        self._out.pop(delivery, None)  # no second time because of the ack timeout
        if not delivery.pending:
            return
        try:
            taken = await self._send_back(delivery, delay_level)
        except BaseException:  # cancelled: the broker may have it or not; better twice than never
            self._make_ready_later(delivery, self._config.retry_delay)
            raise
        if taken:
            self.finish(delivery)
            return
        seconds = (
            DELAY_SECONDS[min(delay_level, len(DELAY_SECONDS)) - 1]
            if delay_level > 0
            else self._config.retry_delay
        )
        self._make_ready_later(delivery, seconds)

    def fail(self, failure: Exception | None) -> None:
        """Have ``take`` raise this from now on, also where it waits; None: no longer."""
        self._failure = failure
        if failure is not None:
            while self._takers:
                self._wake_taker()

    async def close(self) -> None:
        """End all waiting; what is not acked stays unfinished in its window."""
        self._closed = True
        for handle in (self._timer, *self._again):
            if handle is not None:
                handle.cancel()
        for task in self._giving_back:
            task.cancel()
        while self._takers:
            self._wake_taker()
        self._room.set()
        if self._giving_back:
            await asyncio.wait(self._giving_back)

    # -- inside

    def _has_room(self, window: QueueWindow) -> bool:
        config = self._config
        return (
            len(window) < config.cached_messages_max
            and window.span < config.cached_span_max
            and self._bytes < config.cached_bytes_max
        )

    def _make_ready(self, delivery: Delivery) -> None:
        self._ready.append(delivery)
        if self._takers:
            self._wake_taker()

    def _make_ready_later(self, delivery: Delivery, seconds: float) -> None:
        if self._closed:
            return

        def ready() -> None:
            self._again.discard(handle)
            if delivery.pending:
                self._make_ready(delivery)

        handle = self._loop.call_later(seconds, ready)
        self._again.add(handle)

    def _wake_taker(self) -> None:
        while self._takers:
            turn = self._takers.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def _take_ready(self) -> MessageView | None:
        while self._ready:
            delivery = self._ready.popleft()
            if delivery.pending:  # else acked late, after an earlier delivery
                return self._hand_out(delivery)
        return None

    def _hand_out(self, delivery: Delivery) -> MessageView:
        if self._ack_timeout is not None:
            self._out[delivery] = self._loop.time() + self._ack_timeout
            if self._timer is None:
                self._timer = self._loop.call_later(self._ack_timeout, self._end_overdue)
        broker_name = delivery.window.queue.broker_name
        earlier = delivery.attempts
        delivery.attempts += 1
        return MessageView(delivery.record, broker_name, delivery, earlier_attempts=earlier)

    def _end_overdue(self) -> None:
        """Give back what has been out too long, and look again when the next one is due."""
        self._timer = None
        now = self._loop.time()
        while self._out:
            delivery, deadline = next(iter(self._out.items()))
            if deadline > now:
                self._timer = self._loop.call_at(deadline, self._end_overdue)
                return
            del self._out[delivery]
            task = self._loop.create_task(self._give_back_overdue(delivery))
            self._giving_back.add(task)
            task.add_done_callback(self._giving_back.discard)

    async def _give_back_overdue(self, delivery: Delivery) -> None:
        async with self._turns:
            logger.warning(
                "event=ack_overdue queue=%s offset=%d seconds=%s",
                delivery.window.queue,
                delivery.record.queue_offset,
                self._ack_timeout,
            )
            if not delivery.pending:
                return
            if await self._send_back(delivery, 0):
                self.finish(delivery)
            elif delivery.pending:
                self._make_ready(delivery)  # it has waited long enough
