"""Requests that need what is not in memory: a thread fetches it, and the loop goes on meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from halfmq.broker import cold_requests
from halfmq.broker.cold_requests import CODES
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.ext_fields import Header
from halfmq.remoting.headers import (
    GetEarliestMsgStoretimeRequestHeader,
    QueryMessageRequestHeader,
    SearchOffsetRequestHeader,
    ViewMessageRequestHeader,
)
from halfmq.store.page_cache import CachedReads, NotInMemoryError, read, without_waiting
from tests.support.broker_doubles import ext
from tests.support.peers import Peer
from tests.support.stores import BORN, draft
from tests.support.windows import Rig, windowed

COUNT = 40


class Frozen:
    """A disk of which nothing is in memory until it was fetched; who fetched it."""

    def __init__(self) -> None:
        self.fetched_by: list[int] = []
        self.failure: OSError | None = None
        self.thawed: set[tuple[int, int]] = set()  # inode, position


@contextmanager
def frozen() -> Iterator[Frozen]:
    """Have every read that may not wait find nothing at first."""
    ice = Frozen()
    read_into, fetch = CachedReads.read_into, NotInMemoryError.fetch

    def read_frozen(
        self: CachedReads, fd: int, targets: Sequence[memoryview | bytearray], position: int
    ) -> int:
        if (os.fstat(fd).st_ino, position) not in ice.thawed:
            return -1
        return read_into(self, fd, targets, position)

    def thaw(self: NotInMemoryError) -> None:
        ice.fetched_by.append(threading.get_ident())
        if ice.failure is not None:
            raise ice.failure
        fetch(self)
        ice.thawed.add((self.path.stat().st_ino, self.position))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CachedReads, "read_into", read_frozen)
        patched.setattr(NotInMemoryError, "fetch", thaw)
        yield ice


async def filled(rig: Rig) -> tuple[Peer, list[int]]:
    """Store messages with one key; return a peer and where they lie."""
    peer = await rig.peer()
    await peer.prepare("0" * 32)  # creates the topic
    properties = b"KEYS\x01order\x02"
    drafts = [draft("orders", 0, b"%d" % n, properties=properties) for n in range(COUNT)]
    done = [rig.store.append([one])[0] for one in drafts]
    await rig.wait(1_000)
    return peer, [one.physical_offset for one in done]


def requests(offsets: list[int]) -> dict[int, Header | None]:
    """One of each kind."""
    return {
        RequestCode.VIEW_MESSAGE_BY_ID: ViewMessageRequestHeader(offset=offsets[3]),
        RequestCode.QUERY_MESSAGE: QueryMessageRequestHeader(
            topic="orders", key="order", max_num=32, begin_timestamp=0, end_timestamp=1 << 62
        ),
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: SearchOffsetRequestHeader(
            topic="orders", queue_id=0, timestamp=BORN
        ),
        RequestCode.GET_EARLIEST_MSG_STORETIME: GetEarliestMsgStoretimeRequestHeader(
            topic="orders", queue_id=0
        ),
        RequestCode.GET_BROKER_RUNTIME_INFO: None,
    }


def told(answer: RemotingCommand) -> tuple[object, ...]:
    """What must be the same; the runtime's numbers go on, but for where the log begins."""
    if answer.code == ResponseCode.SUCCESS and b"earliestMessageTimeStamp" in answer.body:
        return (answer.body.split(b"earliestMessageTimeStamp")[1][:20],)
    return (answer.code, ext(answer), answer.body)


@windowed()
async def test_what_is_not_in_memory_is_fetched_by_threads(rig: Rig) -> None:
    """Each request gets the answer that it gets when everything is there."""
    peer, offsets = await filled(rig)
    assert requests(offsets).keys() == CODES
    for code, header in requests(offsets).items():
        warm = await rig.patiently(peer.call(code, header))
        with frozen() as ice:
            cold = await rig.patiently(peer.call(code, header))

        assert warm.code == ResponseCode.SUCCESS, code
        assert told(cold) == told(warm), code
        assert ice.fetched_by, code
        assert threading.get_ident() not in ice.fetched_by


@windowed()
async def test_what_cannot_be_fetched_is_said_by_the_try_that_waits(rig: Rig) -> None:
    """A thread's failure is no answer; the file may just have been deleted by age."""
    peer, offsets = await filled(rig)
    code = RequestCode.VIEW_MESSAGE_BY_ID
    with frozen() as ice:
        ice.failure = FileNotFoundError("gone")
        answer = await rig.patiently(peer.call(code, requests(offsets)[code]))

    assert answer.code == ResponseCode.SUCCESS  # the file is there in fact
    assert len(ice.fetched_by) == 1


@windowed()
async def test_who_comes_while_too_many_wait_is_told_so(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads' queue is bounded; what is in memory is answered all the same."""
    monkeypatch.setattr(cold_requests, "WAITING_MAX", 0)
    peer, offsets = await filled(rig)
    code = RequestCode.VIEW_MESSAGE_BY_ID
    with frozen():
        refused = await rig.patiently(peer.call(code, requests(offsets)[code]))
    served = await rig.patiently(peer.call(code, requests(offsets)[code]))

    assert refused.code == ResponseCode.SYSTEM_BUSY
    assert served.code == ResponseCode.SUCCESS


@windowed()
async def test_a_request_that_lacks_ever_more_is_served_in_the_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory so short that what is fetched is dropped at once must not turn for ever."""
    monkeypatch.setattr(cold_requests, "TRIES_MAX", 5)
    peer, offsets = await filled(rig)
    code = RequestCode.QUERY_MESSAGE
    with frozen() as ice:
        answer = await rig.patiently(peer.call(code, requests(offsets)[code]))

    assert answer.code == ResponseCode.SUCCESS
    assert len(ice.fetched_by) == 5


@pytest.mark.parametrize("size", [0, 10, 100])
def test_a_read_that_may_not_wait_gives_what_one_gives_that_may(tmp_path: Path, size: int) -> None:
    """Less at the end of a file, and on this thread only."""
    path = tmp_path / "file"
    path.write_bytes(bytes(range(size)))
    with path.open("rb") as file:
        for position in (0, 5, 200):
            with without_waiting():
                found = read(path, file.fileno(), 20, position)
            assert found == read(path, file.fileno(), 20, position)
            assert found == bytes(range(size))[position : position + 20]
