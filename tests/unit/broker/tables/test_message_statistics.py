"""Counts of the last minute, hour and day."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest

from halfmq.broker.loop import slices
from halfmq.broker.tables import message_statistics as module
from halfmq.broker.tables.message_statistics import MESSAGES, Period, Statistics
from halfmq.store.queue.pull_selection import GetResult, GetStatus
from tests.support.broker_doubles import Clock

SAMPLE_MS = 10_000


class Queues:
    """Newly stored messages by topic."""

    def __init__(self) -> None:
        self.new: list[tuple[str, int, int]] = []

    def take_appended(self) -> Iterator[tuple[str, int, int]]:
        new, self.new = self.new, []
        yield from new


class Rig:
    """Statistics whose time the test moves."""

    def __init__(self) -> None:
        self.queues, self.clock = Queues(), Clock()
        self.statistics = Statistics(
            self.queues.take_appended,
            cluster_name="cluster",
            is_system=lambda topic: topic == "own",
            now_ms=self.clock,
            monotonic_ms=self.clock.monotonic,
        )
        self.sample()

    def sample(self) -> None:
        while self.statistics.tick() == 0:
            pass

    def wait(self, seconds: int) -> None:
        for _ in range(seconds * 1_000 // SAMPLE_MS):
            self.clock.now += SAMPLE_MS
            self.sample()

    def pull(self, group: str, count: int, *, topic: str = "orders", queue_id: int = 0) -> None:
        result = GetResult(GetStatus.FOUND, count, 0, count, [], count, count * 100)
        self.statistics.delivered(topic, group, queue_id, result)

    def totals(self, name: str, key: str) -> tuple[int, int, int]:
        found = self.statistics.find(name, key)
        assert found is not None
        return found.minute.total, found.hour.total, found.day.total


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_stored_messages_are_counted_by_topic_and_in_total(rig: Rig) -> None:
    """All queues of a topic together; one total leaves out system topics."""
    rig.queues.new = [("orders", 10, 1_000), ("orders", 20, 2_000), ("own", 5, 50)]
    rig.wait(10)

    found = rig.statistics.find("TOPIC_PUT_NUMS", "orders")
    assert found is not None
    assert found.minute == Period(30, 3.0, 1.0)
    sizes = rig.statistics.find("TOPIC_PUT_SIZE", "orders")
    assert sizes is not None
    assert sizes.minute == Period(3_000, 300.0, 100.0)
    assert rig.totals("BROKER_PUT_NUMS", "cluster") == (35, 35, 35)
    assert rig.totals("BROKER_PUT_NUMS_WITHOUT_SYSTEM_TOPIC", "cluster") == (30, 30, 30)
    assert rig.statistics.stored_per_second("orders") == 3.0


def test_delivered_messages_are_counted_by_topic_and_group(rig: Rig) -> None:
    """Each pull with messages is one time, so the average is messages per pull."""
    rig.pull("readers", 32)
    rig.pull("readers", 8)
    rig.pull("others", 1, topic="own")
    rig.wait(20)

    found = rig.statistics.find("GROUP_GET_NUMS", "orders@readers")
    assert found is not None
    assert found.minute == Period(40, 2.0, 20.0)
    assert rig.totals("GROUP_GET_SIZE", "orders@readers") == (4_000, 4_000, 4_000)
    assert rig.totals("BROKER_GET_NUMS", "cluster") == (41, 41, 41)
    assert rig.totals("BROKER_GET_NUMS_WITHOUT_SYSTEM_TOPIC", "cluster") == (40, 40, 40)
    assert rig.statistics.delivered_per_second("orders", "readers") == 2.0


def test_each_period_leaves_out_older_messages(rig: Rig) -> None:
    """After a minute, an hour and a day a message is in one count less."""
    rig.queues.new = [("orders", 7, 70)]
    rig.wait(60)
    assert rig.totals("TOPIC_PUT_NUMS", "orders") == (7, 7, 7)
    rig.wait(20)
    assert rig.totals("TOPIC_PUT_NUMS", "orders") == (0, 7, 7)
    rig.wait(71 * 60)
    assert rig.totals("TOPIC_PUT_NUMS", "orders") == (0, 0, 7)
    rig.wait(24 * 3_600)
    assert rig.statistics.find("TOPIC_PUT_NUMS", "orders") is None


def test_counters_unused_for_a_day_are_dropped_and_begin_at_zero(rig: Rig) -> None:
    """Counters of deleted topics do not stay."""
    rig.pull("readers", 3)
    rig.queues.new = [("orders", 3, 30)]
    rig.wait(26 * 3_600)
    assert rig.statistics.find("GROUP_GET_NUMS", "orders@readers") is None

    rig.queues.new = [("orders", 2, 20)]
    rig.wait(10)
    assert rig.totals("TOPIC_PUT_NUMS", "orders") == (2, 2, 2)


def test_deliveries_between_two_slices_of_a_sample_are_in_the_totals(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling takes several slices, and pulls are answered in between."""
    for number in range(100):
        rig.pull(f"group-{number}", 1)
    monkeypatch.setattr(slices, "SLICE_S", 0.0)  # one counter each
    rig.clock.now += SAMPLE_MS
    while rig.statistics.tick() == 0:
        rig.pull("group-0", 1)
        rig.pull("group-99", 1)
    rig.wait(10)

    in_all = rig.totals("BROKER_GET_NUMS", "cluster")[0]
    each = [rig.totals("GROUP_GET_NUMS", f"orders@group-{number}")[0] for number in range(100)]
    assert in_all == sum(each) > 300


def test_unknown_names_and_keys_have_no_counts(rig: Rig) -> None:
    """Neither the names of latencies, nor topics without stored messages."""
    rig.queues.new = [("orders", 1, 1)]
    rig.wait(10)
    for name, key in (
        ("TOPIC_PUT_NUMS", "unknown"),
        ("TOPIC_PUT_LATENCY", "orders"),
        ("GROUP_GET_NUMS", "orders"),
        ("BROKER_PUT_NUMS", "another-cluster"),
        ("", ""),
    ):
        assert rig.statistics.find(name, key) is None, name


def test_counters_are_bounded_and_totals_count_everything(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that invents groups takes no more memory than the limit."""
    monkeypatch.setattr(module, "COUNTERS_MAX", 2)
    monkeypatch.setattr(module, "PULLED_QUEUES_MAX", 3)
    for number in range(5):
        rig.pull(f"group-{number}", 1)
        rig.statistics.sent_back("orders", f"group-{number}")
    for queue_id in range(9):
        rig.pull("group-0", 1, queue_id=queue_id)
    rig.wait(10)

    assert rig.statistics.find("GROUP_GET_NUMS", "orders@group-4") is None
    assert rig.totals("BROKER_GET_NUMS", "cluster")[0] == 14
    assert [rig.statistics.pulled_offset("orders", "group-0", one) for one in range(9)].count(
        1
    ) == 2
    assert rig.statistics.find("SNDBCK_PUT_NUMS", "orders@group-1") is not None
    assert rig.statistics.find("SNDBCK_PUT_NUMS", "orders@group-2") is None


def test_a_rate_counts_from_the_newest_sample_of_that_age(rig: Rig) -> None:
    """The three numbers of ``putTps``: 10, 60 and 600 seconds."""
    counter = rig.statistics.all_stored
    for number in range(1, 13):  # 1, 2, … 12 messages a second
        rig.queues.new = [("orders", number * 10, 0)]
        rig.wait(10)

    assert rig.statistics.rate(counter, MESSAGES, 10) == 12.0
    assert rig.statistics.rate(counter, MESSAGES, 60) == (7 + 8 + 9 + 10 + 11 + 12) / 6
    assert rig.statistics.rate(counter, MESSAGES, 600) == 6.5  # since the start


def test_totals_are_of_now_and_a_topic_is_known_at_its_first_message(rig: Rig) -> None:
    """As in RocketMQ: a test sends one message and looks; periods need samples."""
    rig.queues.new = [("orders", 5, 50), ("own", 1, 0)]
    rig.pull("readers", 4)
    rig.pull("readers", 9, topic="own")
    for _ in range(2):  # the second one counts nothing twice
        deque(rig.statistics.count_new(), maxlen=0)

        now = rig.statistics.daily_counts()
        assert (now["msgPutTotalTodayNow"], now["msgGetTotalTodayNow"]) == (5, 4)
        assert rig.statistics.all_stored.messages == 6
        assert rig.totals("TOPIC_PUT_NUMS", "orders") == (0, 0, 0)
    rig.wait(10)
    assert rig.totals("TOPIC_PUT_NUMS", "orders") == (5, 5, 5)
    assert rig.totals("BROKER_GET_NUMS", "cluster") == (13, 13, 13)


def test_a_new_day_begins_at_midnight(rig: Rig) -> None:
    """``clusterList -m`` shows the messages of yesterday and of today."""
    rig.queues.new = [("orders", 5, 0), ("own", 1, 0)]
    rig.pull("readers", 4)
    rig.wait(10)
    now = rig.statistics.daily_counts()
    assert (now["msgPutTotalTodayMorning"], now["msgPutTotalTodayNow"]) == (0, 5)

    rig.clock.now += 24 * 3_600_000
    rig.sample()
    rig.queues.new = [("orders", 1, 0)]
    rig.wait(10)
    now = rig.statistics.daily_counts()
    assert [now[f"msgPutTotal{when}"] for when in ("YesterdayMorning", "TodayMorning")] == [0, 5]
    assert now["msgPutTotalTodayNow"] == 6
    assert [now[f"msgGetTotal{when}"] for when in ("TodayMorning", "TodayNow")] == [4, 4]
