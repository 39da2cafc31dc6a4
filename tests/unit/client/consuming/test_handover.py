"""Messages in the hands of other threads, step by step: here all steps are in one thread."""

from __future__ import annotations

import asyncio

from halfmq.client import ClientConfig, MessageQueue
from halfmq.client.consuming.delivery import Delivery, DeliveryBuffer
from halfmq.client.consuming.handover import COLLECT_SECONDS, Handover
from halfmq.client.consuming.in_flight import InFlightWindow
from halfmq.store.format.ids import pack_host
from halfmq.store.format.record import new_record
from tests.support.fake_broker import until

HOST = pack_host("127.0.0.1", 1)


class Rig:
    """A buffer with three messages, and what it sent back."""

    def __init__(self, ack_timeout: float | None = None, *, accepted: bool = True) -> None:
        self.accepted = accepted
        self.sent_back: list[int] = []
        self.buffer = DeliveryBuffer(ClientConfig(retry_delay=0.01), ack_timeout, self._send_back)
        self.window = InFlightWindow(MessageQueue("orders", "broker-a", 0), 0, None)
        self.handover = Handover(self.buffer)
        for offset in range(3):
            record = new_record(
                topic="orders",
                queue_id=0,
                body=b"x",
                properties=b"",
                born_timestamp=0,
                born_host=HOST,
                store_timestamp=0,
                store_host=HOST,
                queue_offset=offset,
            )
            self.buffer.add(self.window, record)

    async def _send_back(self, delivery: Delivery, _level: int) -> bool:
        self.sent_back.append(delivery.record.queue_offset)
        return self.accepted

    def take(self) -> Delivery:
        """Take a message as a thread does."""
        slot: list[Delivery] = []
        assert self.handover.take(slot)
        slot[0].taken_at = asyncio.get_running_loop().time()
        return slot[0]


async def test_acknowledgements_count_without_a_crossing() -> None:
    """A few milliseconds later the loop's thread has them, or before a commit."""
    rig = Rig()
    assert await rig.handover.fill(None)
    deliveries = [rig.take() for _ in range(3)]
    assert [rig.handover.acknowledge(one) for one in deliveries] == [True] * 3
    assert rig.window.commit_offset == 0
    rig.handover.collect()
    assert rig.window.commit_offset == 3

    assert not any(rig.handover.acknowledge(one) for one in deliveries)  # a second time
    assert not await rig.handover.fill(0)
    assert ClientConfig().offset_commit_interval / 100 > COLLECT_SECONDS
    await rig.buffer.close()


async def test_acknowledgements_are_collected_by_themselves() -> None:
    """Also if the thread never asks for another message."""
    rig = Rig()
    await rig.handover.fill(None)
    assert rig.handover.acknowledge(rig.take())

    await until(lambda: rig.window.commit_offset == 1)
    await rig.buffer.close()


async def test_the_ack_timeout_begins_when_a_thread_takes_the_message() -> None:
    """A message that waits for a slow thread is not redelivered under its eyes."""
    rig = Rig(ack_timeout=0.05)
    await rig.handover.fill(None)
    rig.take()
    await until(lambda: rig.sent_back == [0])
    second = rig.take()

    assert await second.extend(60)
    rig.take()
    await until(lambda: rig.sent_back == [0, 2])
    assert rig.handover.acknowledge(second)
    await rig.buffer.close()


async def test_whoever_is_first_decides() -> None:
    """A message is acknowledged or redelivered, and the thread is told which."""
    rig = Rig()
    await rig.handover.fill(None)
    acknowledged, returned, revoked = (rig.take() for _ in range(3))
    assert rig.handover.acknowledge(acknowledged)
    await acknowledged.redeliver(0, "too late")
    await returned.redeliver(0, "first")
    rig.buffer.drop(rig.window)

    assert rig.sent_back == [1]
    assert not rig.handover.acknowledge(returned)
    assert not rig.handover.acknowledge(revoked)
    await rig.buffer.close()


async def test_a_refused_return_comes_again_and_counts_again() -> None:
    """The broker does not take it back, so this consumer redelivers it."""
    rig = Rig(accepted=False)
    await rig.handover.fill(None)
    first = rig.take()
    await first.redeliver(0, "")
    rig.take(), rig.take()
    await rig.handover.fill(None)
    again = rig.take()

    assert (again, again.attempts) == (first, 2)
    assert rig.handover.acknowledge(again)
    await rig.buffer.close()


async def test_what_no_thread_has_taken_goes_back_in_order() -> None:
    """``run`` after ``receive`` begins with it, as its first attempt."""
    rig = Rig()
    await rig.handover.fill(None)
    assert rig.take().record.queue_offset == 0
    rig.handover.return_all()

    taken = [await rig.buffer.take() for _ in range(2)]
    assert [(one.queue_offset, one.delivery_attempt) for one in taken if one] == [(1, 1), (2, 1)]
    await rig.buffer.close()


async def test_nothing_is_taken_after_a_stop() -> None:
    """Those that were handed over come again after the restart."""
    rig = Rig()
    await rig.handover.fill(None)
    rig.handover.stopped = True

    assert not rig.handover.take([])
    assert not await rig.handover.fill(None)
    rig.handover.stopped = False
    rig.buffer.stop()
    assert not rig.handover.take([])
    assert not await rig.handover.fill(None)
    await rig.buffer.close()
