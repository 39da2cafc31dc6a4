"""A consumer whose host vanishes: its connection stays open, and nothing more comes from it."""

from __future__ import annotations

import json

from halfmq.broker.net.server import IDLE_SCAN_S, IDLE_TIMEOUT_S
from halfmq.broker.tables.queue_locks import LOCK_EXPIRY_MS
from halfmq.remoting.bodies import decode_consumer_list, decode_locked_queues
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.headers import ConsumerGroupRequestHeader
from tests.support.peers import Peer
from tests.support.race_windows import Rig, windowed

BEAT_MS = 30_000
"""Between two heartbeats of a client."""


async def members(consumer: Peer) -> list[str]:
    header = ConsumerGroupRequestHeader(consumer_group="pg")
    answer = await consumer.call(RequestCode.GET_CONSUMER_LIST_BY_GROUP, header)
    return sorted(decode_consumer_list(answer.body))


async def owns(consumer: Peer) -> bool:
    """Whether the consumer gets, or renews, the lock of a queue."""
    queue = {"topic": "orders", "brokerName": "broker-a", "queueId": 0}
    body = {"consumerGroup": "pg", "clientId": consumer.client_id, "mqSet": [queue]}
    answer = await consumer.call(RequestCode.LOCK_BATCH_MQ, None, json.dumps(body).encode())
    return bool(decode_locked_queues(answer.body))


@windowed()
async def test_its_group_rebalances_and_its_locks_are_free_again(rig: Rig) -> None:
    """The connection is closed two minutes after its last byte; a lock expires a minute earlier."""
    survivor = await rig.peer(member=False, name="survivor")
    vanished = await rig.peer(member=False, name="vanished")
    for consumer in (survivor, vanished):
        await consumer.consume("orders")
    assert await owns(vanished)
    assert not await owns(survivor)
    rig.peers.remove(vanished)  # from here on it sends nothing
    survivor.requests.clear()
    begin = rig.loop.now_ms
    lock_free_ms = gone_ms = 0

    while not gone_ms:
        assert rig.loop.now_ms - begin < 2 * IDLE_TIMEOUT_S * 1_000
        await rig.wait(BEAT_MS // 6)
        await survivor.consume("orders")
        passed_ms = rig.loop.now_ms - begin
        if not lock_free_ms and await owns(survivor):
            lock_free_ms = passed_ms
        if await members(survivor) == ["survivor"]:
            gone_ms = passed_ms

    assert lock_free_ms <= LOCK_EXPIRY_MS + BEAT_MS // 6
    assert gone_ms >= IDLE_TIMEOUT_S * 1_000
    assert gone_ms <= (IDLE_TIMEOUT_S + 2 * IDLE_SCAN_S) * 1_000
    told = {request.code for request in survivor.requests}
    assert RequestCode.NOTIFY_CONSUMER_IDS_CHANGED in told
    await rig.wait(round(2 * IDLE_SCAN_S * 1_000))
    assert vanished.closed
