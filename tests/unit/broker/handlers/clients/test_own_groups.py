"""Groups of the broker itself: no client stores offsets for them, by whichever request."""

from __future__ import annotations

import pytest

from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.ext_fields import Header
from halfmq.remoting.headers import UpdateConsumerOffsetRequestHeader
from halfmq.store.format.topics import HALF_TOPIC
from tests.support.race_windows import Rig, windowed
from tests.support.usual_headers import pull_header

GROUP = "CID_RMQ_SYS_TRANS"
REQUESTS: list[tuple[RequestCode, Header]] = [
    (
        RequestCode.UPDATE_CONSUMER_OFFSET,
        UpdateConsumerOffsetRequestHeader(
            consumer_group=GROUP, topic=HALF_TOPIC, queue_id=0, commit_offset=7
        ),
    ),
    (
        RequestCode.PULL_MESSAGE,
        pull_header(
            consumer_group=GROUP,
            max_msg_nums=1,
            sys_flag=0x1 | 0x4,  # with an offset to store, and a subscription
            commit_offset=7,
        ),
    ),
]


@pytest.mark.parametrize(("code", "header"), REQUESTS, ids=["update", "pull"])
@windowed()
async def test_no_request_stores_an_offset_for_a_group_of_the_broker(
    rig: Rig, code: RequestCode, header: Header
) -> None:
    """The refusal says which names are free."""
    peer = await rig.peer()
    await peer.plain("K1")  # so that the topic exists
    answer = await peer.call(code, header)

    assert answer.code == ResponseCode.NO_PERMISSION
    assert f"group[{GROUP}]" in (answer.remark or "")
    assert "does not begin with CID_RMQ_SYS_" in (answer.remark or "")
    offsets = rig.tables.offsets
    assert [offsets.query(GROUP, topic, 0) for topic in (HALF_TOPIC, "orders")] == [-1, -1]
