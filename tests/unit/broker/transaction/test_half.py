"""The half record, and the records made from it."""

from pathlib import Path

import pytest

from halfmq.broker.transaction.half import (
    IMMUNITY_S_MAX,
    GroupMembership,
    group_membership,
    half_request,
    immunity_s,
    mark_in_group,
    other_halves,
    parse_half,
)
from halfmq.broker.transaction.half_records import (
    bare_request,
    check_body,
    committed,
    final_request,
    parked_request,
    prepared_final,
    rollback_request,
)
from halfmq.broker.transaction.state.state_machine import ParkedReason
from halfmq.store.format.flags import COMPRESSED, NO_QUEUE_ENTRY, TransactionType, transaction_type
from halfmq.store.format.ids import pack_host
from halfmq.store.format.index import index_keys
from halfmq.store.format.properties import decode_properties
from halfmq.store.format.record import decode_record, encode_record, seal_crc_tail, with_crc_tail
from halfmq.store.format.topics import HALF_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC
from halfmq.store.log.append_request import AppendRequest
from tests.support.broker_doubles import START_MS
from tests.support.golden_store import unpack
from tests.support.transactions import HOST, PEER, golden_log, message, record_of

OFFSET = 73_400_320
KEY = "7F000001A1B2C3D4E5F600000001"


def stored(draft: AppendRequest, *, offset: int = OFFSET, queue_offset: int = 12) -> bytes:
    """Return the bytes of the record that the log holds for a request."""
    return encode_record(record_of(draft, offset, queue_offset, START_MS + 3))


def test_a_half_is_the_message_under_another_topic() -> None:
    """Only topic, queue and transaction bits change; properties keep the real topic and queue."""
    original = message(key=KEY, queue_id=3)
    original.sys_flag |= COMPRESSED

    half = half_request(original, KEY)

    assert (half.topic, half.queue_id, half.sys_flag) == (HALF_TOPIC, 0, COMPRESSED)
    assert decode_properties(half.properties) == decode_properties(original.properties) | {
        "REAL_TOPIC": "orders",
        "REAL_QID": "3",
        "__transactionId__": KEY,
    }
    for field in ("body", "flag", "born_timestamp", "born_host", "store_host", "reconsume_times"):
        assert getattr(half, field) == getattr(original, field)
    assert half.prepared_transaction_offset == 0


def test_properties_without_their_last_separator_are_completed() -> None:
    """Clients of RocketMQ 4.9 omit the last 0x02; it must not join two values."""
    original = message(key=KEY, properties={"TAGS": "TagA"})
    original.properties = original.properties.removesuffix(b"\x02")

    half = half_request(original, KEY)

    assert decode_properties(half.properties)["TAGS"] == "TagA"
    assert decode_properties(half.properties)["REAL_TOPIC"] == "orders"


def test_marks_of_check_copies_are_removed_from_a_producers_message() -> None:
    """With these marks, a forwarded message would count as a copy of another half."""
    marks = {"TRANSACTION_CHECK_TIMES": "3", "TRAN_PREPARED_QUEUE_OFFSET": "9", "keep": "me"}

    half = decode_properties(half_request(message(key=KEY, properties=marks), KEY).properties)

    assert half["keep"] == "me"
    assert "TRANSACTION_CHECK_TIMES" not in half
    assert "TRAN_PREPARED_QUEUE_OFFSET" not in half


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (b"30", 30),
        (b"0", 0),
        (b"-5", 0),
        (b"soon", 0),
        (b"1.5", 0),
        (b"259201", IMMUNITY_S_MAX),
        (b"9" * 6_000, IMMUNITY_S_MAX),
    ],
)
def test_immunity_is_a_number_of_seconds_up_to_the_maximum(text: bytes, seconds: int) -> None:
    """Anything else requests no immunity; no half outlives the log because of it."""
    assert immunity_s(b"CHECK_IMMUNITY_TIME_IN_SECONDS\x01%b\x02" % text) == seconds
    assert immunity_s(b"X_CHECK_IMMUNITY_TIME_IN_SECONDS\x01%b\x02" % text) == 0


@pytest.mark.parametrize("name", ["tx-midway-killed", "tx-midway-clean", "v4-tx"])
def test_final_messages_are_those_of_rocketmq(name: str, tmp_path: Path) -> None:
    """Each final record an official broker wrote equals the one made from the half it links to."""
    log = golden_log(unpack(name, tmp_path))
    finals = [record for record in log.records() if record.sys_flag & 0xC == 0x8]
    assert len(finals) > 10
    for final in finals:
        half = log.record_bytes(final.prepared_transaction_offset)
        assert half is not None
        parsed = parse_half(half, final.prepared_transaction_offset)
        assert parsed is not None
        made = record_of(
            final_request(parsed), final.physical_offset, final.queue_offset, final.store_timestamp
        )
        ours = decode_record(encode_record(made))
        assert ours.property_map == final.property_map
        assert ours._replace(properties=b"", total_size=0) == final._replace(
            properties=b"", total_size=0
        )


def test_ipv6_hosts_are_kept_and_a_checksum_tail_is_dropped_in_the_final_message() -> None:
    """The layout depends on the hosts, and the old checksum would be wrong."""
    original = message(key=KEY, properties={"TAGS": "TagA"})
    original.born_host = pack_host("2001:db8::7", 50_000)
    half = half_request(original, KEY)
    half.properties = with_crc_tail(half.properties)
    record = seal_crc_tail(stored(half))

    parsed = parse_half(record, OFFSET)

    assert parsed is not None
    final = final_request(parsed)
    assert (final.topic, final.queue_id, final.body) == ("orders", 1, b"row 1")
    assert (final.born_host, final.sys_flag) == (original.born_host, 0x8)
    assert final.tags_code == original.tags_code
    assert b"__CRC32#" not in final.properties
    assert b"__CRC32#" not in decode_record(check_body(parsed, 1)).properties


def test_the_final_message_links_to_its_half() -> None:
    """Field 14 shows in the log alone which half was committed."""
    parsed = parse_half(stored(half_request(message(key=KEY), KEY)), OFFSET)

    assert parsed is not None
    final = final_request(parsed)
    original = message(key=KEY)
    assert final == prepared_final(original, half_request(original, KEY), OFFSET)
    assert (final.prepared_transaction_offset, final.sys_flag) == (73_400_320, 0x8)
    assert (final.flag, final.reconsume_times) == (7, 2)
    assert decode_properties(final.properties)["TRAN_MSG"] == "true"


def test_half_and_final_are_indexed_by_the_keys_of_their_message() -> None:
    """A rollback record is not in the index."""
    original = message(key=KEY)
    half = half_request(original, KEY)
    final = prepared_final(original, half, OFFSET)

    assert transaction_type(rollback_request(final).sys_flag) is TransactionType.ROLLBACK
    for draft in (half, final, committed(final)):
        assert index_keys(draft.properties) == [KEY.encode()]


def test_a_final_message_carries_the_id_of_its_half() -> None:
    """Consumers identify the transaction by it; it is the same from memory and from the log."""
    original = message(key=KEY)
    half = half_request(original, KEY)
    parsed = parse_half(stored(half), OFFSET)
    assert parsed is not None

    final = committed(final_request(parsed))

    assert final == committed(prepared_final(original, half, OFFSET))
    half_id = "7F00000100002A9F0000000004600000"
    assert decode_properties(final.properties)["TRANSACTION_HALF_ID"] == half_id
    assert decode_properties(final.properties) == decode_properties(half.properties) | {
        "TRANSACTION_HALF_ID": half_id
    }


def test_a_final_message_without_room_for_the_half_id_is_delivered_without_it() -> None:
    """A half written by Apache RocketMQ may leave no room for it."""
    original = message(key=KEY, properties={"x": "y" * 32_550})
    half = half_request(original, KEY)

    final = committed(prepared_final(original, half, OFFSET))

    assert final.properties == half.properties


def test_a_half_of_several_names_its_leader_its_index_and_their_number() -> None:
    """The real topic and queue are still found."""
    half = mark_in_group(
        half_request(message(key=KEY, queue_id=3), KEY), GroupMembership(b"A,1,B", 2, 64)
    )

    assert group_membership(half.properties) == GroupMembership(b"A,1,B", 2, 64)
    parsed = parse_half(stored(half), OFFSET)
    assert parsed is not None
    final = final_request(parsed)
    assert (final.topic, final.queue_id) == ("orders", 3)


@pytest.mark.parametrize(
    "properties",
    [
        b"",
        b"TRANSACTION_GROUP\x01\x02",
        b"TRANSACTION_GROUP\x01key,1\x02",
        b"TRANSACTION_GROUP\x01key,-1,2\x02",
        b"TRANSACTION_GROUP\x01key,one,2\x02",
        b"MY_TRANSACTION_GROUP\x01key,1,2\x02",
    ],
)
def test_a_half_without_a_valid_group_property_is_a_transaction_of_its_own(
    properties: bytes,
) -> None:
    """A message must not be lost in a group that does not exist."""
    assert group_membership(properties) is None


def test_the_leaders_decision_names_the_other_halves() -> None:
    """Final message and rollback record name them in the order of the messages."""
    original = message(key=KEY)
    half = half_request(original, KEY)
    beside = [OFFSET + 300, OFFSET + 600]

    rollback = rollback_request(prepared_final(original, half, OFFSET), beside)
    final = committed(prepared_final(original, half, OFFSET), beside)

    assert other_halves(final.properties) == other_halves(rollback.properties) == beside
    assert other_halves(committed(prepared_final(original, half, OFFSET)).properties) == []
    assert other_halves(b"TRANSACTION_HALVES\x01a,5,,x\x02") == [5]


@pytest.mark.parametrize("kind", [TransactionType.ROLLBACK, TransactionType.PREPARED])
def test_a_record_without_the_half_enters_no_queue_and_no_index(kind: TransactionType) -> None:
    """Apache RocketMQ puts it in no queue, and finds no key to index."""
    bare = bare_request(OFFSET, "pg", kind, now_ms=START_MS, host=HOST)

    assert (bare.topic, bare.body, bare.sys_flag) == (HALF_TOPIC, b"", int(kind))
    assert bare.prepared_transaction_offset == OFFSET
    assert bare.sys_flag & NO_QUEUE_ENTRY
    assert set(decode_properties(bare.properties)) == {"PGROUP"}
    assert parse_half(stored(bare), OFFSET) is None


def test_a_rollback_record_has_no_body_and_enters_no_queue_and_no_index() -> None:
    """It links to its half as a final message does."""
    parsed = parse_half(stored(half_request(message(key=KEY, body=b"x" * 9_999), KEY)), OFFSET)

    assert parsed is not None
    rollback = rollback_request(final_request(parsed))
    assert (rollback.topic, rollback.queue_id, rollback.body) == (HALF_TOPIC, 0, b"")
    assert rollback.prepared_transaction_offset == 73_400_320
    assert transaction_type(rollback.sys_flag) is TransactionType.ROLLBACK
    assert decode_properties(rollback.properties) == {
        "PGROUP": "pg",
        "UNIQ_KEY": KEY,
        "__transactionId__": KEY,
    }
    assert parse_half(stored(rollback), OFFSET) is None


def test_a_parked_copy_is_a_visible_message_that_links_to_its_half() -> None:
    """Operators find in it everything that they need to decide."""
    half = half_request(message(key=KEY, properties={"TAGS": "TagA"}), KEY)
    parsed = parse_half(stored(half), OFFSET)

    assert parsed is not None
    parked = parked_request(parsed, ParkedReason.NO_ANSWER)
    assert (parked.topic, parked.queue_id, parked.sys_flag) == (TRANS_CHECK_MAX_TIME_TOPIC, 0, 0)
    assert parked.body == half.body
    assert parked.properties == half.properties + b"TRANSACTION_PARKED\x01no-answer\x02"
    assert (parked.flag, parked.prepared_transaction_offset) == (7, 73_400_320)
    assert parked.tags_code == half.tags_code


def test_a_check_shows_the_message_under_its_real_topic() -> None:
    """Clients decode the body as a stored record and pass it to the user's listener."""
    half = half_request(message(key=KEY, queue_id=3), KEY)
    parsed = parse_half(stored(half), OFFSET)
    assert parsed is not None

    asked = decode_record(check_body(parsed, 2))

    assert (asked.topic, asked.queue_id, asked.body) == ("orders", 3, b"row 1")
    assert (asked.physical_offset, asked.queue_offset) == (73_400_320, 12)
    assert (asked.born_host, asked.store_host, asked.born_timestamp) == (PEER, HOST, START_MS)
    assert asked.property_map == decode_properties(half.properties) | {
        "TRANSACTION_CHECK_TIMES": "2"
    }


@pytest.mark.parametrize(
    "draft", [message(topic="orders"), message(topic=HALF_TOPIC), message(topic=HALF_TOPIC + "X")]
)
def test_other_records_are_not_parsed_as_a_half(draft: AppendRequest) -> None:
    """END_TRANSACTION can name any record of the log."""
    assert parse_half(stored(draft), OFFSET) is None


def test_a_half_without_its_topic_cannot_be_delivered() -> None:
    """A record of the half topic that prepare did not write may have no destination."""
    half = half_request(message(key=KEY), KEY)
    half.properties = b"PGROUP\x01pg\x02"
    record = stored(half)
    parsed = parse_half(record, OFFSET)

    assert parsed is not None
    with pytest.raises(ValueError, match="REAL_TOPIC"):
        final_request(parsed)
    with pytest.raises(ValueError, match="REAL_TOPIC"):
        check_body(parsed, 1)


def test_a_damaged_half_is_not_read() -> None:
    """Records made from it get a new checksum, so the old one must be valid."""
    record = stored(half_request(message(key=KEY, body=b"x" * 100), KEY))
    assert parse_half(record + b"what comes next", OFFSET) == parse_half(record, OFFSET) is not None

    assert parse_half(record, OFFSET + 1) is None
    assert parse_half(record.replace(b"xxxx", b"xxyx", 1), OFFSET) is None
    for end in range(len(record)):
        assert parse_half(record[:end], OFFSET) is None


def test_the_destination_is_found_in_a_half_written_by_rocketmq() -> None:
    """Its properties have another order and may lack the last separator."""
    half = half_request(message(key=KEY), KEY)
    half.properties = b"REAL_QID\x015\x02REAL_TOPIC\x01paid\x02PGROUP\x01pg"
    parsed = parse_half(stored(half), OFFSET)

    assert parsed is not None
    assert (final_request(parsed).topic, final_request(parsed).queue_id) == ("paid", 5)
