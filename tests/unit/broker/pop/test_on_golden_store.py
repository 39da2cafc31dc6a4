"""Pop on a store that Apache RocketMQ 5.3.3 wrote, with messages in flight."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from halfmq.remoting.codes import RequestCode
from halfmq.remoting.pop import PopMessageRequestHeader
from halfmq.store.format.record import decode_records
from tests.support.broker_doubles import START_MS
from tests.support.golden_store import unpack
from tests.support.race_windows import Rig, windowed

LATER_MS = 1_795_264_000_000
"""After everything in the golden stores is due."""

ACKNOWLEDGED = {0, 2, 4, 6, 10}
"""Numbers in the bodies; all others of 24 messages are in flight, or were never popped."""


@pytest.mark.parametrize("name", ["pop-clean", "pop-killed"])
@windowed(
    commit_log_file_size=16_384,
    consume_queue_file_size=1_000,
    max_message_size=8_192,
    max_hash_slots=100,
    max_index_items=400,
)
async def test_what_rocketmq_has_in_flight_comes_again(rig: Rig, name: str) -> None:
    """Each message that was not acknowledged once, and no other; all are due by now."""
    await rig.stop()
    golden = unpack(name, rig.root.parent / "golden")
    rig.root = Path(shutil.move(golden.root, rig.root.parent / "taken-over"))
    rig.clock_ahead_ms = LATER_MS - START_MS
    await rig.start()
    peer = await rig.peer("cg_pop")
    header = PopMessageRequestHeader(
        consumer_group="cg_pop",
        topic="pop_t",
        queue_id=-1,
        max_msg_nums=32,
        invisible_time=3_600_000,
        poll_time=0,
    )
    seen: Counter[bytes] = Counter()
    for _ in range(12):
        answer = await peer.call(RequestCode.POP_MESSAGE, header)
        seen.update(one.body for one in decode_records(answer.body))
        await rig.wait(1_000)
    expected = {b"pop %d" % number: 1 for number in range(24) if number not in ACKNOWLEDGED}
    assert seen == expected
