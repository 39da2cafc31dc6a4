"""The buffer between pulls and the user's loop, step by step."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from halfmq.client import ClientConfig, ConfigurationError, MessageQueue
from halfmq.client.consuming.delivery import Delivery, DeliveryBuffer
from halfmq.client.consuming.in_flight import InFlightWindow
from halfmq.store.format.ids import pack_host
from halfmq.store.format.record import Record, new_record
from tests.support.patience import PATIENCE_S

HOST = pack_host("127.0.0.1", 1)


def record(offset: int, body: bytes = b"x") -> Record:
    return new_record(
        topic="orders",
        queue_id=0,
        body=body,
        properties=b"",
        born_timestamp=0,
        born_host=HOST,
        store_timestamp=0,
        store_host=HOST,
        queue_offset=offset,
    )


def new_buffer(
    *, send_back: Callable[[Delivery, int], Awaitable[bool]] | None = None, **limits: int
) -> tuple[DeliveryBuffer, InFlightWindow]:
    async def refuse(_delivery: Delivery, _level: int) -> bool:
        return False

    config = ClientConfig(retry_delay=0.01, **limits)  # type: ignore[arg-type]
    buffer = DeliveryBuffer(config, 60.0, send_back or refuse)
    return buffer, InFlightWindow(MessageQueue("orders", "broker-a", 0), 0, None)


async def has_capacity(buffer: DeliveryBuffer, window: InFlightWindow) -> None:
    await asyncio.wait_for(buffer.wait_for_capacity(window), PATIENCE_S)


async def test_messages_that_the_filter_leaves_out_use_up_no_span() -> None:
    """One message in work must not stop a queue whose other messages are not wanted."""
    buffer, window = new_buffer(cached_span_max=2)
    buffer.add(window, record(0))
    window.skip_to(5_000)
    await has_capacity(buffer, window)

    buffer.add(window, record(5_000))
    last = [await buffer.take() for _ in range(2)][-1]
    assert last is not None
    await last.ack()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(buffer.wait_for_capacity(window), 0)
    await buffer.close()


async def test_a_woken_taker_that_is_cancelled_passes_its_turn_on() -> None:
    """Otherwise a message would lie ready while another task waits for it."""
    buffer, window = new_buffer()
    first, second = (asyncio.ensure_future(buffer.take()) for _ in range(2))
    await asyncio.sleep(0)

    buffer.add(window, record(0))
    first.cancel()
    message = await asyncio.wait_for(second, PATIENCE_S)

    assert first.cancelled() or first.cancelling()
    assert message is not None
    assert message.queue_offset == 0
    await buffer.close()


async def test_takers_that_gave_up_leave_nothing_behind() -> None:
    """A loop of receive(timeout) may run for months."""
    buffer, _ = new_buffer()
    for _ in range(5):
        taker = asyncio.ensure_future(buffer.take())
        await asyncio.sleep(0)
        taker.cancel()
        await asyncio.wait([taker])

    # A waiting call that stays behind shows in nothing else.
    assert len(buffer._receivers) == 0
    await buffer.close()


async def test_a_message_pulled_twice_is_delivered_once() -> None:
    """A pull repeated after a lost answer brings the same records."""
    buffer, window = new_buffer()
    for offset in (0, 1, 0, 1, 2):
        buffer.add(window, record(offset))

    taken = [await buffer.take() for _ in range(3)]

    assert [message.queue_offset for message in taken if message] == [0, 1, 2]
    another = asyncio.ensure_future(buffer.take())
    await asyncio.sleep(0)
    assert not another.done()
    await buffer.close()


async def test_a_lost_queue_takes_its_messages_along() -> None:
    """They belong to another consumer now; those of other queues stay."""
    buffer, lost = new_buffer(cached_bytes_max=1)
    kept = InFlightWindow(MessageQueue("orders", "broker-a", 1), 0, None)
    for offset in range(3):
        buffer.add(lost, record(offset))
        buffer.add(kept, record(offset))
    held = await buffer.take()
    assert held is not None

    buffer.drop(lost)

    assert not await held.ack()
    taken = [await buffer.take() for _ in range(3)]
    assert all(message and message.queue.queue_id == 0 for message in taken)
    assert [await message.ack() for message in taken if message] == [True] * 3
    await has_capacity(buffer, kept)  # nothing is in memory
    assert kept.commit_offset == 3
    await buffer.close()


async def test_memory_is_given_back_by_acks_and_by_lost_queues() -> None:
    """The byte limit holds over all queues, and pulling resumes when it may."""
    size = record(0).total_size
    buffer, window = new_buffer(cached_bytes_max=2 * size)
    for offset in range(2):
        buffer.add(window, record(offset))
    pulling = asyncio.ensure_future(buffer.wait_for_capacity(window))
    await asyncio.sleep(0)
    assert not pulling.done()

    message = await buffer.take()
    assert message is not None
    await message.ack()
    await asyncio.wait_for(pulling, PATIENCE_S)

    buffer.add(window, record(2))
    pulling = asyncio.ensure_future(buffer.wait_for_capacity(window))
    await asyncio.sleep(0)
    assert not pulling.done()
    buffer.drop(window)
    await asyncio.wait_for(pulling, PATIENCE_S)
    await buffer.close()


async def test_giving_back_twice_is_giving_back_once() -> None:
    """The broker would deliver it twice."""
    asked: list[int] = []

    async def accept(_delivery: Delivery, level: int) -> bool:
        asked.append(level)
        return True

    buffer, window = new_buffer(send_back=accept)
    buffer.add(window, record(0))
    message = await buffer.take()
    assert message is not None

    await message.retry(delay_level=3)
    await message.retry(delay_level=3)

    assert asked == [3]
    assert not await message.ack()
    assert window.commit_offset == 1
    await buffer.close()


@pytest.mark.parametrize(
    ("seconds", "level"), [(0, 1), (1, 1), (1.5, 2), (10, 3), (601, 15), (7200, 18)]
)
async def test_a_delay_is_the_next_one_that_the_broker_has(seconds: float, level: int) -> None:
    """Never earlier than asked for; the reason goes along, cut to what a header may have."""
    asked: list[tuple[int, str]] = []

    async def accept(delivery: Delivery, level: int) -> bool:
        asked.append((level, delivery.reason))
        return True

    buffer, window = new_buffer(send_back=accept)
    for offset in (0, 1):
        buffer.add(window, record(offset))
    for _ in range(2):
        message = await buffer.take()
        assert message is not None
        if message.queue_offset == 0:
            await message.retry(timedelta(seconds=seconds), reason="x" * 300)
        else:
            await message.reject("never")

    assert asked == [(level, "x" * 255), (-1, "never")]
    assert window.commit_offset == 2
    await buffer.close()


@pytest.mark.parametrize(
    "arguments",
    [
        {"delay": 1},
        {"delay": timedelta(seconds=-1)},
        {"delay": timedelta(hours=2, seconds=1)},
        {"delay": timedelta(1), "delay_level": 1},
        {"reason": b"bytes"},
    ],
)
async def test_what_cannot_be_a_retry_is_refused_before_anything_is_sent(
    arguments: dict[str, Any],
) -> None:
    """The error names the argument, and the message stays in hand."""
    buffer, window = new_buffer()
    buffer.add(window, record(0))
    message = await buffer.take()
    assert message is not None
    with pytest.raises(ConfigurationError, match=r"delay|reason"):
        await message.retry(**arguments)

    assert await message.ack()
    await buffer.close()


async def test_closing_leaves_no_timer_and_no_task() -> None:
    """A loop that ends must end clean."""
    buffer, window = new_buffer()
    for offset in range(3):
        buffer.add(window, record(offset))
    message = await buffer.take()
    assert message is not None
    await message.retry(delay_level=18)

    await buffer.close()

    assert await buffer.take() is None
    assert window.commit_offset == 0


async def test_giving_back_that_is_cancelled_delivers_the_message_again() -> None:
    """Whether the broker has taken it nobody knows, and it must not be forgotten."""
    asked = asyncio.Event()

    async def hang(_delivery: Delivery, _level: int) -> bool:
        asked.set()
        await asyncio.Event().wait()  # until it is cancelled
        return True

    buffer, window = new_buffer(send_back=hang)
    buffer.add(window, record(0))
    message = await buffer.take()
    assert message is not None
    giving_back = asyncio.ensure_future(message.retry())
    await asked.wait()
    giving_back.cancel()

    async with asyncio.timeout(PATIENCE_S):
        again = await buffer.take()

    assert giving_back.cancelled()
    assert again is not None
    assert (again.queue_offset, again.delivery_attempt) == (0, 2)
    await buffer.close()


@pytest.mark.parametrize("taken", [True, False])
async def test_an_ack_while_the_broker_is_asked_to_redeliver_does_not_count(taken: bool) -> None:
    """The message comes again whatever the broker answers, so the handler is told so."""
    answer = asyncio.Event()

    async def send_back(_delivery: Delivery, _level: int) -> bool:
        await answer.wait()
        return taken

    buffer, window = new_buffer(send_back=send_back)
    buffer.add(window, record(0))
    message = await buffer.take()
    assert message is not None
    giving_back = asyncio.ensure_future(message.retry())
    await asyncio.sleep(0)

    assert not await message.extend(60)
    assert not await message.ack()
    answer.set()
    await giving_back

    if taken:
        assert window.commit_offset == 1
    else:
        async with asyncio.timeout(PATIENCE_S):
            again = await buffer.take()
        assert again is not None
        assert await again.ack()
    await buffer.close()


async def test_extended_messages_leave_no_timer() -> None:
    """Whether they are acknowledged, returned, lost with their queue or left to the end."""
    buffer, window = new_buffer()
    other = InFlightWindow(MessageQueue("orders", "broker-a", 1), 0, None)
    for offset in range(3):
        buffer.add(window, record(offset))
    buffer.add(other, record(0))
    for end in ("ack", "retry", "drop", "close"):
        message = await buffer.take()
        assert message is not None
        assert await message.extend(3_600)
        timers = list(buffer._extended.values())
        if end == "ack":
            assert await message.ack()
        elif end == "retry":
            await message.retry()
        elif end == "drop":
            buffer.drop(window)
        else:
            await buffer.close()
        assert timers[-1].cancelled()


async def test_giving_back_after_the_end_leaves_no_timer() -> None:
    """The program goes on, and the consumer is gone."""
    buffer, window = new_buffer()
    buffer.add(window, record(0))
    message = await buffer.take()
    assert message is not None
    await buffer.close()

    await message.retry(delay_level=18)

    # A timer that stays keeps its message in memory, and shows in nothing else.
    assert not buffer._redelivery_timers
