"""PREPARE_TRANSACTION: several messages, all halves or none, and when more are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from halfmq.broker.config import TransactionConfig
from halfmq.broker.transaction.deciding import DecisionRequest
from halfmq.broker.transaction.state.state_machine import TransactionEvent
from halfmq.remoting.codes import HeaderType, ResponseCode
from halfmq.remoting.own_requests import GROUP_MESSAGES_MAX, PreparedMessage, PreparedResult
from halfmq.store.format.ids import parse_offset_message_id
from halfmq.store.format.topics import HALF_TOPIC, TIMER_TOPIC
from tests.support.prepares import Prepares, part
from tests.support.transactions import end_now

ILLEGAL = ResponseCode.MESSAGE_ILLEGAL
THREE = (
    part("K0", b"row 0", topic="orders", queue_id=0),
    part("K1", b"row 1", topic="payments", queue_id=3),
    part("K2", b"row 2", topic="orders", queue_id=2, TAGS="t"),
)


@pytest.fixture
def sends(tmp_path: Path) -> Prepares:
    """A broker without messages."""
    return Prepares(tmp_path)


def _end(sends: Prepares, half: PreparedResult, event: TransactionEvent, group: str = "pg") -> None:
    offset = parse_offset_message_id(half.message_id).physical_offset
    end_now(
        sends.broker.service.decisions, DecisionRequest(offset, half.queue_offset, group, event)
    )
    sends.broker.log.flush()


def test_the_halves_are_contiguous_and_answered_by_their_ids(sends: Prepares) -> None:
    """The answer has the position of each, in the order of the request."""
    results = sends.prepare_several(*THREE)

    halves = sends.broker.records_of(HALF_TOPIC)
    assert [one.body for one in halves] == [b"row 0", b"row 1", b"row 2"]
    for half, result in zip(halves, results, strict=True):
        offset = parse_offset_message_id(result.message_id).physical_offset
        assert (half.physical_offset, half.queue_offset) == (offset, result.queue_offset)
    assert [result.queue_id for result in results] == [0, 3, 2]
    assert [one.property_map["TRANSACTION_GROUP"] for one in halves] == [
        "K0,0,3",
        "K0,1,3",
        "K0,2,3",
    ]
    assert {(one.property_map["TRAN_MSG"], one.property_map["PGROUP"]) for one in halves} == {
        ("true", "pg")
    }
    assert sends.broker.service.metrics()["pending"] == 1


def test_each_message_may_have_its_own_delay(sends: Prepares) -> None:
    """It counts from the commit of all."""
    now, later = part("K0"), part("K1", TRANSACTION_DELAY_MS="60000")
    leader, _ = sends.prepare_several(now, later)
    _end(sends, leader, TransactionEvent.COMMIT)

    assert len(sends.broker.records_of("orders")) == 1
    (waiting,) = sends.broker.records_of(TIMER_TOPIC)
    assert waiting.property_map["UNIQ_KEY"] == "K1"


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("event", [None, TransactionEvent.COMMIT])
def test_a_repeated_prepare_gets_the_ids_of_the_first(
    sends: Prepares, event: TransactionEvent | None, restarted: bool
) -> None:
    first = sends.prepare_several(*THREE)
    if event is not None:
        _end(sends, first[0], event)
    if restarted:
        sends.restart()
    end = sends.broker.log.write_offset

    assert sends.prepare_several(*THREE) == first
    assert sends.broker.log.write_offset == end


def test_a_transaction_sent_again_after_its_rollback_is_a_new_one(sends: Prepares) -> None:
    """Its commit must count."""
    first = sends.prepare_several(*THREE)
    _end(sends, first[0], TransactionEvent.ROLLBACK)
    again = sends.prepare_several(*THREE)
    _end(sends, again[0], TransactionEvent.COMMIT)

    assert again != first
    assert len(sends.broker.records_of("orders")) == 2


@pytest.mark.parametrize(
    "other",
    [
        THREE[:2],
        THREE[:1],
        (*THREE[:2], part("K2", b"another row 2", queue_id=2)),
        (THREE[0], THREE[2], THREE[1]),
        (*THREE, part("K3")),
    ],
)
def test_other_messages_under_the_same_key_are_another_transaction(
    sends: Prepares, other: tuple[PreparedMessage, ...]
) -> None:
    """A message that was not stored must not be answered for."""
    first = sends.prepare_several(*THREE)

    again = sends.prepare_several(*other)

    assert not {one.message_id for one in first} & {one.message_id for one in again}


def test_a_single_prepare_is_no_duplicate_of_one_of_several(sends: Prepares) -> None:
    """Nor the other way round: a member of a group is not decided alone."""
    several = sends.prepare_several(*THREE)
    alone = sends.prepare("K0", b"row 0", queue_id=0)
    single = sends.prepare_several(part("K0", b"row 0", queue_id=0))

    assert alone.msg_id not in {one.message_id for one in several}
    assert single[0].message_id == alone.msg_id


@pytest.mark.parametrize(
    ("bad", "code", "told"),
    [
        (part("K9", b""), ResponseCode.SYSTEM_ERROR, "no body"),
        (part("K9", b"x" * 10_001), ILLEGAL, "body length limit"),
        (part("K9", topic="absent"), ResponseCode.TOPIC_NOT_EXIST, "absent"),
        (part("K9", topic=HALF_TOPIC), ResponseCode.NO_PERMISSION, "forbidden"),
        (part("K9", queue_id=99), ResponseCode.INVALID_PARAMETER, "queueId[99]"),
        (part("K9", DELAY="3"), ILLEGAL, "DELAY: "),
        (part("K9", TIMER_DELAY_MS="3"), ILLEGAL, "TIMER_DELAY_MS: "),
        (part("K9", TRANSACTION_DELAY_MS="soon"), ILLEGAL, "whole milliseconds"),
        (part("K9", TRAN_MSG="false"), ILLEGAL, "TRAN_MSG=false"),
        (part("K9", PGROUP="others"), ILLEGAL, "leave it out, or set it to pg"),
        (part("K9", sys_flag="8"), ILLEGAL, "sysFlag 0x8"),
        (part("K9", X="x" * 31_000), ILLEGAL, "send fewer"),
        (part("K0", b"another"), ILLEGAL, "the same UNIQ_KEY"),
        (part("K9", b"x" * 9_000), None, ""),
    ],
)
def test_a_transaction_is_prepared_completely_or_not_at_all(
    sends: Prepares, bad: PreparedMessage, code: ResponseCode | None, told: str
) -> None:
    """If one message is refused, all are, with the reason."""
    request = sends.several(THREE[0], bad, THREE[2])
    if code is None:
        (answer,) = sends.arrive(request)
        assert answer.code == ResponseCode.SUCCESS
    else:
        refused_with, remark = sends.refused(request)
        assert refused_with == code
        assert told in remark


def test_the_messages_of_a_transaction_must_fit_one_file_of_the_log(sends: Prepares) -> None:
    """The finals too, which are longer: otherwise the transaction could never be committed."""
    code, remark = sends.refused(sends.several(*(part(f"K{n}", b"x" * 9_000) for n in range(10))))

    assert code == ILLEGAL
    assert "mappedFileSizeCommitLog" in remark


def test_a_transaction_without_a_group_is_refused(sends: Prepares) -> None:
    """Nobody could be asked about it."""
    code, remark = sends.refused(sends.several(*THREE, group=""))

    assert code == ILLEGAL
    assert "producerGroup is empty" in remark


def test_too_many_messages_in_a_transaction_are_refused(sends: Prepares) -> None:
    """The limit is part of the format."""
    code, _ = sends.refused(sends.several(*(part(f"K{n}") for n in range(GROUP_MESSAGES_MAX + 1))))

    assert code == ResponseCode.SYSTEM_ERROR
    assert len(sends.prepare_several(*(part(f"K{n}") for n in range(GROUP_MESSAGES_MAX)))) == 64


def test_a_refused_append_leaves_nothing(sends: Prepares) -> None:
    """The same transaction sent again, when the disk has room, is a new one."""
    sends.broker.log.failing = True
    sends.refused(sends.several(*THREE))
    sends.broker.log.failing = False
    assert sends.broker.service.metrics()["pending"] == 0

    assert sends.prepare_several(*THREE)[0].queue_offset == 0


def test_it_is_answered_in_the_header_of_the_request(sends: Prepares) -> None:
    """Another client than ours may send it, too."""
    assert len(sends.prepare_several(*THREE, header_type=HeaderType.JSON)) == 3


# --- too many, and too fast


def test_beyond_the_limit_of_undecided_halves_prepares_are_refused(tmp_path: Path) -> None:
    """By a code on which clients try again; decisions are served, and make room."""
    sends = Prepares(tmp_path, config=TransactionConfig(pending_max=4))
    sends.prepare_several(*THREE)
    last = sends.prepare("L")

    for request in (sends.request("M"), sends.several(*THREE[:1])):
        code, remark = sends.refused(request)
        assert code == ResponseCode.SYSTEM_BUSY
        assert "4 half messages are undecided, and transactionPendingMax=4" in remark
    assert sends.broker.service.metrics()["prepares_refused"] == 2

    offset = parse_offset_message_id(last.msg_id).physical_offset
    end_now(
        sends.broker.service.decisions,
        DecisionRequest(offset, last.queue_offset, "pg", TransactionEvent.COMMIT),
    )
    sends.prepare("M")


@pytest.mark.parametrize("transactional", [True, False])
def test_prepares_are_refused_while_the_disk_is_too_slow(
    sends: Prepares, transactional: bool
) -> None:
    """Decisions are accepted: their handler does not test this."""
    sends.overload.begin("disk_behind", ResponseCode.SYSTEM_BUSY, "the disk is behind")
    plain: dict[str, Any] = {} if transactional else {"TRAN_MSG": "", "sys_flag": 0}

    assert sends.refusal("K", **plain) == (ResponseCode.SYSTEM_BUSY, "the disk is behind")
    code, _ = sends.refused(sends.several(*THREE))
    assert code == ResponseCode.SYSTEM_BUSY

    sends.overload.end("disk_behind")
    sends.prepare("K")
