"""Operators see what is stored and delivered each second, and in a day."""

from __future__ import annotations

import re
from typing import Any

import pytest

from halfmq.broker.handlers.admin import consumption
from halfmq.remoting.admin_bodies import decode_stats_data
from halfmq.remoting.admin_headers import (
    GetBrokerConsumeStatsRequestHeader,
    GetConsumeStatsRequestHeader,
    TopicRequestHeader,
    ViewBrokerStatsDataRequestHeader,
)
from halfmq.remoting.bodies import QueueKey, decode_consume_stats, decode_table
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.fastjson import parse
from halfmq.remoting.headers import (
    ConsumerSendMsgBackRequestHeader,
    UpdateConsumerOffsetRequestHeader,
)
from tests.support.peers import Peer
from tests.support.race_windows import Rig, windowed
from tests.support.usual_headers import pull_header

SAMPLE_MS = 10_000


async def pull(peer: Peer, offset: int = 0, suspend_ms: int = 0) -> int:
    header = pull_header(
        consumer_group="readers", queue_offset=offset, suspend_timeout_millis=suspend_ms
    )
    return (await peer.call(RequestCode.PULL_MESSAGE, header)).code


async def filled(rig: Rig) -> Peer:
    """Three messages stored and delivered to a group that has committed one of them."""
    await rig.wait(SAMPLE_MS)
    peer = await rig.peer()
    for number in range(3):
        await peer.plain(f"K{number}")
    rig.tables.groups.ensure("readers")
    assert await pull(peer) == ResponseCode.SUCCESS
    header = UpdateConsumerOffsetRequestHeader(
        consumer_group="readers", topic="orders", queue_id=0, commit_offset=1
    )
    await peer.call(RequestCode.UPDATE_CONSUMER_OFFSET, header)
    await rig.wait(SAMPLE_MS)
    return peer


async def total(peer: Peer, name: str, key: str) -> int:
    """Return what 315 says of the last minute."""
    header = ViewBrokerStatsDataRequestHeader(stats_name=name, stats_key=key)
    answer = await peer.call(RequestCode.VIEW_BROKER_STATS_DATA, header)
    assert answer.code == 0, answer.remark
    return decode_stats_data(answer.body)["statsMinute"].sum


async def rate(peer: Peer, code: RequestCode, header: Any, name: str) -> float:
    answer = await peer.call(code, header)
    return float(parse(answer.body)[name])


@windowed()
async def test_stored_and_delivered_messages_are_shown(rig: Rig) -> None:
    """In 315, in the statistics of topic and group, and in the broker's table."""
    peer = await filled(rig)

    assert await total(peer, "TOPIC_PUT_NUMS", "orders") == 3
    sizes = await total(peer, "TOPIC_PUT_SIZE", "orders")
    assert sizes == sum(record.total_size for record in rig.records_of("orders"))
    assert await total(peer, "GROUP_GET_NUMS", "orders@readers") == 3
    assert await total(peer, "GROUP_GET_SIZE", "orders@readers") == sizes
    assert await total(peer, "BROKER_PUT_NUMS", "DefaultCluster") == 3
    assert await total(peer, "BROKER_GET_NUMS", "DefaultCluster") == 3
    topic = TopicRequestHeader(topic="orders")
    assert await rate(peer, RequestCode.GET_TOPIC_STATS_INFO, topic, "topicPutTps") > 0
    group = GetConsumeStatsRequestHeader(consumer_group="readers")
    assert await rate(peer, RequestCode.GET_CONSUME_STATS, group, "consumeTps") > 0
    table = decode_table((await peer.call(RequestCode.GET_BROKER_RUNTIME_INFO, None)).body)
    assert float(table["putTps"].split()[0]) > 0
    assert float(table["getTransferredTps"].split()[1]) > 0
    assert (table["msgPutTotalTodayNow"], table["msgGetTotalTodayNow"]) == ("3", "3")
    assert (table["putMessageTimesTotal"], table["putMessageSizeTotal"]) == ("3", str(sizes))


@windowed()
async def test_totals_need_no_sample_and_no_figure_is_made_up(rig: Rig) -> None:
    """A message counts at once; what is not measured is left out, or says so."""
    await filled(rig)
    peer = await rig.peer()
    before = decode_table((await peer.call(RequestCode.GET_BROKER_RUNTIME_INFO, None)).body)
    await peer.plain("K3")
    await peer.plain("N", topic="new")
    after = decode_table((await peer.call(RequestCode.GET_BROKER_RUNTIME_INFO, None)).body)

    for key in ("msgPutTotalTodayNow", "putMessageTimesTotal"):
        assert int(after[key]) == int(before[key]) + 2, key
    assert await total(peer, "TOPIC_PUT_NUMS", "new") == 0
    unknown = {key for key in after if re.search("Latency|Failed", key)}
    assert not unknown
    assert {after[key] for key in after if "EntireTime" in key} == {"-1"}


@windowed()
async def test_pulls_that_find_nothing_are_counted(rig: Rig) -> None:
    """RocketMQ's dashboard and exporter show them and their sum with the others."""
    peer = await filled(rig)
    for _ in range(3):
        assert await pull(peer, offset=3) == ResponseCode.PULL_NOT_FOUND
    await rig.wait(SAMPLE_MS)
    table = decode_table((await peer.call(RequestCode.GET_BROKER_RUNTIME_INFO, None)).body)
    found, missed, both = (
        [float(rate) for rate in table[f"get{which}Tps"].split()]
        for which in ("Found", "Miss", "Total")
    )

    assert missed[0] == 0.3
    assert both == [one + other for one, other in zip(found, missed, strict=True)]


@windowed()
async def test_a_pull_that_waited_is_counted(rig: Rig) -> None:
    """Held pulls are answered elsewhere; most consumers wait."""
    peer = await filled(rig)
    waiting = await rig.peer("waiting")
    frame = pull_header(
        consumer_group="readers", queue_offset=3, sys_flag=0x2 | 0x4, suspend_timeout_millis=15_000
    )
    waiting.write(waiting.frame(RequestCode.PULL_MESSAGE, frame)[1])
    await rig.exchange()
    assert await total(peer, "GROUP_GET_NUMS", "orders@readers") == 3
    await peer.plain("K3")
    await rig.settle()
    await rig.wait(SAMPLE_MS)

    assert await total(peer, "GROUP_GET_NUMS", "orders@readers") == 4


@windowed()
async def test_messages_sent_back_are_counted_by_their_first_topic(rig: Rig) -> None:
    """A second retry comes from the retry topic, and counts for the topic all the same."""
    peer = await filled(rig)
    (first, *_) = rig.records_of("orders")
    header = ConsumerSendMsgBackRequestHeader(
        offset=first.physical_offset, group="readers", delay_level=1, origin_topic="orders"
    )
    answer = await peer.call(RequestCode.CONSUMER_SEND_MSG_BACK, header)
    assert answer.code == 0, answer.remark
    await rig.wait(SAMPLE_MS)

    assert await total(peer, "SNDBCK_PUT_NUMS", "orders@readers") == 1


@windowed()
async def test_a_start_counts_only_what_is_new(rig: Rig) -> None:
    """Also after a kill, when queues are rebuilt from the log."""
    await filled(rig)
    await rig.kill()
    peer = await rig.peer()
    await peer.plain("K4")
    await rig.wait(SAMPLE_MS)

    assert await total(peer, "TOPIC_PUT_NUMS", "orders") == 1


@windowed()
async def test_what_is_not_counted_is_refused_by_name(rig: Rig) -> None:
    """In RocketMQ's words, which its tools expect."""
    peer = await filled(rig)
    header = ViewBrokerStatsDataRequestHeader(stats_name="TOPIC_PUT_NUMS", stats_key="nope")
    answer = await peer.call(RequestCode.VIEW_BROKER_STATS_DATA, header)

    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert answer.remark == "The stats <TOPIC_PUT_NUMS> <nope> not exist"


@windowed()
async def test_the_pulled_offset_of_a_group_is_shown(rig: Rig) -> None:
    """Messages between it and the committed offset are in flight."""
    peer = await filled(rig)
    group = GetConsumeStatsRequestHeader(consumer_group="readers")
    answer = await peer.call(RequestCode.GET_CONSUME_STATS, group)
    queue = QueueKey(broker_name="broker-a", queue_id=0, topic="orders")

    row = decode_consume_stats(answer.body)[queue]
    assert (row.consumer_offset, row.pull_offset, row.broker_offset) == (1, 3, 3)


@windowed()
async def test_all_groups_are_shown_at_once(rig: Rig) -> None:
    """Each topic of each group, those without offsets with nothing, and the sums."""
    peer = await filled(rig)
    header = GetBrokerConsumeStatsRequestHeader(is_order=False)
    answer = await peer.call(RequestCode.GET_BROKER_CONSUME_STATS, header)
    body = parse(answer.body)
    groups = {name: stats for one in body["consumeStatsList"] for name, stats in one.items()}

    (of_orders,) = groups["readers"]
    assert len(of_orders["offsetTable"]) == 4
    assert of_orders["consumeTps"] > 0
    assert (body["totalDiff"], body["totalInflightDiff"]) == (2, 2)
    ordered = GetBrokerConsumeStatsRequestHeader(is_order=True)
    answer = await peer.call(RequestCode.GET_BROKER_CONSUME_STATS, ordered)
    groups = {
        key: each for one in parse(answer.body)["consumeStatsList"] for key, each in one.items()
    }
    assert groups["readers"] == []


@windowed()
async def test_many_queues_of_many_groups_are_shown(rig: Rig) -> None:
    """Each in one row, although they are looked at in several steps."""
    peer = await filled(rig)
    rig.tables.topics.ensure("wide", 300)
    for group in ("a", "b"):
        rig.tables.groups.ensure(group)
        rig.tables.offsets.commit(group, "wide", 7, 0)
    header = GetBrokerConsumeStatsRequestHeader(is_order=False)
    body = parse((await peer.call(RequestCode.GET_BROKER_CONSUME_STATS, header)).body)
    groups = {key: each for one in body["consumeStatsList"] for key, each in one.items()}

    for group in ("a", "b"):
        (of_wide,) = groups[group]
        assert len(of_wide["offsetTable"]) == 300
    assert len(groups["readers"]) == 1


@windowed()
async def test_more_queues_than_an_answer_holds_are_refused(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups and offsets are many and cheap to make; the answer's memory is bounded."""
    monkeypatch.setattr(consumption, "ROWS_MAX", 3)
    peer = await filled(rig)
    for code, header, instead in (
        (
            RequestCode.GET_BROKER_CONSUME_STATS,
            GetBrokerConsumeStatsRequestHeader(is_order=False),
            "ask for one group after the other",
        ),
        (
            RequestCode.GET_CONSUME_STATS,
            GetConsumeStatsRequestHeader(consumer_group="readers"),
            "ask for one topic after the other",
        ),
    ):
        answer = await peer.call(code, header)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert "these are 4 queues" in (answer.remark or "")
        assert instead in (answer.remark or "")
