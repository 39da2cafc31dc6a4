"""A replaced master ends: at its start, and at its next registration."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmq.client import BrokerRefusedError, Message
from halfmq.client.blocking import Producer
from halfmq.client.testing import BrokerProcess, broker_process
from tests.support.broker_pair import wait_for_route
from tests.support.patience import wait_until


@pytest.fixture
def namesrv(tmp_path: Path) -> Iterator[str]:
    """The address of a name server."""
    settings = {"brokerName": "names", "registrationAddresses": "127.0.0.1"}
    with broker_process(tmp_path / "names", **settings) as server:
        yield server.address


def settings_of(namesrv: str) -> dict[str, object]:
    return {"namesrvAddr": namesrv, "slaveAddresses": "127.0.0.1", "haListenPort": 0}


def promoted(directory: Path, epoch: int) -> None:
    """Make a store as `halfmq ha promote` leaves it, as far as it matters here."""
    config = directory / "store/config"
    config.mkdir(parents=True)
    topics = {"dataVersion": {"counter": 1, "stateVersion": epoch}, "topicConfigTable": {}}
    (config / "topics.json").write_text(json.dumps(topics), encoding="utf-8")


def test_a_master_that_was_replaced_ends_and_does_not_come_back(
    namesrv: str, tmp_path: Path
) -> None:
    """The epoch decides, not who registers last: routes do not flap between the two."""
    with broker_process(tmp_path / "old", **settings_of(namesrv)) as old:
        with Producer("writers", namesrv=old.address) as producer:
            producer.send(Message("first", b"x"))
        wait_for_route(namesrv, "first", {"broker-a"})
        promoted(tmp_path / "new", epoch=1)
        with broker_process(tmp_path / "new", **settings_of(namesrv)) as new:
            with Producer("writers", namesrv=new.address) as producer:
                producer.send(Message("second", b"x"))
            wait_for_route(namesrv, "second", {"broker-a"})
            _make_it_register(old)
            wait_until(lambda: not old.running, "the replaced master serves on")
            assert "event=replaced" in old.log

            old.start()
            wait_until(lambda: not old.running, "the replaced master serves again")
            assert new.running
            assert old.log.count("event=replaced") == 2
            assert "event=replaced" not in new.log


def _make_it_register(broker: BrokerProcess) -> None:
    """It does so when a topic is created, not only every 30 seconds."""
    refused = contextlib.suppress(BrokerRefusedError)  # it may know by now
    with refused, Producer("writers", namesrv=broker.address) as producer:
        producer.send(Message("third", b"x"))


def test_the_same_broker_starts_again_beside_its_own_registration(
    namesrv: str, tmp_path: Path
) -> None:
    """Killed and started on the same address, it is not replaced by itself."""
    with broker_process(tmp_path / "one", **settings_of(namesrv)) as broker:
        with Producer("writers", namesrv=broker.address) as producer:
            producer.send(Message("first", b"x"))
        wait_for_route(namesrv, "first", {"broker-a"})
        broker.kill()
        broker.start()
        with Producer("writers", namesrv=broker.address) as producer:
            producer.send(Message("second", b"x"))
        wait_for_route(namesrv, "second", {"broker-a"})

        assert "event=replaced" not in broker.log
