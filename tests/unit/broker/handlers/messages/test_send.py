"""What a prepare may not ask for, and how the refusal says what to do instead."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from halfmq.broker.config import TransactionConfig
from halfmq.broker.delay.levels import DELAY_MS_MAX
from halfmq.broker.transaction.admission import FINAL_RESERVE
from halfmq.broker.transaction.deciding import DecisionRequest
from halfmq.broker.transaction.state.state_machine import TransactionEvent
from halfmq.remoting.codes import ResponseCode
from halfmq.store.format.batch import BatchUnit, encode_batch
from halfmq.store.format.ids import parse_offset_message_id
from halfmq.store.format.properties import PROPERTIES_SIZE_MAX
from halfmq.store.format.topics import HALF_TOPIC
from tests.support.broker_doubles import START_MS
from tests.support.prepares import Prepares, accepted
from tests.support.transactions import end_now

ILLEGAL = ResponseCode.MESSAGE_ILLEGAL
BATCH: dict[str, Any] = {"batch": True, "sys_flag": 0, "TRAN_MSG": "", "PGROUP": ""}


@pytest.fixture
def sends(tmp_path: Path) -> Prepares:
    """A broker without messages."""
    return Prepares(tmp_path)


def test_a_message_that_claims_to_be_a_batch_is_refused(sends: Prepares) -> None:
    """Consumers and the audit would read its body as the messages of a batch."""
    code, remark = sends.refusal(sys_flag=0x80, TRAN_MSG="", PGROUP="")

    assert code == ILLEGAL
    assert "send a batch (320), or clear the bit" in remark


def test_a_batch_cannot_be_transactional(sends: Prepares) -> None:
    """Its messages would be visible before anything is decided."""
    code, remark = sends.refusal(batch=True)

    assert code == ILLEGAL
    assert "one by one" in remark


NOT_IN_BATCHES = [
    ("TRAN_MSG", "true"),
    ("TRAN_MSG", "TRUE"),
    ("DELAY", "1"),
    ("DELAY", "18"),
    ("TIMER_DELAY_SEC", "3"),
    ("TIMER_DELAY_MS", "3"),
    ("TIMER_DELIVER_MS", "3"),
]


@pytest.mark.parametrize(("name", "value"), NOT_IN_BATCHES)
@pytest.mark.parametrize("place", [0, 2, 4])
@pytest.mark.parametrize("alike", [False, True])
def test_a_unit_of_a_batch_cannot_ask_for_what_single_messages_have(
    sends: Prepares, name: str, value: str, place: int, *, alike: bool
) -> None:
    """It would be delivered at once; the refusal names the unit and the property."""
    asked = f"{name}\x01{value}\x02".encode()
    units = [
        BatchUnit(
            0, b"body", b"UNIQ_KEY\x01%032d\x02" % number + asked * (alike or number == place)
        )
        for number in range(5)
    ]
    code, remark = sends.refusal(body=encode_batch(units), **BATCH)

    assert code == ILLEGAL
    assert f"unit {0 if alike else place} of the batch (counted from 0)" in remark
    assert f"{name}={value}" in remark


@pytest.mark.parametrize(("name", "value"), NOT_IN_BATCHES)
def test_a_batch_as_a_whole_cannot_ask_for_it_either(
    sends: Prepares, name: str, value: str
) -> None:
    """What the request says is added to every unit."""
    asked: dict[str, Any] = BATCH | {name: value}
    code, remark = sends.refusal(body=encode_batch([BatchUnit(0, b"body", b"")]), **asked)

    assert code == ILLEGAL
    assert f"The batch has {name}={value}" in remark


@pytest.mark.parametrize("name", ["DELAY", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS"])
def test_a_half_cannot_be_delayed(sends: Prepares, name: str) -> None:
    """The refusal names what counts from the commit instead."""
    asked: dict[str, Any] = {name: "3"}
    code, remark = sends.refusal(**asked)

    assert code == ILLEGAL
    assert remark.startswith(f"{name}: ")
    assert "set TRANSACTION_DELAY_MS" in remark
    assert "TRANSACTION_DELIVER_MS" in remark


def test_delay_level_zero_delays_nothing(sends: Prepares) -> None:
    """Clients write it for "no delay"."""
    sends.prepare("K", DELAY="0")


@pytest.mark.parametrize(
    ("properties", "told"),
    [
        ({"TRANSACTION_DELAY_MS": "soon"}, "whole milliseconds after the commit"),
        ({"TRANSACTION_DELAY_MS": "-1"}, "whole milliseconds after the commit"),
        ({"TRANSACTION_DELAY_MS": "²"}, "whole milliseconds after the commit"),
        ({"TRANSACTION_DELIVER_MS": "٣"}, "milliseconds since 1970"),
        ({"TRANSACTION_DELAY_MS": "1.5"}, "whole milliseconds after the commit"),
        ({"TRANSACTION_DELAY_MS": str(DELAY_MS_MAX + 1)}, "40 days"),
        ({"TRANSACTION_DELAY_MS": "9" * 5_000}, "40 days"),
        ({"TRANSACTION_DELIVER_MS": "tomorrow"}, "milliseconds since 1970"),
        ({"TRANSACTION_DELIVER_MS": str(START_MS + DELAY_MS_MAX + 1)}, "40 days from now"),
        ({"TRANSACTION_DELAY_MS": "1", "TRANSACTION_DELIVER_MS": "1"}, "set one of them"),
    ],
)
def test_an_invalid_delivery_time_is_refused(
    sends: Prepares, properties: dict[str, Any], told: str
) -> None:
    """With what was expected; a message delivered at the wrong time would not be noticed."""
    code, remark = sends.refusal(**properties)

    assert code == ILLEGAL
    assert told in remark


@pytest.mark.parametrize(
    "properties",
    [
        {"TRANSACTION_DELAY_MS": str(DELAY_MS_MAX)},
        {"TRANSACTION_DELIVER_MS": "1"},
        {"TRANSACTION_DELIVER_MS": str(START_MS + DELAY_MS_MAX)},
    ],
)
def test_delivery_times_up_to_the_limit_are_taken(
    sends: Prepares, properties: dict[str, Any]
) -> None:
    """A time that has passed means: at once."""
    sends.prepare("K", **properties)


def test_a_half_without_a_group_is_refused(sends: Prepares) -> None:
    """No producer could be asked about it."""
    code, remark = sends.refusal(group="")

    assert code == ILLEGAL
    assert "PGROUP: set it to the producer group" in remark


def test_transactions_can_be_forbidden(tmp_path: Path) -> None:
    sends = Prepares(tmp_path, config=TransactionConfig(reject=True))
    code, remark = sends.refusal()

    assert code == ResponseCode.NO_PERMISSION
    assert "rejectTransactionMessage=true" in remark


def test_an_invalid_immunity_time_is_the_default_and_logged(
    sends: Prepares, caplog: pytest.LogCaptureFixture
) -> None:
    """As in RocketMQ; it is logged once."""
    caplog.set_level(logging.WARNING)
    for key in ("K1", "K2", "K3"):
        sends.prepare(key, CHECK_IMMUNITY_TIME_IN_SECONDS="soon")
    sends.prepare("K4", CHECK_IMMUNITY_TIME_IN_SECONDS="0")

    assert [entry.immunity_s for entry in sends.broker.table] == [0] * 4
    assert caplog.text.count("event=immunity_ignored") == 1
    assert "'soon'" in caplog.text


@pytest.mark.parametrize("long_path", [False, True])
def test_a_half_leaves_room_for_its_decision(sends: Prepares, long_path: bool) -> None:
    """A message that can be prepared can be committed, whatever the commit adds to it."""
    extra: dict[str, Any] = {"TRANSACTION_DELAY_MS": "60000"} if long_path else {}
    stored = sends.prepare("K0", X="x", **extra)
    offset = parse_offset_message_id(stored.msg_id).physical_offset
    record = sends.broker.log.record_at(offset)
    assert record is not None
    added = len(b"REAL_TOPIC\x01orders\x02REAL_QID\x011\x02__transactionId__\x01K0\x02")
    room = PROPERTIES_SIZE_MAX - FINAL_RESERVE - (len(record.properties) - added)

    largest = sends.prepare("K1", X="x" * (room + 1), **extra)
    code, remark = sends.refusal("K2", X="x" * (room + 2), **extra)

    assert code == ILLEGAL
    assert "send fewer" in remark
    offset = parse_offset_message_id(largest.msg_id).physical_offset
    end_now(
        sends.broker.service.decisions,
        DecisionRequest(offset, largest.queue_offset, "pg", TransactionEvent.COMMIT),
    )


@pytest.mark.parametrize("key_size", [32, 128, 129, 600, 5_000])
@pytest.mark.parametrize("extra", [{}, {"TRANSACTION_DELAY_MS": "60000"}])
def test_a_long_key_leaves_room_for_the_decision_as_well(
    sends: Prepares, key_size: int, extra: dict[str, Any]
) -> None:
    """The half holds its key twice, and what it adds must not take the room of the commit."""
    too_long = PROPERTIES_SIZE_MAX
    size = 0
    while too_long - size > 1:
        middle = (size + too_long) // 2
        key = f"{middle:0{key_size}d}"
        (answer,) = sends.arrive(sends.request(key, X="x" * middle, **extra))
        if answer.code == ResponseCode.SUCCESS:
            size, largest = middle, accepted(answer)
        else:
            too_long = middle
            assert "send fewer" in (answer.remark or "")

    offset = parse_offset_message_id(largest.msg_id).physical_offset
    ended = end_now(
        sends.broker.service.decisions,
        DecisionRequest(offset, largest.queue_offset, "pg", TransactionEvent.COMMIT),
    )

    final = sends.broker.log.record_at(ended.final_offset or 0)
    assert final is not None
    assert "TRANSACTION_HALF_ID" in final.property_map
    assert len(final.properties) <= PROPERTIES_SIZE_MAX


def test_properties_of_the_broker_are_removed_from_a_prepare(sends: Prepares) -> None:
    """A forwarded message must not look like part of another transaction."""
    sends.prepare("K", TRANSACTION_GROUP="X,1,3", TRANSACTION_HALVES="1", TRANSACTION_HALF_ID="A")

    (half,) = sends.broker.records_of(HALF_TOPIC)
    assert not {name for name in half.property_map if name.startswith("TRANSACTION_")}
