"""The delivery buffer between pulling and the user's loop: delivery, acknowledgement, redelivery.

A pulled message is *ready* until the loop takes it, then *unacknowledged* until it is acknowledged
or redelivered. Taking a message never awaits, so a cancelled loop loses none: the message was
delivered or is still ready. A message that exceeds the ack timeout, and was not extended, is
redelivered. Redelivery sends the message back to the broker, which delivers it to the group again
after a delay; if the broker does not accept it, it becomes ready in this buffer again. From the
request to the broker on an acknowledgement is too late, and is answered so.

Backpressure bounds memory: pulling pauses while a queue has too many unacknowledged messages, or
too many acknowledged ones after the first of them, or all queues together hold too many bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Final, TypeAlias, TypeVar

from halfmq.store.format.record import Record

from ..config import ClientConfig
from ..message import DELAY_SECONDS, MessageQueue, MessageView
from ..net.fork_safety import LoopBinding
from .in_flight import InFlightWindow

logger = logging.getLogger(__name__)

T = TypeVar("T")

SendReply: TypeAlias = "Callable[[Delivery, bytes, Mapping[str, str] | None], Awaitable[None]]"

ORDERED_RETRY: Final = 1.0
"""Seconds until an ordered message that failed comes again, as in official clients."""
SETTLE_INTERVAL: Final = 0.02
"""Seconds between two looks at a message in hand."""
REDELIVERIES_MAX: Final = 32
"""Overdue messages that are sent back to brokers at one time."""


ACK_OVERDUE: Final = (
    "not acknowledged within ack_timeout, so it is redelivered; a handler that needs longer calls "
    "message.extend(seconds), or its consumer has a longer ack_timeout"
)
CONSUMER_CLOSED: Final = (
    "the consumer is closed; call stop() first, and close() after the last ack()"
)
"""Reasons in the log, with the remedy."""


class Delivery:
    """One pulled message, with all its deliveries by this consumer."""

    __slots__ = (
        "_buffer",
        "attempts",
        "claim",
        "held",
        "reason",
        "record",
        "returning",
        "seconds",
        "taken_at",
        "window",
    )
    has_deadline = True
    """Whether the buffer redelivers it after the ack timeout, and threads may acknowledge it
    without waiting."""

    def __init__(self, buffer: DeliveryBuffer, window: InFlightWindow, record: Record) -> None:
        self._buffer = buffer
        self.window = window
        self.record = record
        self.attempts = 0
        """How often this consumer has delivered it."""
        self.held = False
        """Whether the user's loop has it: delivered, and not on its way to be redelivered."""
        self.reason = ""
        """Why it is redelivered; empty if unknown."""
        self.seconds: float | None = None
        """How many seconds later it is redelivered; None: by the delay level."""
        self.returning = False
        """Whether the broker was asked to redeliver it, and has not refused."""
        self.claim: list[None] | None = None
        """Empty once it is decided what becomes of it; None if it is not handed to a thread."""
        self.taken_at: float | None = None
        """When a thread took it that it was handed to, on the loop's clock."""

    @property
    def pending(self) -> bool:
        """Whether it is still in the in-flight window, waiting for an acknowledgement."""
        is_open = self.claim is None or len(self.claim) > 0
        return is_open and self.window.active and self.record.queue_offset in self.window

    def take_claim(self) -> bool:
        """Take the right to decide what becomes of it; return False if another thread has it."""
        try:
            return self.claim is not None and self.claim.pop() is None
        except IndexError:
            return False

    async def acknowledge(self) -> bool:
        """Acknowledge the message; return False if it is too late."""
        self._buffer.binding.check()
        return self._buffer.acknowledge(self)

    async def redeliver(self, delay_level: int, reason: str, seconds: float | None = None) -> None:
        """Redeliver the message after the delay, or with ``DEAD_LETTER_LEVEL`` never."""
        self._buffer.binding.check()
        self.reason, self.seconds = reason, seconds
        await self._buffer.redeliver(self, delay_level)

    async def extend(self, seconds: float) -> bool:
        """Do not redeliver the message within ``seconds``; return False if it is too late."""
        self._buffer.binding.check()
        return self._buffer.extend(self, seconds)

    def put_back(self) -> None:
        """Deliver the message again, before all others: nobody received it."""
        self._buffer.put_back(self)

    async def reply(self, body: bytes, properties: Mapping[str, str] | None) -> None:
        """Send the reply to a request."""
        self._buffer.binding.check()
        assert self._buffer.send_reply is not None, "a consumer's buffer has it"
        await self._buffer.send_reply(self, body, properties)


class DirectDelivery(Delivery):
    """A message that an operator has this consumer consume, outside of any queue's offset."""

    __slots__ = ("outcome",)
    has_deadline = False  # an operator waits for its outcome

    def __init__(self, buffer: DeliveryBuffer, window: InFlightWindow, record: Record) -> None:
        super().__init__(buffer, window, record)
        self.outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether it was acknowledged, or else returned; cancelled if nobody waits any more."""

    @property
    def pending(self) -> bool:
        return not self.outcome.done()

    async def acknowledge(self) -> bool:
        self._buffer.binding.check()
        return self._settle(acknowledged=True)

    async def redeliver(
        self, _delay_level: int, _reason: str, _seconds: float | None = None
    ) -> None:
        self._buffer.binding.check()
        self._settle(acknowledged=False)

    async def extend(self, _seconds: float) -> bool:
        return self.pending  # it is never redelivered

    def _settle(self, *, acknowledged: bool) -> bool:
        is_first = not self.outcome.done()
        if is_first:
            self.outcome.set_result(acknowledged)
        return is_first


class DeliveryBuffer:
    """The pulled messages of a consumer; see the module's docstring.

    ``send_back`` sends a message back to the broker and returns whether the broker will redeliver
    it.
    """

    def __init__(
        self,
        config: ClientConfig,
        ack_timeout: float | None,
        send_back: Callable[[Delivery, int], Awaitable[bool]],
        send_reply: SendReply | None = None,
        *,
        ordered: bool = False,
    ) -> None:
        self._config = config
        self._ordered = ordered
        self._lines: dict[
            InFlightWindow, deque[Delivery]
        ] = {}  # of a queue, the first is delivered
        self._paused: set[str | MessageQueue] = set()  # topics and queues
        self._shelved: deque[Delivery] = deque()  # of what is paused
        self.ack_timeout = ack_timeout
        """Seconds after which a message that a loop or thread has is redelivered; None: never."""
        self._send_back = send_back
        self.send_reply = send_reply
        """Sends a reply to a message that is a request."""
        self._loop = asyncio.get_running_loop()
        self.binding = LoopBinding("the consumer")
        self._ready: deque[Delivery] = deque()
        self._receivers: deque[asyncio.Future[None]] = deque()
        self._wanted = 0  # messages for which receivers wait
        self._more_wanted = asyncio.Event()
        self._unacked: OrderedDict[Delivery, float] = OrderedDict()  # deadlines, the earliest first
        self._extended: dict[Delivery, asyncio.TimerHandle] = {}  # each with its own deadline
        self._timer: asyncio.TimerHandle | None = None
        self._redelivery_timers: set[asyncio.TimerHandle] = set()
        self._redeliveries: set[asyncio.Task[None]] = set()
        self._redelivery_slots = asyncio.Semaphore(REDELIVERIES_MAX)
        self._bytes = 0
        self._capacity = asyncio.Event()
        self._stopped = asyncio.Event()
        self.closed = False
        """Whether acknowledgements count no more."""
        self._error: Exception | None = None

    # -- the pulling side

    async def wait_for_capacity(self, window: InFlightWindow) -> None:
        """Wait until this queue may be pulled."""
        while self.full(window):
            self._capacity.clear()
            await self._capacity.wait()

    def add(self, window: InFlightWindow, record: Record) -> None:
        """Add a pulled message; ignore one that the window has already seen."""
        if window.active and window.add(record.queue_offset, record.total_size):
            self._bytes += record.total_size
            delivery = Delivery(self, window, record)
            if not self._ordered or self._is_next(delivery):
                self._make_ready(delivery)

    @property
    def demand(self) -> int:
        """For how many messages receivers wait that are not here yet."""
        return 0 if self.stopped else self._wanted - len(self._ready)

    async def wait_for_demand(self) -> None:
        """Wait until a receiver waits for a message."""
        while self.demand <= 0:
            self._more_wanted.clear()
            await self._more_wanted.wait()

    def add_popped(self, deliveries: Iterable[Delivery]) -> None:
        """Add messages that the broker has given to this consumer alone."""
        for delivery in deliveries:
            self._make_ready(delivery)

    def take_all(self) -> list[Delivery]:
        """Remove and return all messages that no receiver has."""
        found = [*self._ready, *self._shelved]
        self._ready.clear()
        self._shelved.clear()
        return found

    def add_directly(self, queue: MessageQueue, record: Record) -> asyncio.Future[bool]:
        """Deliver a message before all others; the result is whether it was acknowledged."""
        delivery = DirectDelivery(self, InFlightWindow(queue, 0, None), record)

        def forget(outcome: asyncio.Future[bool]) -> None:
            if outcome.cancelled() and delivery in self._ready:
                self._ready.remove(delivery)

        delivery.outcome.add_done_callback(forget)
        self._ready.appendleft(delivery)
        self._wake_receiver()
        return delivery.outcome

    def drop(self, window: InFlightWindow) -> None:
        """Remove the messages of a revoked queue."""
        self._bytes -= window.drop()
        self._lines.pop(window, None)
        self._ready = deque(delivery for delivery in self._ready if delivery.pending)
        self._shelved = deque(delivery for delivery in self._shelved if delivery.pending)
        for delivery in (*self._unacked, *self._extended):
            if not delivery.pending:
                self._forget_deadline(delivery)
        self._capacity.set()

    async def settle(self, window: InFlightWindow, seconds: float) -> None:
        """Deliver no more messages of an ordered queue; wait until the one in hand is settled."""
        line = self._lines.get(window, deque())
        while len(line) > 1:
            line.pop()
        deadline = self._loop.time() + seconds
        while line and line[0].held and self._loop.time() < deadline:  # noqa: ASYNC110 -- rare
            await asyncio.sleep(SETTLE_INTERVAL)

    def pause(self, places: Collection[str | MessageQueue]) -> None:
        """Deliver no more messages of these topics and queues."""
        self._paused.update(places)

    def resume(self, places: Collection[str | MessageQueue] | None) -> None:
        """Deliver the messages of these topics and queues again; None: of all."""
        self._paused.difference_update(self._paused.copy() if places is None else places)
        self._ready.extendleft(reversed(self._shelved))
        self._shelved.clear()
        self._capacity.set()
        for _ in range(min(len(self._ready), len(self._receivers))):
            self._wake_receiver()

    # -- the user's side

    async def take(self) -> MessageView | None:
        """Wait for the next message and return it; None once the buffer is stopped.

        Raises the error set by ``set_error``, if any.
        """
        return await self.take_by(self.take_ready)

    async def take_by(self, take: Callable[[], T | None], wanted: int = 1) -> T | None:
        """Call ``take`` whenever messages may be ready, and return the first result but None.

        ``wanted`` says how many it can take. Otherwise as :meth:`take`.
        """
        while True:
            if self._stopped.is_set():
                return None
            if self._error is not None:
                raise self._error.with_traceback(None)  # it may be raised many times
            taken = take()
            if taken is not None:
                return taken
            turn = self._loop.create_future()
            self._receivers.append(turn)
            self._wanted += wanted
            self._more_wanted.set()
            try:
                await turn
            except asyncio.CancelledError:
                if turn in self._receivers:
                    self._receivers.remove(turn)
                elif self._ready:
                    self._wake_receiver()  # this one had been woken; wake the next one instead
                raise
            finally:
                self._wanted -= wanted

    def acknowledge(self, delivery: Delivery) -> bool:
        """Remove a message that was processed; return False if it is too late."""
        if delivery.returning:
            reason = "it was sent back, so it is redelivered"
        elif self.closed:
            reason = CONSUMER_CLOSED
        elif delivery.window.active:
            return self.remove(delivery)
        else:
            reason = "its queue has moved to another consumer, or was sent to another offset"
        log_late_ack(delivery.window.queue, delivery.record.queue_offset, reason)
        return False

    async def redeliver(self, delivery: Delivery, delay_level: int) -> None:
        """Redeliver the message after the delay, by the broker or else from this buffer."""
        seconds = (
            DELAY_SECONDS[min(delay_level, len(DELAY_SECONDS)) - 1]
            if delay_level > 0
            else min(ORDERED_RETRY, self._config.retry_delay)
            if self._ordered
            else self._config.retry_delay
        )
        if delivery.seconds is not None:
            seconds = delivery.seconds
        await self._return(delivery, delay_level, seconds)

    def extend(self, delivery: Delivery, seconds: float) -> bool:
        """Redeliver the message in ``seconds`` at the earliest; return False if it is too late."""
        if not (delivery.held and delivery.pending) or self.closed:
            return False
        if self.ack_timeout is not None:
            timer = self._extended.get(delivery)
            due = self._unacked.get(delivery, 0.0) if timer is None else timer.when()
            deadline = self._loop.time() + seconds
            if deadline > due:
                self._forget_deadline(delivery)
                self._extended[delivery] = self._loop.call_at(deadline, self._overdue, delivery)
        return True

    def put_back(self, delivery: Delivery) -> None:
        """Make a message that nobody received the next one."""
        if delivery.held and delivery.pending:
            self._forget_deadline(delivery)
            delivery.held, delivery.claim = False, None
            delivery.attempts -= 1
            self._ready.appendleft(delivery)
            self._wake_receiver()

    def stop(self) -> None:
        """Deliver no more messages, and end the calls that wait for one."""
        self._stopped.set()
        while self._receivers:
            self._wake_receiver()

    @property
    def stopped(self) -> bool:
        """Whether ``stop`` or ``close`` was called."""
        return self._stopped.is_set()

    async def wait_stopped(self) -> None:
        """Wait until ``stop`` or ``close`` is called."""
        await self._stopped.wait()

    def set_error(self, error: Exception | None) -> None:
        """Make ``take`` raise this error, also in calls that wait; None clears it."""
        self._error = error
        if error is not None:
            while self._receivers:
                self._wake_receiver()

    async def close(self) -> None:
        """End all waiting calls; unacknowledged messages stay in their windows."""
        self.closed = True
        self.stop()
        for handle in (self._timer, *self._redelivery_timers, *self._extended.values()):
            if handle is not None:
                handle.cancel()
        for task in self._redeliveries:
            task.cancel()
        self._capacity.set()
        if self._redeliveries:
            await asyncio.wait(self._redeliveries)

    # -- inside

    def full(self, window: InFlightWindow) -> str:
        """Return why this queue is not pulled, in words; empty: it is pulled."""
        config = self._config
        if self._is_paused(window.queue):
            return f"{window.queue} to be resumed"
        if len(window) >= config.cached_messages_max or window.span >= config.cached_span_max:
            return f"acknowledgements in {window.queue}: {len(window)} messages are in hand"
        if self._bytes >= config.cached_bytes_max:
            return f"acknowledgements: {self._bytes} bytes of messages are in hand"
        return ""

    def _is_paused(self, queue: MessageQueue) -> bool:
        return bool(self._paused) and (queue in self._paused or queue.topic in self._paused)

    def _is_next(self, delivery: Delivery) -> bool:
        """Put a message of an ordered queue in line; return whether it is the first."""
        line = self._lines.setdefault(delivery.window, deque())
        line.append(delivery)
        return len(line) == 1

    def _make_ready(self, delivery: Delivery) -> None:
        self._ready.append(delivery)
        if self._receivers:
            self._wake_receiver()

    def _make_ready_later(self, delivery: Delivery, seconds: float) -> None:
        if self.closed:
            return

        def ready() -> None:
            self._redelivery_timers.discard(handle)
            if delivery.pending:
                self._make_ready(delivery)

        handle = self._loop.call_later(seconds, ready)
        self._redelivery_timers.add(handle)

    def _wake_receiver(self) -> None:
        while self._receivers:
            turn = self._receivers.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def take_ready(self) -> MessageView | None:
        """Take the next message if one is ready; None otherwise."""
        delivery = self.pop_ready()
        if delivery is None:
            return None
        delivery.claim = None
        self.begin_deadline(delivery, self._loop.time())
        broker_name, earlier = delivery.window.queue.broker_name, delivery.attempts - 1
        return MessageView(delivery.record, broker_name, delivery, earlier_attempts=earlier)

    @property
    def has_ready(self) -> bool:
        """Whether messages are ready."""
        return bool(self._ready)

    def pop_ready(self) -> Delivery | None:
        """Take the next ready message, without an ack timeout yet; None if none is ready."""
        while self._ready:
            delivery = self._ready.popleft()
            if delivery.pending:  # otherwise acknowledged late, after an earlier delivery
                if self._is_paused(delivery.window.queue) and not isinstance(
                    delivery, DirectDelivery
                ):
                    self._shelved.append(delivery)
                    continue
                delivery.attempts += 1
                delivery.held = True
                return delivery
        return None

    def begin_deadline(self, delivery: Delivery, taken_at: float) -> None:
        """Have a message redelivered if it is not acknowledged within the ack timeout."""
        if self.ack_timeout is None or not delivery.has_deadline:
            return
        if delivery not in self._extended:
            self._unacked[delivery] = taken_at + self.ack_timeout
            if self._timer is None:
                self._timer = self._loop.call_later(self.ack_timeout, self._redeliver_overdue)

    def _redeliver_overdue(self) -> None:
        """Redeliver messages past their ack timeout, and schedule the next check."""
        self._timer = None
        now = self._loop.time()
        while self._unacked:
            delivery, deadline = next(iter(self._unacked.items()))
            if deadline > now:
                self._timer = self._loop.call_at(deadline, self._redeliver_overdue)
                return
            del self._unacked[delivery]
            self._overdue(delivery)

    def _overdue(self, delivery: Delivery) -> None:
        self._forget_deadline(delivery)
        task = self._loop.create_task(self._redeliver_overdue_one(delivery))
        self._redeliveries.add(task)
        task.add_done_callback(self._redeliveries.discard)

    async def _redeliver_overdue_one(self, delivery: Delivery) -> None:
        async with self._redelivery_slots:
            if not (delivery.held and delivery.pending) or delivery in self._extended:
                return  # settled or extended while it waited for its turn
            logger.warning(
                "event=ack_overdue queue=%s offset=%d attempt=%d ack_timeout=%s reason=%r",
                delivery.window.queue,
                delivery.record.queue_offset,
                delivery.record.reconsume_times + delivery.attempts,
                self.ack_timeout,
                ACK_OVERDUE,
            )
            delivery.reason, delivery.seconds = "not acknowledged within ack_timeout", None
            await self._return(delivery, 0, 0.0)  # here at once: it has waited long enough

    async def _return(self, delivery: Delivery, delay_level: int, seconds: float) -> None:
        """Have the broker redeliver a message; if it refuses, do it here after ``seconds``."""
        self._forget_deadline(delivery)
        if not delivery.pending or delivery.returning:
            return
        if delivery.claim is not None and not delivery.take_claim():
            return  # a thread was acknowledging it
        delivery.held, delivery.returning, delivery.claim = False, True, None
        try:
            taken = await self._send_back(delivery, delay_level)
        except BaseException:  # cancelled: whether the broker has it is unknown; deliver it again
            delivery.returning = False
            self._make_ready_later(delivery, self._config.retry_delay)
            raise
        if taken:
            self.remove(delivery)
        else:
            delivery.returning = False
            self._make_ready_later(delivery, seconds)

    def remove(self, delivery: Delivery) -> bool:
        """Remove a message from its window; return False if it is not there any more."""
        self._forget_deadline(delivery)
        size = delivery.window.acknowledge(delivery.record.queue_offset)
        if size is None:
            return False
        self._bytes -= size
        if not self._capacity.is_set():
            self._capacity.set()
        line = self._lines.get(delivery.window)
        if line:
            line.popleft()
            if line:
                self._make_ready(line[0])
        return True

    def _forget_deadline(self, delivery: Delivery) -> None:
        if self._unacked.pop(delivery, None) is None and self._extended:
            timer = self._extended.pop(delivery, None)
            if timer is not None:
                timer.cancel()


def log_late_ack(queue: MessageQueue, offset: int, reason: str) -> None:
    """Log that an acknowledgement does not count, so that the message is redelivered."""
    logger.warning("event=ack_too_late queue=%s offset=%d reason=%r", queue, offset, reason)
