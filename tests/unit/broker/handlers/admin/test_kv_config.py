"""Settings that RocketMQ's tools keep with the name server."""

from __future__ import annotations

import json

import pytest

from halfmq.broker.limits.kept import KV_CHARACTERS
from halfmq.remoting.admin_headers import (
    BrokerNameRequestHeader,
    GetKVConfigResponseHeader,
    GetKVListByNamespaceRequestHeader,
    KVConfigRequestHeader,
    PutKVConfigRequestHeader,
)
from halfmq.remoting.bodies import decode_route, decode_table
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.header_tables import response_header
from halfmq.remoting.headers import GetRouteInfoRequestHeader
from tests.support.broker_doubles import ext
from tests.support.peers import Peer
from tests.support.race_windows import Rig, windowed

KEY = KVConfigRequestHeader(namespace="ORDER_TOPIC_CONFIG", key="orders")
NAMESPACE = GetKVListByNamespaceRequestHeader(namespace="ORDER_TOPIC_CONFIG")


async def put(peer: Peer, value: str = "broker-a:4") -> RemotingCommand:
    header = PutKVConfigRequestHeader(namespace=KEY.namespace, key=KEY.key, value=value)
    return await peer.call(RequestCode.PUT_KV_CONFIG, header)


@windowed()
async def test_a_value_is_kept_until_it_is_deleted(rig: Rig) -> None:
    """It is on disk when it is answered, as RocketMQ's name server keeps it."""
    peer = await rig.peer()
    missing = await peer.call(RequestCode.GET_KV_CONFIG, KEY)
    assert missing.code == ResponseCode.QUERY_NOT_FOUND
    assert missing.remark == "No config item, Namespace: ORDER_TOPIC_CONFIG Key: orders"
    none = await peer.call(RequestCode.GET_KVLIST_BY_NAMESPACE, NAMESPACE)
    assert none.code == ResponseCode.QUERY_NOT_FOUND
    assert (await put(peer)).code == 0
    file = json.loads((rig.root / "config" / "kvConfig.json").read_text())
    assert file["configTable"] == {"ORDER_TOPIC_CONFIG": {"orders": "broker-a:4"}}

    await rig.kill()
    peer = await rig.peer()
    answer = await peer.call(RequestCode.GET_KV_CONFIG, KEY)
    assert response_header(answer, GetKVConfigResponseHeader).value == "broker-a:4"
    answer = await peer.call(RequestCode.GET_KVLIST_BY_NAMESPACE, NAMESPACE)
    assert decode_table(answer.body) == {"orders": "broker-a:4"}
    for _ in range(2):
        assert (await peer.call(RequestCode.DELETE_KV_CONFIG, KEY)).code == 0
    assert (await peer.call(RequestCode.GET_KV_CONFIG, KEY)).code == ResponseCode.QUERY_NOT_FOUND


@windowed()
async def test_what_is_kept_is_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool in a loop does not fill the memory; the refusal names the limit."""
    peer = await rig.peer()
    monkeypatch.setattr(
        "halfmq.broker.tables.kv_table.KV_CHARACTERS", KV_CHARACTERS._replace(most=40)
    )
    assert (await put(peer, "x" * 16)).code == 0
    refused = await put(peer, "x" * 17)

    assert refused.code == ResponseCode.NO_PERMISSION
    assert "would have 41 characters, the limit is 40" in (refused.remark or "")
    answer = await peer.call(RequestCode.GET_KV_CONFIG, KEY)
    assert response_header(answer, GetKVConfigResponseHeader).value == "x" * 16


@windowed()
async def test_a_value_that_cannot_be_saved_is_not_set(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = await rig.peer()

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("halfmq.broker.tables.table_file.save_table", fail)
        refused = await put(peer)
    assert refused.remark == "kvConfig.json cannot be written: No space left on device"
    assert (await peer.call(RequestCode.GET_KV_CONFIG, KEY)).code == ResponseCode.QUERY_NOT_FOUND


@windowed()
async def test_the_write_permission_of_routes_is_wiped_and_restored(rig: Rig) -> None:
    """By wipeWritePerm and addWritePerm; the name of another broker changes nothing."""
    peer = await rig.peer()
    await peer.plain("K1")

    async def perm() -> int:
        header = GetRouteInfoRequestHeader(topic="orders")
        answer = await peer.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, header)
        return decode_route(answer.body).queue_datas[0].perm

    count = str(len(rig.tables.topics))
    ours, other = (BrokerNameRequestHeader(broker_name=name) for name in ("broker-a", "b"))
    wiped = await peer.call(RequestCode.WIPE_WRITE_PERM_OF_BROKER, other)
    assert (ext(wiped), await perm()) == ({"wipeTopicCount": "0"}, 6)
    wiped = await peer.call(RequestCode.WIPE_WRITE_PERM_OF_BROKER, ours)
    assert (ext(wiped), await perm()) == ({"wipeTopicCount": count}, 4)
    added = await peer.call(RequestCode.ADD_WRITE_PERM_OF_BROKER, ours)
    assert (ext(added), await perm()) == ({"addTopicCount": count}, 6)
