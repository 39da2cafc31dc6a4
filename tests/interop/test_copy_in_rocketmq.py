"""A copy of our log, taken while the broker works, opened by Apache RocketMQ's broker 5.3.3."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfmq.client.blocking import Message, Producer
from halfmq.client.testing import BrokerProcess, broker_process
from halfmq.store.format.record import Record
from halfmq.store.tools.copying import copy_log
from tests.support.rocketmq_broker import Wire, rocketmq_broker

pytestmark = pytest.mark.campaign

FORMAT = {
    "mappedFileSizeCommitLog": 65_536,
    "mappedFileSizeConsumeQueue": 1000,
    "maxMessageSize": 16_384,
    "maxHashSlotNum": 100,
    "maxIndexNum": 200,
}
QUEUES = range(4)
COUNT = 300


def send(broker: BrokerProcess, count: int) -> None:
    with Producer("p", namesrv=broker.address) as producer:
        for number in range(count):
            tags, keys = "ABC"[number % 3], f"order-{number}"
            producer.send(Message("plain", b"x" * 500, tags=tags, keys=keys))


def records(address: str) -> dict[int, list[Record]]:
    with Wire(address) as wire:
        return {number: wire.records("plain", number) for number in QUEUES}


@pytest.mark.parametrize("with_queues", [False, True])
def test_a_copy_of_a_live_log_is_served_by_rocketmq(tmp_path: Path, with_queues: bool) -> None:
    """Every record at its place, as it was when the copy was taken, and found by its key."""
    with broker_process(tmp_path / "ours", **FORMAT) as ours:
        send(ours, COUNT)
        expected = records(ours.address)
        copy_log(
            tmp_path / "ours" / "store",
            tmp_path / "copy",
            with_config=True,
            with_queues=with_queues,
        )
        send(ours, 10)

    with rocketmq_broker(tmp_path / "copy", tmp_path / "theirs", **FORMAT) as official:
        assert records(official.address) == expected
        with Wire(official.address) as wire:
            found = wire.by_key("plain", "order-7") if not with_queues else None
    assert sum(map(len, expected.values())) == COUNT
    assert found is None or [record.body for record in found] == [b"x" * 500]


def test_a_part_of_a_log_is_served_by_rocketmq(tmp_path: Path) -> None:
    """Queues begin behind what was left out, and end before what was cut off."""
    with broker_process(tmp_path / "ours", **FORMAT) as ours:
        send(ours, COUNT)
        everything = records(ours.address)
        root = tmp_path / "ours" / "store"
        copied = copy_log(root, tmp_path / "copy", start=70_000, end=150_000, with_config=True)
        expected = {
            number: [one for one in found if copied.first_offset <= one.physical_offset < 150_000]
            for number, found in everything.items()
        }

    with (
        rocketmq_broker(tmp_path / "copy", tmp_path / "theirs", **FORMAT) as official,
        Wire(official.address) as wire,
    ):
        served = {
            number: wire.records("plain", number, start=found[0].queue_offset)
            for number, found in expected.items()
        }

    assert copied.first_offset == 65_536
    assert served == expected
