"""Batches that fill by themselves: sends of one topic wait a moment for each other.

Each send gets its own result. A message that cannot be in a batch is sent by itself: one that is
delayed, or whose body is compressed, since batches are not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from halfmq.store.format.batch import BatchUnit

from ..config import ClientConfig
from ..message import Message, SendResult
from ..net.message_encoding import encode_unit

BATCH_BYTES_MAX: Final = 256 << 10
"""Bytes at which a batch is sent at once: a longer one costs no less per message, and delays other
requests of its connection."""
BATCH_MESSAGES_MAX: Final = 1024
"""Messages at which a batch is sent at once; the broker stores a batch in one step."""

Key: TypeAlias = tuple[str, str | None, bool]
"""Topic, order key and ``wait_durable``, which the messages of a batch have in common."""


@dataclass(slots=True)
class CollectedBatch:
    """Messages that wait to be sent together."""

    messages: list[Message] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    units: list[BatchUnit] = field(default_factory=list)
    size: int = 0
    waiting: list[asyncio.Future[SendResult]] = field(default_factory=list)


class Batcher:
    """Collects messages in batches, which ``send`` sends; it gets the batch and its order key."""

    def __init__(
        self,
        config: ClientConfig,
        linger: float,
        send: Callable[[CollectedBatch, str | None], Awaitable[SendResult]],
    ) -> None:
        self._config = config
        self._linger = linger
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._size_max = min(BATCH_BYTES_MAX, config.message_size_max)
        self._open: dict[Key, tuple[CollectedBatch, asyncio.TimerHandle]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def takes(self, message: Message) -> bool:
        """Return whether a message can be in a batch."""
        compress_over = self._config.compress_over
        is_delayed = message.delay_level or message.deliver_after or message.deliver_at
        return not is_delayed and (compress_over is None or len(message.body) < compress_over)

    async def add(self, message: Message, message_id: str, order_key: str | None) -> SendResult:
        """Put a message into a batch and return where it was stored.

        Raises:
            MessageTooLargeError: Body or properties are above their limit; the others are sent.
            ClientError: Of the request.
        """
        unit = encode_unit(message, message_id, self._config)
        size = len(unit.body) + len(unit.properties)
        key = message.topic, order_key, message.wait_durable
        if key in self._open and self._open[key][0].size + size > self._size_max:
            self._close(key)
        if key not in self._open:
            self._open[key] = (
                CollectedBatch(),
                self._loop.call_later(self._linger, self._close, key),
            )
        batch, _ = self._open[key]
        batch.messages.append(message)
        batch.ids.append(message_id)
        batch.units.append(unit)
        batch.size += size
        result: asyncio.Future[SendResult] = self._loop.create_future()
        batch.waiting.append(result)
        if batch.size >= self._size_max or len(batch.units) >= BATCH_MESSAGES_MAX:
            self._close(key)
        return await result

    async def flush(self) -> None:
        """Send all batches now, and return when they are sent or have failed."""
        for key in tuple(self._open):
            self._close(key)
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _close(self, key: Key) -> None:
        batch, timer = self._open.pop(key)
        timer.cancel()
        task = self._loop.create_task(self._send_batch(batch, key[1]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_batch(self, batch: CollectedBatch, order_key: str | None) -> None:
        try:
            result = await self._send(batch, order_key)
        except BaseException as error:
            for waiting in batch.waiting:
                if not waiting.done():
                    waiting.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        places = result.offset_message_id.split(",")
        for number, waiting in enumerate(batch.waiting):
            if not waiting.done():  # else its caller was cancelled
                waiting.set_result(
                    result._replace(
                        message_id=batch.ids[number],
                        queue_offset=result.queue_offset + number,
                        offset_message_id=places[min(number, len(places) - 1)],
                    )
                )
