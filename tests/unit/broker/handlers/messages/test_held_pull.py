"""A pull that has waited is admitted again before it is answered: the right may be gone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final

import pytest

from halfmq.broker.tables.all_tables import Tables
from halfmq.broker.tables.topic_config import PERM_WRITE
from halfmq.remoting.codes import RequestCode, ResponseCode
from tests.support.access import PUBLISHER, SUBSCRIBER
from tests.support.broker_parts import access_of
from tests.support.guarded_rig import ACCOUNTS, Guarded, guarded, names_the_missing_right
from tests.support.race_windows import Rig, windowed
from tests.support.stores import draft
from tests.support.usual_headers import pull_header

HELD: Final[dict[str, Any]] = {
    "queue_offset": 1,
    "sys_flag": 6,  # may be held, and says what it wants
    "suspend_timeout_millis": 15_000,
}


async def _topic(tables: Tables, **changed: Any) -> None:
    known = tables.topics.get("orders")
    assert known is not None
    await tables.topics.change(replace(known, **changed))


async def _group(tables: Tables, **changed: Any) -> None:
    known = tables.groups.ensure("pg")
    assert known is not None
    await tables.groups.change(replace(known, **changed))


CHANGES: Final[dict[str, tuple[Callable[[Tables], Awaitable[None]], int]]] = {
    "only written to": (lambda it: _topic(it, perm=PERM_WRITE), ResponseCode.NO_PERMISSION),
    "fewer queues": (lambda it: _topic(it, read_queue_nums=0), ResponseCode.INVALID_PARAMETER),
    "topic deleted": (lambda it: it.topics.delete("orders", 0), ResponseCode.TOPIC_NOT_EXIST),
    "group disabled": (lambda it: _group(it, consume_enable=False), ResponseCode.NO_PERMISSION),
    "topic forbidden": (
        lambda it: it.groups.forbid_reading("pg", "orders", forbidden=True),
        ResponseCode.NO_PERMISSION,
    ),
}


@pytest.mark.parametrize("arrives", [True, False])
@pytest.mark.parametrize("change", CHANGES)
@windowed()
async def test_a_held_pull_is_refused_after_a_change(rig: Rig, change: str, arrives: bool) -> None:
    """With what a new pull gets, whether a message comes or the time is over."""
    peer = await rig.peer("pg")
    await peer.plain("K1", topic="orders")
    await peer.consume("orders")
    header = pull_header(consumer_group="pg", **HELD | {"sys_flag": 2})  # by its heartbeat
    held = peer.send(RequestCode.PULL_MESSAGE, header)
    await peer.sync()
    make, code = CHANGES[change]
    await make(rig.tables)
    if arrives:
        rig.store.append([draft("orders", 0, b"late")])
    await rig.wait(1_000 if arrives else 20_000)

    answer = await rig.patiently(peer.answer(held))
    again = await peer.call(RequestCode.PULL_MESSAGE, header)
    assert (answer.code, answer.remark) == (code, again.remark)
    assert b"late" not in answer.body


@guarded()
async def test_a_held_pull_is_refused_after_its_right_was_withdrawn(guarded: Guarded) -> None:
    """Otherwise a consumer gets one more answer after it was locked out."""
    rig, publisher = guarded.rig, await guarded.peer(PUBLISHER)
    await publisher.plain("K1", topic="orders")
    subscriber = await guarded.peer(SUBSCRIBER, "consumers")
    held = subscriber.send(
        RequestCode.PULL_MESSAGE, pull_header(consumer_group="consumers", **HELD)
    )
    await subscriber.sync()
    accounts = access_of(rig.broker).accounts
    assert accounts is not None
    (rig.root.parent / "plain_acl.yml").write_text(ACCOUNTS.replace("orders=SUB", "orders=DENY"))
    accounts.reload()
    rig.store.append([draft("orders", 0, b"late")])
    await rig.wait(1_000)

    answer = await rig.patiently(subscriber.answer(held))
    assert names_the_missing_right(answer, "Sub Topic:orders")
    assert b"late" not in answer.body
