"""Well-formed requests that ask for what is not their sender's, against a broker with sockets."""

from __future__ import annotations

import re
from struct import pack
from typing import Any, Final

import pytest

from halfmq.remoting.admin_headers import ConsumeMessageDirectlyRequestHeader
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.headers import ViewMessageRequestHeader
from halfmq.store.format.crc import crc32
from halfmq.store.format.ids import offset_message_id
from halfmq.store.format.record import decode_record
from halfmq.store.format.topics import HALF_TOPIC
from tests.support.access import PUBLISHER, STRANGER, SignedPeer
from tests.support.guarded_rig import Guarded, guarded
from tests.support.peers import COMMIT, Half

SECRET: Final = b"a message of somebody else"
REACH: Final = 1_000
"""Bytes after the forged record that its properties claim."""

# -- offsets inside of a message's body


async def _forge(guarded: Guarded, sender: SignedPeer, topic: str, properties: bytes) -> int:
    """Send a body that is a record whose properties reach into the next message; return where."""
    at = guarded.rig.store.write_offset + 88  # a record's head
    name = topic.encode()
    size = 88 + 1 + 1 + len(name) + 2 + len(properties) + REACH
    fake = pack(">iIiiiqqiq", size, 0xDAA320A7, crc32(b"m") & 0x7FFFFFFF, 0, 0, 0, at, 0, 0)
    fake += pack(">IiqIiiqi", 0, 0, 0, 0, 0, 0, 0, 1) + b"m" + bytes([len(name)]) + name
    fake += pack(">h", len(properties) + REACH) + properties
    assert (await sender.plain("K", fake, topic="payments")).code == 0
    return at


def _half(offset: int, group: str) -> Half:
    host = pack(">4Bi", 0, 0, 0, 0, 0)
    return Half(offset, 0, offset_message_id(host, offset), "K9", group, b"m")


@pytest.mark.parametrize("topic", ["payments", "%RETRY%theirs", HALF_TOPIC])
@guarded()
async def test_only_offsets_at_which_a_record_begins_are_served(
    guarded: Guarded, topic: str
) -> None:
    """Whichever request names one: a body that looks like a record is none."""
    stranger, publisher = [await guarded.peer(one) for one in (STRANGER, PUBLISHER)]
    properties = (
        b"REAL_TOPIC\x01payments\x02REAL_QID\x010\x02PGROUP\x01theirs\x02UNIQ_KEY\x01K9\x02"
        b"TRANSACTION_CHECK_TIMES\x011\x02TRAN_PREPARED_QUEUE_OFFSET\x010\x02SPY\x01"
    )
    at = await _forge(guarded, stranger, topic, properties)
    assert (await publisher.plain("K1", SECRET + b"." * REACH)).code == 0
    forged = guarded.rig.store.reader.record_bytes(at)
    assert forged is not None
    assert SECRET in decode_record(forged).properties
    half = _half(at, "theirs")

    view = ViewMessageRequestHeader(offset=at)
    directly = ConsumeMessageDirectlyRequestHeader(
        consumer_group="theirs", client_id=stranger.client_id, msg_id=half.message_id
    )
    before = guarded.rig.store.write_offset
    answers = [
        await stranger.call(RequestCode.VIEW_MESSAGE_BY_ID, view),
        await stranger.send_back(at, "theirs"),
        await stranger.call(RequestCode.CONSUME_MESSAGE_DIRECTLY, directly),
        await stranger.end(half, COMMIT),
        await stranger.end(half, COMMIT, from_check=True),
    ]
    named: dict[str, Any] = {"TRANSACTION_HALF_ID": half.message_id, "RETRY_TOPIC": "payments"}
    for one in answers:
        assert (one.code != 0, one.body) == (True, b"")
        assert re.match("can not find|look message|Find prepared", one.remark or "")
    assert guarded.rig.store.write_offset == before
    retry = await stranger.plain("K9", b"?", topic="%RETRY%theirs", reconsume_times=1, **named)
    assert retry.code == 0
    assert guarded.rig.records_of("%RETRY%theirs")[-1].body == b"?"
