"""The table of consumer groups: built-in ones, the file of a real broker, creation."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from halfmq.broker.errors import RequestRefusedError
from halfmq.broker.tables.group_table import GroupConfig, GroupTable
from halfmq.remoting.codes import ResponseCode
from halfmq.store.format.topics import BUILT_IN_GROUPS
from tests.support.broker_doubles import Clock, config_path
from tests.support.golden_store import unpack
from tests.support.tables import load_table


def table(root: Path, *, auto_create: bool = True, groups_max: int = 10_000) -> GroupTable:
    made = GroupTable(
        config_path(root, "subscriptionGroup.json"),
        auto_create=auto_create,
        now_ms=Clock(),
        groups_max=groups_max,
    )
    made.load()
    return made


def write_due(table: GroupTable) -> None:
    """Save the table as the broker's thread does."""
    job = table.persist_job()
    assert job is not None
    job()


def test_a_group_is_created_with_the_defaults_of_rocketmq(tmp_path: Path) -> None:
    """Its entry equals that of the official broker."""
    groups = table(tmp_path)
    groups.ensure("billing")
    write_due(groups)
    saved = load_table(config_path(tmp_path, "subscriptionGroup.json"))

    assert saved is not None
    assert saved["forbiddenTable"] == {}
    assert saved["subscriptionGroupTable"]["billing"] == {
        "attributes": {},
        "brokerId": 0,
        "consumeBroadcastEnable": True,
        "consumeEnable": True,
        "consumeFromMinEnable": True,
        "consumeMessageOrderly": False,
        "consumeTimeoutMinute": 15,
        "groupName": "billing",
        "groupRetryPolicy": {"type": "CUSTOMIZED"},
        "groupSysFlag": 0,
        "notifyConsumerIdsChangedEnable": True,
        "retryMaxTimes": 16,
        "retryQueueNums": 1,
        "whichBrokerWhenConsumeSlowly": 1,
    }
    assert table(tmp_path).get("billing") is not None
    assert groups.persist_job() is None


def test_groups_are_created_only_when_the_setting_allows(tmp_path: Path) -> None:
    """System groups always exist."""
    groups = table(tmp_path, auto_create=False)

    assert groups.ensure("billing") is None
    assert groups.admit("billing") is None
    assert groups.ensure("TOOLS_CONSUMER") is not None
    assert groups.ensure("CID_RMQ_SYS_SOMETHING") is not None


@pytest.mark.parametrize("name", ["", " ", "a b", "g" * 249])
def test_no_group_is_created_with_an_invalid_name(tmp_path: Path, name: str) -> None:
    """Its retry topic could not exist either."""
    assert table(tmp_path).ensure(name) is None


def test_consumers_do_not_use_up_all_groups(tmp_path: Path) -> None:
    """A client that names new groups until it is refused does not lock out operators."""
    groups = table(tmp_path, groups_max=40)
    for number in range(36 - len([*groups])):
        groups.ensure(f"g-{number}")
    with pytest.raises(RequestRefusedError, match="36 for groups that consumers create, of 40"):
        groups.ensure("further")

    asyncio.run(groups.change(GroupConfig(name="further")))
    assert "further" in groups


def test_a_full_table_refuses_with_its_limit(tmp_path: Path) -> None:
    groups = table(tmp_path, groups_max=len(BUILT_IN_GROUPS) + 1)
    groups.ensure("one")
    with pytest.raises(RequestRefusedError, match="the limit is 9") as refusal:
        groups.ensure("two")

    assert refusal.value.code is ResponseCode.NO_PERMISSION


def test_the_file_of_a_real_broker_loads_with_every_group(tmp_path: Path) -> None:
    """As Apache RocketMQ 5.3.3 wrote it, and as halfmq writes it back."""
    golden = unpack("delay-retry-dlq", tmp_path)
    groups = table(golden.root)
    truth = load_table(golden.root / "config" / "subscriptionGroup.json")
    assert truth is not None

    assert {one.name for one in groups} == set(truth["subscriptionGroupTable"])
    for name, entry in truth["subscriptionGroupTable"].items():
        known = groups.get(name)
        assert known is not None
        assert known.to_json() == entry
        assert groups.admit(name) is True


def test_saving_a_foreign_file_loses_nothing(tmp_path: Path) -> None:
    """Retry policies, subscriptions and the forbidden table are written back."""
    entry = {
        "consumeEnable": False,
        "groupRetryPolicy": {"type": "EXPONENTIAL", "exponentialRetryPolicy": {"initial": 5}},
        "retryMaxTimes": "3",
        "subscriptionDataSet": [{"topic": "T"}],
    }
    path = config_path(tmp_path, "subscriptionGroup.json")
    path.parent.mkdir()
    path.write_text(
        json.dumps(
            {
                "forbiddenTable": {"g": {"T": 4, "U": 2}},
                "subscriptionGroupTable": {"g": entry, "bad": []},
            }
        )
    )
    groups = table(tmp_path)
    groups.ensure("another")
    write_due(groups)
    saved = load_table(path)

    assert saved is not None
    assert saved["forbiddenTable"] == {"g": {"T": 4, "U": 2}}
    kept = saved["subscriptionGroupTable"]["g"]
    assert kept["groupRetryPolicy"] == entry["groupRetryPolicy"]
    assert kept["subscriptionDataSet"] == entry["subscriptionDataSet"]
    assert kept["retryMaxTimes"] == 3
    assert groups.admit("g") is False
    assert not groups.may_read("g", "T")
    assert groups.may_read("g", "U")
    assert groups.may_read("other", "T")
