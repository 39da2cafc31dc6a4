"""New topics: saved before the log has a record of them, without blocking the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from halfmq.broker.errors import RequestRefusedError
from halfmq.broker.handlers.clients.clients import HEARTBEAT_GROUPS_MAX
from halfmq.broker.tables import awaited_save
from halfmq.broker.tables.awaited_save import TOPICS_PER_PASS, AwaitedSave, ServeDeferred
from halfmq.broker.tables.topic_table import TopicTable
from halfmq.remoting.bodies import ConsumerData, HeartbeatData, encode_heartbeat
from halfmq.remoting.codes import RequestCode, ResponseCode
from tests.support.patience import PATIENCE_S
from tests.support.peers import COMMIT, Peer, until
from tests.support.race_windows import Rig, windowed


class Thread:
    """The thread that saves new topics: records who writes when, and can be held."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.writers: list[int] = []
        self.met: list[set[str]] = []  # topics of the log when the file was written
        self.may_write = threading.Event()
        self.may_write.set()

    def around(self, begin: Callable[[TopicTable], Callable[[], None]]) -> object:
        def begin_save(table: TopicTable) -> Callable[[], None]:
            write = begin(table)

            def run() -> None:
                assert self.may_write.wait(PATIENCE_S)
                self.writers.append(threading.get_ident())
                self.met.append({record.topic for record in self._rig.records()})
                write()

            return run

        return begin_save


@contextmanager
def watched(rig: Rig) -> Iterator[Thread]:
    thread = Thread(rig)
    # The save of the table is held at its begin, on its own thread.
    saves = rig.tables.topics._awaited
    assert saves is not None
    with pytest.MonkeyPatch.context() as patched:
        around = thread.around(TopicTable._begin_save)
        table = rig.tables.topics
        patched.setattr(saves, "_begin", lambda: around(table))  # type: ignore[operator]
        patched.setattr(TopicTable, "_begin_save", around)
        try:
            yield thread
        finally:
            thread.may_write.set()


def in_file(rig: Rig) -> set[str]:
    table = json.loads((rig.root / "config" / "topics.json").read_text())
    return set(table["topicConfigTable"])


def send(peer: Peer, key: int, topic: str = "orders") -> int:
    header, body = peer.half_request(f"{key:032}", b"row %d" % key, topic=topic)
    return peer.send(RequestCode.SEND_MESSAGE_V2, header, body)


@windowed()
async def test_a_topic_is_in_the_file_before_the_log_has_a_record_of_it(rig: Rig) -> None:
    """After a kill right after the answer, the store is complete."""
    producer = await rig.peer()
    with watched(rig) as thread:
        half = await producer.prepare("0" * 32)
        assert in_file(rig) >= {"orders"}
        assert thread.met == [set()]
        assert thread.writers != [threading.get_ident()]
    await rig.kill()
    assert "orders" in rig.tables.topics

    again = await rig.peer()
    assert (await again.end(half, COMMIT)).code == ResponseCode.SUCCESS
    assert rig.bodies() == [half.body]


@windowed()
async def test_all_new_groups_of_a_heartbeat_are_saved_at_once(rig: Rig) -> None:
    """A client of many groups waits for one save, and so does everyone after it."""
    peer = await rig.peer()
    groups = tuple(ConsumerData(group_name=f"g{number}") for number in range(50))
    data = HeartbeatData(client_id="c", consumer_data_set=groups)
    with watched(rig) as thread:
        answer = await peer.call(RequestCode.HEART_BEAT, None, encode_heartbeat(data))
        assert answer.code == 0
        assert len(thread.writers) == 1
    assert rig.tables.registry.consumer_groups.keys() == {one.group_name for one in groups}
    assert all(f"%RETRY%{one.group_name}" in rig.tables.topics for one in groups)


@windowed()
async def test_a_heartbeat_names_a_limited_number_of_groups(rig: Rig) -> None:
    """Creating eight thousand at once would occupy the loop for half a second."""
    peer = await rig.peer()
    groups = tuple(
        ConsumerData(group_name=f"g{number}") for number in range(HEARTBEAT_GROUPS_MAX + 1)
    )
    data = HeartbeatData(client_id="c", consumer_data_set=groups)
    answer = await peer.call(RequestCode.HEART_BEAT, None, encode_heartbeat(data))

    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "names 513 groups, the limit is 512" in (answer.remark or "")
    assert "g0" not in rig.tables.groups


@windowed()
async def test_only_requests_for_the_new_topic_wait(rig: Rig) -> None:
    """They are served in order, after one save for each round."""
    producer, other = await rig.peer(), await rig.peer()
    await producer.prepare("9" * 32, topic="known")
    with watched(rig) as thread:
        thread.may_write.clear()
        waiting = [send(producer, key) for key in range(5)]
        later = send(producer, 5, topic="bills")  # while the thread writes
        await other.prepare("8" * 32, topic="known")
        assert not any(producer.answered(one) for one in (*waiting, later))
        assert "orders" not in rig.tables.topics
        thread.may_write.set()
        answers = [await producer.answer(one) for one in (*waiting, later)]
        assert len(thread.writers) == 2

    offsets = [producer.half_of(answer).offset for answer in answers]
    assert offsets == sorted(offsets)
    assert in_file(rig) >= {"orders", "bills"}


class Steps:
    """The steps of an awaited save, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.saves = AwaitedSave(
            lambda: lambda: None, self.end, lambda topic: self.done.append(f"show {topic}")
        )
        self.last = asyncio.Event()

    def end(self, error: OSError | None) -> RequestRefusedError | None:
        self.done.append(f"saved {error}")
        return None

    def serving(self, request: str) -> ServeDeferred:
        def serve(refusal: RequestRefusedError | None) -> None:
            assert refusal is None
            self.done.append(request)
            if request == "last":
                self.last.set()

        return serve


async def test_new_topics_become_visible_a_few_in_each_pass_of_the_loop() -> None:
    """A thousand saved at once do not occupy the loop until all their queues exist."""
    steps = Steps()
    topics = [f"T{number}" for number in range(3 * TOPICS_PER_PASS)]
    for topic in topics:
        steps.saves.wait([topic], steps.serving("last" if topic == topics[-1] else topic), 10)
    in_between: list[int] = []

    def beat() -> None:
        in_between.append(sum(step.startswith("show") for step in steps.done))
        if not steps.last.is_set():
            asyncio.get_running_loop().call_soon(beat)

    beat()
    await asyncio.wait_for(steps.last.wait(), PATIENCE_S)

    assert {TOPICS_PER_PASS, 2 * TOPICS_PER_PASS} <= set(in_between)
    assert [step for step in steps.done if step.startswith("saved")] == ["saved None"]
    assert not steps.saves.is_full


async def test_requests_for_one_topic_are_served_in_order() -> None:
    """Also a request that arrives between the save of its topic and its turn."""
    steps = Steps()

    def first(_refusal: RequestRefusedError | None) -> None:
        steps.saves.wait(["late"], steps.serving("last"), 10)

    steps.saves.wait(["T"], first, 10)
    for number in range(TOPICS_PER_PASS):
        steps.saves.wait([f"T{number}"], steps.serving("other"), 10)
    steps.saves.wait(["late"], steps.serving("one"), 10)
    steps.saves.wait(["late"], steps.serving("two"), 10)
    await asyncio.wait_for(steps.last.wait(), PATIENCE_S)

    assert steps.done[-4:] == ["show late", "one", "two", "last"]
    assert steps.done.count("saved None") == 1


@windowed()
async def test_a_topic_that_cannot_be_saved_is_refused(rig: Rig) -> None:
    """With a code after which clients retry; the topic is created when the disk has room."""
    producer = await rig.peer()
    blocked = rig.root / "config" / "topics.json.tmp"
    blocked.mkdir(parents=True)
    refused = await producer.answer(send(producer, 1))
    assert refused.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert "topics.json cannot be written" in (refused.remark or "")
    assert "orders" not in rig.tables.topics
    assert [*rig.records()] == []
    blocked.rmdir()

    assert (await producer.answer(send(producer, 1))).code == ResponseCode.SUCCESS


@windowed()
async def test_the_connection_of_a_request_beyond_the_limit_waits(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deferred requests are bounded, none is refused because of that, and the loop saves none."""
    monkeypatch.setattr(awaited_save, "WAITING_MAX", 2)
    producer, other = await rig.peer(), await rig.peer()
    await other.prepare("8" * 32, topic="known")
    with watched(rig) as thread:
        thread.may_write.clear()
        waiting = [send(producer, key, topic=f"new-{key}") for key in range(7)]
        await other.prepare("9" * 32, topic="known")
        assert len(rig.records_of("RMQ_SYS_TRANS_HALF_TOPIC")) == 2
        thread.may_write.set()
        answers = [await producer.answer(one) for one in waiting]
        assert threading.get_ident() not in thread.writers
        assert len(thread.writers) >= 4

    assert {answer.code for answer in answers} == {ResponseCode.SUCCESS}
    assert len(rig.records_of("RMQ_SYS_TRANS_HALF_TOPIC")) == 9


@windowed()
async def test_a_deferred_request_of_a_closed_connection_is_dropped(rig: Rig) -> None:
    """Its sender could not get the answer."""
    producer, other = await rig.peer(), await rig.peer()
    with watched(rig) as thread:
        thread.may_write.clear()
        opaque = send(producer, 1)
        await producer.sync()  # answered, as it does not need the topic
        assert not producer.answered(opaque)
        await rig.lose(producer)
        thread.may_write.set()
        await until(lambda: "orders" in rig.tables.topics)
        await other.sync()

    assert [*rig.records()] == []


@windowed()
async def test_a_heartbeat_is_answered_when_the_retry_topics_exist(rig: Rig) -> None:
    """They are in the file then."""
    peer = await rig.peer(member=False)
    data = HeartbeatData(
        client_id="reader", consumer_data_set=tuple(ConsumerData(group_name=g) for g in ("a", "b"))
    )
    answer = await peer.call(RequestCode.HEART_BEAT, None, encode_heartbeat(data))
    assert answer.code == ResponseCode.SUCCESS

    assert in_file(rig) >= {"%RETRY%a", "%RETRY%b"}


@windowed()
async def test_a_stop_that_cannot_save_the_tables_counts_as_a_kill(rig: Rig) -> None:
    """The next start restores missing topics from the log."""
    producer = await rig.peer()
    await producer.prepare("0" * 32)
    blocked = rig.root / "config" / "topics.json.tmp"
    blocked.mkdir()
    await rig.stop()
    assert (rig.root / "abort").exists()
    blocked.rmdir()
    await rig.start()

    assert "orders" in rig.tables.topics
