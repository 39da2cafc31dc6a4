"""Messages with a time of delivery: to the millisecond, once, whatever stops the broker."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmq.broker.delay import delivery
from halfmq.broker.delay.levels import DelayLevels
from halfmq.broker.delay.timer_records import TimerError
from halfmq.remoting.recall_handle import RecallHandle, parse_recall_handle
from halfmq.store.format.timers import timer_checkpoint
from halfmq.store.format.topics import TIMER_TOPIC
from halfmq.store.message_store import MessageStore
from tests.support.broker_doubles import START_MS
from tests.support.delays import DAY_MS, LEVELS, MAX_DELAY_MS, Clocks, Rig, after, at, delay_service
from tests.support.golden_store import unpack
from tests.support.stores import append_durably, draft, everything, flush, golden_config, unflushed


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "store")
    yield rig
    rig.stop()


@pytest.mark.parametrize("time", [at(1_234), after(1_234), ("TIMER_DELAY_SEC", 2)])
def test_a_message_is_delivered_in_the_millisecond_asked_for(
    rig: Rig, time: tuple[str, int]
) -> None:
    """Not before, to its own queue, with its properties."""
    rig.send("late", *time)
    due_ms = 2_000 if time[0] == "TIMER_DELAY_SEC" else 1_234

    rig.clocks.advance(due_ms - 1)
    rig.run()
    assert not rig.delivered()
    rig.clocks.advance(1)
    rig.run()

    assert rig.delivered() == {"late": START_MS + due_ms}
    record = next(one for one in everything(rig.store) if one.topic == "orders")
    assert (record.queue_id, record.property_map[time[0]]) == (1, str(time[1]))
    assert rig.delays.waiting == 0


def test_messages_come_in_the_order_of_their_times(rig: Rig) -> None:
    """Not in the order in which they were sent, and those of one time in that order."""
    for body, ms in (("c", 30), ("a", 10), ("d", 30), ("b", 20)):
        rig.send(body, *at(ms))
    rig.clocks.advance(1_000)
    rig.run()

    assert [one.body for one in everything(rig.store) if one.topic == "orders"] == [
        b"a", b"b", b"c", b"d",
    ]  # fmt: skip


@pytest.mark.parametrize("value", [0, -5, START_MS - 1])
def test_a_time_that_is_over_means_now(rig: Rig, value: int) -> None:
    """As in RocketMQ, whichever property says so."""
    name = "TIMER_DELIVER_MS" if value > 0 else "TIMER_DELAY_MS"
    assert rig.send("now", name, value) is None
    assert "now" in rig.delivered()


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("TIMER_DELAY_SEC", "soon", "TIMER_DELAY_SEC=soon: expected a whole number"),
        ("TIMER_DELAY_MS", "1.5", "expected a whole number"),
        ("TIMER_DELAY_MS", "1_000", "expected a whole number"),
        ("TIMER_DELAY_MS", "9" * 40, "allowed is at most 3456000 seconds"),
        ("TIMER_DELIVER_MS", str(START_MS + MAX_DELAY_MS + 1), "timerMaxDelaySec"),
    ],
)
def test_a_wrong_time_is_refused_with_name_value_and_limit(
    rig: Rig, name: str, value: str, reason: str
) -> None:
    """Exactly the limit is allowed."""
    with pytest.raises(TimerError, match=reason):
        rig.rule.waiting(draft("orders"), name, value)
    assert rig.send("last", "TIMER_DELAY_MS", MAX_DELAY_MS) is not None


@pytest.mark.parametrize("step_ms", [-10 * DAY_MS, 10 * DAY_MS])
def test_a_step_of_the_wall_clock_moves_no_relative_delay(rig: Rig, step_ms: int) -> None:
    """A time by the wall clock moves with it."""
    rig.send("relative", *after(5_000))
    rig.send("absolute", *at(5_000))
    rig.clocks.wall += step_ms

    rig.clocks.advance(4_999)
    rig.run()
    assert rig.delivered().keys() == ({"absolute"} if step_ms > 0 else set())
    rig.clocks.advance(1)
    rig.run()
    assert "relative" in rig.delivered()


def test_what_is_not_on_disk_yet_is_delivered_when_it_is(rig: Rig) -> None:
    """A delay may be shorter than a flush."""
    message = draft("orders", 1, b"quick", properties={"TIMER_DELAY_MS": "1"})
    waiting = rig.rule.waiting(message, "TIMER_DELAY_MS", "1")
    assert waiting is not None
    with unflushed(rig.store):
        rig.store.append([waiting.request])
        rig.clocks.advance(5)
        rig.delays.tick()
        assert rig.delays.waiting == 1
    flush(rig.store)
    rig.after(delivery.UNREADABLE_MS)

    assert rig.bodies() == ["quick"]


def test_a_record_that_replaces_a_damaged_one_delivers_nothing(rig: Rig) -> None:
    """It names its own place in the log, in the field where a delivery names its message."""
    (first,) = append_durably(rig.store, draft("orders", 0, b"x" * 200))
    assert first.physical_offset == 0
    handle = rig.send("late", *after(1_000))
    assert handle is not None
    assert handle.place == 0

    rig.kill(damaged=range(90, 190))
    assert rig.delays.waiting == 1
    rig.clocks.advance(1_000)
    rig.run()
    assert "late" in rig.delivered()


def test_a_recalled_message_reaches_nobody(rig: Rig) -> None:
    """Also after a kill; the same recall again is answered alike, another one refused."""
    handle = rig.send("recalled", *after(1_000))
    other = rig.send("kept", *after(1_000))
    assert handle is not None
    assert other is not None
    assert rig.delays.recall(handle).unique_key == "recalled"
    assert rig.delays.recall(handle).unique_key == "recalled"
    for wrong in (
        other._replace(topic="bills"),
        other._replace(unique_key="recalled"),
        other._replace(place=77),
    ):
        with pytest.raises(TimerError, match="recall failed"):
            rig.delays.recall(wrong)
    flush(rig.store)
    rig.kill()
    assert rig.delays.recall(handle).unique_key == "recalled"
    rig.clocks.advance(1_000)
    rig.run()

    assert rig.delivered().keys() == {"kept"}
    with pytest.raises(TimerError, match="delivered"):
        rig.delays.recall(other)
    assert rig.delays.waiting == 0


@pytest.mark.parametrize("early_ms", [1_000, 1, 0, -5_000])
def test_a_recall_in_the_last_moment_is_refused_or_reaches_nobody(rig: Rig, early_ms: int) -> None:
    """Until the broker has stored the delivery, whatever the clock says; also after a kill."""
    handle = rig.send("recalled", *at(5_000))
    assert handle is not None
    rig.clocks.advance(5_000 - early_ms)
    rig.delays.recall(handle)  # accepted
    rig.run()
    flush(rig.store)
    rig.kill()
    rig.clocks.advance(10_000)
    rig.run()
    assert not rig.delivered()

    handle = rig.send("delivered", *after(1_000))
    assert handle is not None
    rig.clocks.advance(1_000)
    rig.run()
    with pytest.raises(TimerError, match="delivered"):
        rig.delays.recall(handle)
    assert rig.delivered().keys() == {"delivered"}


def test_a_recall_names_the_message_as_rocketmq_expects(rig: Rig) -> None:
    """By topic and key: an official broker that takes the store over does not deliver it."""
    handle = rig.send("recalled", *after(1_000))
    assert handle is not None
    rig.delays.recall(handle)
    flush(rig.store)
    names = [one.property_map.get("TIMER_DEL_UNIQKEY") for one in everything(rig.store)]
    assert "orders+recalled" in names


def test_waiting_messages_are_listed_page_by_page(rig: Rig) -> None:
    """Whatever they wait for, without those that were delivered or recalled."""
    handles = [rig.send(str(number), *after(1_000 * number)) for number in range(1, 6)]
    rig.delay("level 18", 18)
    rig.delay("level 3", 3)
    rig.commit("commit", "TRANSACTION_DELAY_MS", 7_000)
    assert handles[2] is not None
    rig.delays.recall(handles[2])
    rig.clocks.advance(1_000)
    rig.run()

    assert _listed(rig, 3) == {
        "2": 2_000,
        "4": 4_000,
        "5": 5_000,
        "commit": 7_000,
        "level 3": 10_000,
        "level 18": 7_200_000,
    }


def _listed(rig: Rig, page_size: int) -> dict[str, int]:
    """Return how long after the start each listed message is due, in the order of the list."""
    found: dict[str, int] = {}
    after: int | None = -1
    while after is not None:
        page = rig.delays.page(after, page_size, 1 << 20)
        found |= {one.record.body.decode(): one.due_ms - START_MS for one in page.messages}
        after = page.next_after
    return found


@pytest.mark.parametrize("killed", [False, True])
def test_whatever_is_listed_can_be_recalled(rig: Rig, killed: bool) -> None:
    """A message with a delay level, a delayed commit: nobody gets it, also after a kill."""
    for body in ("recalled", "kept"):
        rig.delay(body, 3)
        rig.commit(f"commit {body}", "TRANSACTION_DELAY_MS", 5_000)
    listed = rig.delays.page(-1, 9, 1 << 20).messages
    for one in listed:
        if one.record.body.endswith(b"recalled"):
            key = one.record.property_map.get("UNIQ_KEY", "")
            handle = RecallHandle("orders", "broker-a", one.due_ms, key, one.place)
            rig.delays.recall(handle)
            flush(rig.store)
    if killed:
        rig.kill()
    rig.after(10_000)

    assert sorted(rig.delivered()) == ["commit kept", "kept"]
    assert rig.delays.waiting == 0


@pytest.mark.parametrize("place", [-2, 1 << 40, 19 << 40, 300 << 40, (1 << 63) - 1])
def test_a_place_where_nothing_waits_is_refused(rig: Rig, place: int) -> None:
    """Handles come from clients."""
    rig.send("kept", *after(1_000))
    with pytest.raises(TimerError, match="no such message waits"):
        rig.delays.recall(RecallHandle("orders", "broker-a", 0, "other", place))
    assert rig.delays.waiting == 1


def test_messages_that_wait_longer_than_the_log_is_kept_are_stored_again(rig: Rig) -> None:
    """For the same time; the old files can be deleted then."""
    rig.send("far", *after(39 * DAY_MS + 7))
    handle = rig.send("farther", *at(40 * DAY_MS))
    rig.clocks.advance(3 * DAY_MS)
    end = rig.store.write_offset

    assert rig.delays.copy_forward(end)
    flush(rig.store)
    assert not rig.delays.copy_forward(end)
    oldest = rig.delays.oldest_waiting_offset()
    assert oldest is not None
    assert oldest >= end
    assert rig.delays.waiting == 2
    rig.kill()
    assert rig.delays.waiting == 2
    assert handle is not None
    rig.clocks.advance(36 * DAY_MS + 6)
    rig.run()
    assert not rig.delivered()
    rig.clocks.advance(1)
    rig.run()
    assert rig.delivered().keys() == {"far"}
    rig.clocks.advance(DAY_MS)
    rig.run()
    assert rig.delivered().keys() == {"far", "farther"}


@pytest.mark.parametrize("killed", [False, True])
def test_a_message_that_was_stored_again_can_be_recalled(rig: Rig, killed: bool) -> None:
    """With the handle that its sender has got, also after a second time and a start."""
    handle = rig.send("recalled", *after(30 * DAY_MS))
    rig.send("kept", *after(30 * DAY_MS))
    assert handle is not None
    for _ in range(2):
        rig.clocks.advance(3 * DAY_MS)
        assert rig.copy_forward(rig.store.write_offset)
    if killed:
        rig.kill()
    assert rig.delays.recall(handle).unique_key == "recalled"
    assert rig.delays.recall(handle).unique_key == "recalled"
    rig.after(30 * DAY_MS)

    assert rig.delivered().keys() == {"kept"}
    with pytest.raises(TimerError, match="recall failed"):
        rig.delays.recall(handle._replace(unique_key="kept"))


def test_the_log_is_kept_for_what_waits_and_until_its_delivery_is_on_disk(rig: Rig) -> None:
    """A power cut must not take both."""
    rig.send("late", *after(10))
    offset = rig.delays.oldest_waiting_offset()
    assert offset == 0
    rig.run()
    rig.clocks.advance(10)
    rig.run()
    assert rig.delays.oldest_waiting_offset() is None


def test_what_rocketmq_delivered_meanwhile_does_not_come_again(rig: Rig) -> None:
    """It had taken the store over; its own file says how far it has come."""
    for ms in 1_000, 9_000:
        rig.send(str(ms), *after(ms))
    rig.stop()
    checkpoint = bytearray(timer_checkpoint(START_MS + 5_000, 0))
    checkpoint[15] = 52  # the end of its timer log
    (rig.root / "config").mkdir(exist_ok=True)
    (rig.root / "config" / "timercheck").write_bytes(checkpoint)
    rig.clocks.advance(6_000)
    rig.start()
    rig.run()
    assert not rig.delivered()
    rig.after(3_000)

    assert rig.delivered().keys() == {"9000"}


def test_messages_of_an_official_broker_are_delivered(tmp_path: Path) -> None:
    """Those that wait there, once; not those that it delivered, or that were or are recalled."""
    golden = unpack("timer", tmp_path)
    clocks = Clocks(1_795_257_860_000)
    store = MessageStore(golden_config(golden), now_ms=lambda: clocks.wall)
    store.open()
    service = delay_service(store, golden.root, clocks, DelayLevels(LEVELS))
    before = {one.physical_offset for one in everything(store)}
    service.load()
    waiting = {
        message["msgId"]: message["what"]
        for message in golden.truth["client_log"]
        if message["what"].startswith("pending")
    }
    assert service.waiting == len(waiting)
    recalled = next(iter(waiting))
    del waiting[recalled]
    theirs = urlsafe_b64encode(f"v1 timer_t broker-a 0 {recalled}".encode()).decode()
    assert service.recall(parse_recall_handle(theirs)).unique_key == recalled

    clocks.advance(4 * DAY_MS)
    while service.tick() == 0:
        flush(store)
    flush(store)
    new = [one for one in everything(store) if one.physical_offset not in before]
    store.close()

    delivered = [one for one in new if one.topic != TIMER_TOPIC]
    assert Counter(one.property_map["UNIQ_KEY"] for one in delivered) == Counter(waiting.keys())
    assert {one.topic for one in delivered} == {"timer_t"}
