"""Pulls whose queue entries are not in memory: a thread fetches them, the answer comes then."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import PullMessageRequestHeader
from halfmq.store.queue.consume_queue import ConsumeQueue
from tests.support.race_windows import Rig, windowed
from tests.support.stores import draft
from tests.support.usual_headers import pull_header


def pulling(offset: int, *, suspend_ms: int = 0) -> PullMessageRequestHeader:
    """Ask for messages from an offset on."""
    return pull_header(
        queue_offset=offset,
        sys_flag=4 | 2 * bool(suspend_ms),
        suspend_timeout_millis=suspend_ms,
        expression_type="TAG",
    )


class Frozen:
    """Queues whose entries come from disk, once they were fetched; who fetched them, and where."""

    def __init__(self) -> None:
        self.fetched_by: list[int] = []
        self.failure: OSError | None = None
        self.thawed = False


@contextmanager
def frozen() -> Iterator[Frozen]:
    """Have nothing of the queues in memory until a thread has fetched it."""
    ice = Frozen()
    cached, warm = ConsumeQueue.cached_entries, ConsumeQueue.warm

    def cached_entries(queue: ConsumeQueue, queue_offset: int, count: int) -> bytes | None:
        return cached(queue, queue_offset, count) if ice.thawed else None

    def fetch(queue: ConsumeQueue, queue_offset: int) -> None:
        ice.fetched_by.append(threading.get_ident())
        if ice.failure is not None:
            raise ice.failure
        warm(queue, queue_offset)
        ice.thawed = True

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ConsumeQueue, "cached_entries", cached_entries)
        patched.setattr(ConsumeQueue, "warm", fetch)
        yield ice


async def pulled(rig: Rig, header: PullMessageRequestHeader) -> RemotingCommand:
    """Create the topic, store five messages and pull."""
    consumer = await rig.peer()
    await consumer.prepare("0" * 32)
    rig.store.append([draft("orders", 0, b"%d" % number) for number in range(5)])
    await rig.wait(1_000)
    opaque = consumer.send(RequestCode.PULL_MESSAGE, header)
    return await rig.patiently(consumer.answer(opaque))


@windowed()
async def test_cold_queue_entries_are_fetched_by_a_thread(rig: Rig) -> None:
    """The loop goes on meanwhile, and the pull is answered as if they had been there."""
    with frozen() as ice:
        answer = await pulled(rig, pulling(2))

    assert answer.code == ResponseCode.SUCCESS
    assert answer.body.count(b"orders") == 3
    assert len(ice.fetched_by) == 1
    assert ice.fetched_by[0] != threading.get_ident()


@windowed()
async def test_queue_entries_that_cannot_be_fetched_are_read_once_more(rig: Rig) -> None:
    """The second read waits for the disk and gets what there is, for example after a deletion."""
    with frozen() as ice:
        ice.failure = FileNotFoundError("gone")
        answer = await pulled(rig, pulling(2))

    assert answer.code == ResponseCode.SUCCESS
    assert len(ice.fetched_by) == 1


@windowed()
async def test_a_held_pull_does_not_wait_for_cold_entries(rig: Rig) -> None:
    """Entries of a new message are nearly always in memory; otherwise the client pulls again."""
    consumer = await rig.peer()
    await consumer.prepare("0" * 32)
    opaque = consumer.send(RequestCode.PULL_MESSAGE, pulling(0, suspend_ms=15_000))
    await rig.settle()
    with frozen() as ice:
        rig.store.append([draft("orders", 0, b"late")])
        await rig.wait(1_000)
        answer = await rig.patiently(consumer.answer(opaque))

    assert answer.code == ResponseCode.PULL_RETRY_IMMEDIATELY
    assert ice.fetched_by == []
