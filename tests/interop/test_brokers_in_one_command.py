"""`brokers=N`: several brokers under one command, which clients and operators use as one."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
from collections import Counter
from functools import partial
from pathlib import Path

import httpx
import pytest

from halfmq.client import Decision, Message
from halfmq.client.blocking import Admin, Consumer, Producer, TransactionProducer
from halfmq.client.testing import (
    LOG_FILE_SIZE,
    BrokerProcess,
    BrokerStartError,
    broker_process,
    free_port,
)
from halfmq.command.main import main
from halfmq.remoting.bodies import decode_route
from halfmq.remoting.codes import RequestCode
from halfmq.remoting.headers import GetRouteInfoRequestHeader
from tests.support.broker_pair import wait_for_route
from tests.support.broker_processes import has_ended, is_back, pids
from tests.support.go_client import run_go
from tests.support.java_clients import Kind, class_path, java_client
from tests.support.patience import PATIENCE_S, wait_until
from tests.support.python import python
from tests.support.rocketmq_broker import Wire, rocketmq_broker

NAMES = ["broker-a-0", "broker-a-1"]
COUNT = 32


def consume(namesrv: str, topic: str, count: int) -> dict[bytes, Counter[str]]:
    """Return for each body of so many messages how many came from which broker."""
    found: dict[bytes, Counter[str]] = {}
    with Consumer("readers", {topic: "*"}, namesrv=namesrv, start_from="first") as consumer:
        for _ in range(count):
            message = consumer.receive(PATIENCE_S)
            assert message is not None, found
            found.setdefault(message.body, Counter())[message.queue.broker_name] += 1
            message.ack()
    return found


def _own_port(broker: BrokerProcess, number: int) -> int:
    return int(broker.ready["listen"].rpartition(":")[2]) + 10 * number


def test_clients_use_all_brokers_as_one(tmp_path: Path) -> None:
    """Topics, groups and settings are on all; messages spread, a transaction stays together."""
    with broker_process(tmp_path, brokers=2, httpListenPort=free_port()) as both:
        with Admin(namesrv=both.address) as admin:
            admin.create_topic("orders", queues=2)
            admin.create_group("readers")
            admin.change_setting("transactionCheckMax", "7")
            assert [one.broker_name for one in admin.topics() if one.name == "orders"] == NAMES
        wait_for_route(both.address, "orders", set(NAMES))
        with TransactionProducer(
            "writers", lambda _half: Decision.UNKNOWN, namesrv=both.address
        ) as producer:
            for number in range(COUNT):
                producer.send(Message("orders", b"plain"))
                messages = [Message("orders", b"%d" % number, keys=f"{n}") for n in range(3)]
                with producer.transaction(messages):
                    pass
        found = consume(both.address, "orders", 4 * COUNT)
        assert set(found.pop(b"plain")) == set(NAMES)
        assert all(list(brokers.values()) == [3] for brokers in found.values())
        assert {name for brokers in found.values() for name in brokers} == set(NAMES)
        http = both.ready["http"].rpartition(":")
        for number, name in enumerate(NAMES):
            answer = httpx.get(f"http://{http[0]}:{int(http[2]) + 10 * number}/metrics")
            assert f'node_id="{name}"' in answer.text
        both.restart()  # once for all, and kept
        with Admin(namesrv=both.address) as admin:
            kept = [table["transactionCheckMax"] for table in admin.settings().values()]
        assert kept == ["7", "7"]


def test_a_deleted_topic_has_no_route_on_any_broker(tmp_path: Path) -> None:
    """Though the request to delete routes reaches one of them."""
    with broker_process(tmp_path, brokers=2) as both:
        addresses = [f"127.0.0.1:{_own_port(both, number)}" for number in range(2)]
        with Admin(namesrv=both.address) as admin:
            admin.create_topic("gone")
            for address in addresses:
                wait_for_route(address, "gone", set(NAMES))
            admin.delete_topic("gone")
        for address in addresses:
            wait_for_route(address, "gone", set())


def test_a_topic_that_a_message_creates_is_on_all_brokers(tmp_path: Path) -> None:
    """Else all its messages would go to the broker that got the first."""
    with broker_process(tmp_path, brokers=2) as both:
        with Producer("writers", namesrv=both.address) as producer:
            producer.send(Message("fresh", b"first"))
        wait_for_route(both.address, "fresh", set(NAMES))
        with Admin(namesrv=both.address) as admin:
            admin.delete_topic("fresh")
            for number in range(2):
                wait_for_route(f"127.0.0.1:{_own_port(both, number)}", "fresh", set())
            assert not any(one.name == "fresh" for one in admin.topics())


def test_routes_have_the_address_that_the_client_has_reached(tmp_path: Path) -> None:
    """Of all brokers, though they know each other by 127.0.0.1."""
    with broker_process(tmp_path, brokers=2, bindAddress="0.0.0.0") as both:
        port = both.address.rpartition(":")[2]
        wait_for_route(f"127.0.0.1:{port}", "TBW102", set(NAMES))
        with Wire(f"127.0.0.2:{port}") as wire:
            header = GetRouteInfoRequestHeader(topic="TBW102")
            body = wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, header).body
        addresses = {
            one.broker_name: one.broker_addrs[0] for one in decode_route(body).broker_datas
        }
        assert addresses == {
            name: f"127.0.0.2:{_own_port(both, number)}" for number, name in enumerate(NAMES)
        }


def test_a_broker_that_dies_is_started_again(tmp_path: Path) -> None:
    """The others serve meanwhile, under the one address of all; one that is drained stays ended."""
    with broker_process(tmp_path, brokers=2) as both:
        with Admin(namesrv=both.address) as admin:
            admin.create_topic("orders", queues=1)
        wait_for_route(both.address, "orders", set(NAMES))
        for name in NAMES:
            before = pids(both, name)
            os.kill(before[-1], signal.SIGKILL)
            with Producer("writers", namesrv=both.address) as producer:
                producer.send(Message("orders", b"meanwhile"))
            wait_until(partial(is_back, both, name, before), "it is not started again")
        wait_for_route(both.address, "orders", set(NAMES))

        before = pids(both, NAMES[0])
        assert main(["broker", "drain", NAMES[0], "--wait", "0", "--namesrv", both.address]) == 0
        wait_until(lambda: has_ended(before[-1]), "it does not end")
        with Producer("writers", namesrv=both.address) as producer:
            assert producer.send(Message("orders", b"x")).queue.broker_name == NAMES[1]
        assert pids(both, NAMES[0]) == before
        assert main(["broker", "drain", "broker-a", "--wait", "0", "--namesrv", both.address]) == 0
        wait_until(lambda: not both.running, "the command does not end")
        assert both.stop() == 0


def test_nothing_is_left_when_the_command_is_killed(tmp_path: Path) -> None:
    """Its brokers stop in order."""
    with broker_process(tmp_path, brokers=2) as both:
        children = [pids(both, name)[-1] for name in NAMES]
        both.kill()
        wait_until(lambda: all(map(has_ended, children)), "a broker is left")
        assert both.log.count("clean=True") == 4  # two new stores, and two that are closed
        both.start()
        assert both.ready["brokers"] == "2"


def _refused(tmp_path: Path, **settings: object) -> BrokerStartError:
    with pytest.raises(BrokerStartError) as caught, broker_process(tmp_path, **settings):
        pass
    return caught.value


def test_no_store_is_left_out_silently(tmp_path: Path) -> None:
    """Fewer brokers, another name, or one instead of several: the start says what is in the way."""
    with broker_process(tmp_path, brokers=2):
        pass
    for settings in ({"brokers": 1}, {"brokers": 2, "brokerName": "other"}):
        error = _refused(tmp_path, **settings)
        assert error.exit_code == 2
        assert str(tmp_path / "store" / "broker-a-1") in error.log
    shutil.move(tmp_path / "store" / "broker-a-1", tmp_path / "single")
    with broker_process(
        tmp_path, brokerName="broker-a-1", storePathRootDir=tmp_path / "single"
    ) as single:
        assert single.ready["listen"]
    error = _refused(tmp_path, brokers=2, storePathRootDir=tmp_path / "single")
    assert error.exit_code == 2
    assert f"{tmp_path}/single has messages that no broker would serve" in error.log


def test_a_start_that_fails_for_one_fails_for_all(tmp_path: Path) -> None:
    """With the exit code of the broker that cannot start, and nothing keeps running."""
    port, names = free_port(), free_port()
    settings = [
        *(f"listenPort={port}", f"namesrvListenPort={names}", "httpListenPort=-1", "brokers=2"),
        *(f"storePathRootDir={tmp_path}/store", f"mappedFileSizeCommitLog={LOG_FILE_SIZE}"),
    ]
    words = [word for setting in settings for word in ("--set", setting)]

    def start() -> int:
        done = python("-m", "halfmq.broker", *words)
        assert not done.stdout
        found = [int(pid) for pid in re.findall(r"child_started child=\S+ pid=(\d+)", done.stderr)]
        assert all(map(has_ended, found))
        return done.returncode

    for taken in (port + 10, names):
        with socket.create_server(("127.0.0.1", taken)):
            assert start() == 5
    root = tmp_path / "store" / "broker-a-0"
    with broker_process(tmp_path / "other", storePathRootDir=root):
        assert start() == 3


def test_a_further_broker_has_what_the_others_have(tmp_path: Path) -> None:
    """Topics, groups and users: else it would get no messages, and refuse its clients."""
    access = {
        "authenticationEnabled": "true",
        "authorizationEnabled": "true",
        "initAuthenticationUser": json.dumps({"username": "root", "password": "root-secret"}),
    }
    assert _refused(tmp_path, brokers=2, **access).exit_code == 2
    access["innerClientAuthenticationCredentials"] = json.dumps(
        {"accessKey": "inner", "secretKey": "inner-secret"}
    )
    with broker_process(tmp_path, brokers=2, **access) as brokers:
        with Admin(namesrv=brokers.address, access_key="root", secret_key="root-secret") as admin:
            admin.create_topic("orders", queues=3)
            admin.create_topic("gone")
            admin.delete_topic("gone")
            admin.create_group("readers")
            admin.create_user("alice", "alice-secret", is_super=True)
        brokers.restart(brokers=3)
        with Admin(namesrv=brokers.address, access_key="alice", secret_key="alice-secret") as admin:
            topics = admin.topics()
            names = [*NAMES, "broker-a-2"]
            assert [one.broker_name for one in topics if one.name == "orders"] == names
            assert {one.write_queues for one in topics if one.name == "orders"} == {3}
            assert not any(one.name == "gone" for one in topics)
            admin.create_topic("gone", queues=1)
        with Producer(
            "writers", namesrv=brokers.address, access_key="alice", secret_key="alice-secret"
        ) as producer:
            sent = {producer.send(Message("gone", b"x")).queue.broker_name for _ in range(9)}
        assert sent == set(names)


@pytest.mark.campaign
def test_official_clients_spread_over_the_brokers(tmp_path: Path) -> None:
    """Java and Go, unmodified, by the routes of the one address."""
    with broker_process(tmp_path, brokers=2) as both:
        with Admin(namesrv=both.address) as admin:
            admin.create_topic("java-send", queues=1)
        wait_for_route(both.address, "java-send", set(NAMES))
        with java_client(Kind("5.3.3"), both.address, tmp_path / "java") as client:
            (line,) = client.run("mqadmin", "clusterList", "-n", both.address)
            assert all(name in line["text"] for name in NAMES)
            consumed = [line["body"] for line in client.run("send") if line["event"] == "consumed"]
        assert sorted(consumed) == ["async-0", "async-1", "one-way", "sync-0", "sync-1"]
        with Admin(namesrv=both.address) as admin:
            ends = {one.queue.broker_name: one.end for one in admin.queues("java-send")}
        assert min(ends[name] for name in NAMES) > 0
        lines = run_go(both.address, "send", tmp_path)
        assert any(line["event"] == "consumed" for line in lines)


@pytest.mark.campaign
def test_they_are_brokers_of_an_official_cluster(tmp_path: Path) -> None:
    """Registered with RocketMQ's name server beside its broker; topics are created by cluster."""
    class_path("5.3.3")
    with (
        rocketmq_broker(tmp_path / "store", tmp_path / "home", brokerName="official") as official,
        broker_process(
            tmp_path / "ours", brokers=2, namesrvAddr=official.namesrv, brokerClusterName="ours"
        ),
    ):
        namesrv = official.namesrv
        wait_for_route(namesrv, "TBW102", {*NAMES, "official"})
        command = ["topic", "create", "java-send", "--queues", "1", "--namesrv", namesrv]
        assert main([*command, "--cluster", "nowhere"]) == 2
        assert main([*command, "--cluster", "ours"]) == 0
        wait_for_route(namesrv, "java-send", set(NAMES))
        with java_client(Kind("5.3.3"), namesrv, tmp_path / "java") as client:
            (line,) = client.run("mqadmin", "clusterList", "-n", namesrv)
            assert re.search(r"ours\s+broker-a-0\s+0\s", line["text"]), line
            consumed = [line["body"] for line in client.run("send") if line["event"] == "consumed"]
        assert sorted(consumed) == ["async-0", "async-1", "one-way", "sync-0", "sync-1"]
        with Admin(namesrv=namesrv) as admin:
            ends = {one.queue.broker_name: one.end for one in admin.queues("java-send")}
        assert set(ends) == set(NAMES)
        assert all(ends.values())
