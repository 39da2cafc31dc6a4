"""Messages that are delivered some time after their commit, whatever happens to the broker."""

from __future__ import annotations

import pytest

from halfmq.remoting.codes import ResponseCode
from halfmq.store.format.topics import SCHEDULE_TOPIC
from tests.support.peers import COMMIT
from tests.support.windows import HOUR_MS, Rig, windowed


@pytest.mark.parametrize("kill_after_ms", [0, 900, 1_050, 3_000, 6_100, 7_050, 7_600])
@windowed()
async def test_w01_a_delayed_commit_survives_a_kill_and_is_delivered_once(
    rig: Rig, kill_after_ms: int
) -> None:
    """While it waits, between two waits, and just after its delivery, before that is noted."""
    producer = await rig.peer()
    half = await producer.prepare("K1", TRANSACTION_DELAY_MS="7000")
    assert (await producer.end(half, COMMIT)).code == ResponseCode.SUCCESS
    await rig.wait(kill_after_ms, step_ms=50)
    await rig.kill()

    await rig.wait(6_950 - kill_after_ms, step_ms=50)
    early = rig.bodies() if kill_after_ms < 7_000 else []
    await rig.wait(1_200, step_ms=50)

    assert early == []
    assert rig.bodies() == [b"row 1"]
    producer = await rig.peer()
    assert (await producer.end(half, COMMIT)).code == ResponseCode.SUCCESS
    await rig.kill()
    await rig.wait(HOUR_MS)
    assert rig.bodies() == [b"row 1"]
    assert [record.topic for record in rig.finals_of(half)] == [SCHEDULE_TOPIC]
