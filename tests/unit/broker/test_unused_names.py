"""Names that clients have created and nobody uses end; all others stay."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from halfmq.broker.tables import all_tables
from halfmq.broker.tables.client_registry import ClientRegistry
from halfmq.broker.tables.consumer_offsets import ConsumerOffsetTable
from halfmq.broker.tables.group_table import GroupConfig, GroupTable
from halfmq.broker.tables.topic_config import PERM_READ, PERM_WRITE, simple_topic
from halfmq.broker.tables.topic_table import TopicTable
from halfmq.broker.unused_names import UNUSED_MS, UnusedNames
from halfmq.remoting.bodies import ConsumerData, HeartbeatData
from tests.support.broker_doubles import Clock, FakeConnection, config_path, identity


class Tables:
    """The tables of one broker after another on a directory."""

    def __init__(self, root: Path, *, auto_create: bool = True) -> None:
        self.root, self.auto_create = root, auto_create
        self.clock = Clock()
        self.sent_to: set[str] = set()
        self.start()

    def start(self) -> None:
        """Read the files."""
        self.groups = GroupTable(
            config_path(self.root, "g.json"), auto_create=self.auto_create, now_ms=self.clock
        )
        self.topics = TopicTable(
            config_path(self.root, "t.json"),
            identity(auto_create=self.auto_create),
            now_ms=self.clock,
            is_group=self.groups.__contains__,
        )
        self.offsets = ConsumerOffsetTable(config_path(self.root, "o.json"), now_ms=self.clock)
        self.registry = ClientRegistry(now_ms=self.clock.monotonic)
        self.groups.load()
        self.topics.load()

    def restart(self) -> None:
        """Save, and read the files again."""
        self.groups.save()
        self.topics.save()
        self.start()

    def consume(self, group: str) -> None:
        """Have the group created, with its retry topic."""
        assert self.groups.ensure(group)
        self.topics.ensure_retry(group)

    def expire(self) -> None:
        """Look for unused names."""
        unused = UnusedNames(
            cast("all_tables.Tables", self),
            bounds=lambda topic, _queue: (0, int(topic in self.sent_to)),
            now_ms=self.clock,
        )
        for _ in unused.expire():
            pass

    @property
    def names(self) -> set[str]:
        """All groups and topics that are not built in."""
        found = {group.name for group in self.groups} | {topic.name for topic in self.topics}
        return found - self.built_in

    @property
    def built_in(self) -> set[str]:
        """Those of an empty broker."""
        empty = Tables.__new__(Tables)
        empty.root, empty.auto_create, empty.clock = self.root / "none", True, self.clock
        empty.start()
        return {group.name for group in empty.groups} | {topic.name for topic in empty.topics}


@pytest.mark.parametrize("restarts", [False, True])
def test_unused_names_end_after_a_day(tmp_path: Path, *, restarts: bool) -> None:
    """A group takes its retry topic with it; a restart does not begin anew."""
    tables = Tables(tmp_path)
    tables.consume("idle")
    tables.topics.create_on_send("refused", "TBW102", 4, "peer")  # and its message was refused
    tables.clock.now += UNUSED_MS
    if restarts:
        tables.restart()
    tables.expire()
    assert tables.names == {"idle", "%RETRY%idle", "refused"}

    tables.clock.now += 1
    tables.expire()
    assert tables.names == set()
    tables.restart()
    assert tables.names == set()


def test_names_that_were_used_or_configured_stay(tmp_path: Path) -> None:
    """A message, a commit, a member or an operator keeps them."""
    tables = Tables(tmp_path)
    for group in ("commits", "retries", "connected", "configured", "forbidden"):
        tables.consume(group)
    for topic in ("messages", "changed"):
        tables.topics.create_on_send(topic, "TBW102", 4, "peer")
    tables.offsets.commit("commits", "messages", 0, 1)
    tables.sent_to |= {"messages", "%RETRY%retries"}
    data = HeartbeatData(client_id="c", consumer_data_set=(ConsumerData(group_name="connected"),))
    tables.registry.heartbeat(data, FakeConnection())
    asyncio.run(tables.groups.change(GroupConfig(name="configured")))
    asyncio.run(tables.groups.forbid_reading("forbidden", "messages", forbidden=True))
    asyncio.run(tables.topics.change(simple_topic("changed", 1, PERM_READ | PERM_WRITE)))
    asyncio.run(tables.groups.change(GroupConfig(name="made")))
    asyncio.run(tables.topics.change(simple_topic("made too", 1, PERM_READ | PERM_WRITE)))
    before = tables.names
    tables.clock.now += UNUSED_MS + 1
    tables.expire()

    assert tables.names == before
    tables.sent_to.clear()
    tables.expire()
    assert tables.names == before, "what was used once never ends"


def test_names_stay_if_they_would_not_be_created_again(tmp_path: Path) -> None:
    """The setting may have been turned off since."""
    tables = Tables(tmp_path)
    tables.consume("idle")
    tables.topics.create_on_send("refused", "TBW102", 4, "peer")
    tables.auto_create = False
    tables.restart()
    tables.clock.now += UNUSED_MS + 1
    tables.expire()

    assert tables.names >= {"idle", "%RETRY%idle", "refused"}
