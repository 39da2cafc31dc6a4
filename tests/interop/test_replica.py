"""An Apache RocketMQ 5.3.3 slave and name server, and the takeover by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halfmq.client import AclEntry, ClientConfig, Message
from halfmq.client.blocking import Admin, Consumer, Producer
from halfmq.client.testing import broker_process, free_port
from halfmq.command.main import main
from halfmq.remoting.bodies import decode_member_group
from halfmq.remoting.codes import RequestCode
from halfmq.store.files.json_table import read_table
from halfmq.store.format.topics import CONFIRMED_KEY
from tests.support.patience import PATIENCE_S, wait_until
from tests.support.rocketmq_broker import Wire, rocketmq_name_server
from tests.support.rocketmq_slave import OfficialSlave

USERS_OF_A_SLAVE = (
    "org.apache.rocketmq.auth.authentication.provider.LocalAuthenticationMetadataProvider"
)
SIZES = {"mappedFileSizeCommitLog": 1 << 20, "mappedFileSizeConsumeQueue": 6_000}


def _offsets(store: Path) -> dict[str, dict[str, int]]:
    path = store / "config/consumerOffset.json"
    found: dict[str, dict[str, int]] = read_table(path).content.get("offsetTable", {})
    return found


def _groups(store: Path) -> str:
    path = store / "config/subscriptionGroup.json"  # the last table that a slave asks for
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _masters(namesrv: str) -> dict[int, str]:
    with Wire(namesrv) as wire:
        answer = wire.ask(
            RequestCode.GET_BROKER_MEMBER_GROUP,
            {"clusterName": "DefaultCluster", "brokerName": "broker-a"},
        )
    return decode_member_group(answer.body)


def test_a_slave_has_log_and_tables_and_its_files_are_promoted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Topics, groups and offsets come over remoting; the old master ends when it comes back."""
    with rocketmq_name_server(tmp_path / "names") as namesrv:
        settings = {"namesrvAddr": namesrv, "slaveAddresses": "127.0.0.1", **SIZES}
        with broker_process(
            tmp_path / "master", haListenPort=free_port(), minInSyncReplicas=2, **settings
        ) as master:
            slave = OfficialSlave(tmp_path / "slave", namesrv, **SIZES)
            slave.start()
            try:
                _use(master.address)
                wait_until(lambda: CONFIRMED_KEY in _offsets(slave.store), "no offsets")
                wait_until(lambda: "readers" in _groups(slave.store), "no groups")
                master.kill()
                slave.kill()
                _compare(tmp_path / "master/store", slave.store)
                assert main(["ha", "promote", str(slave.store), "--json"]) == 0
                assert json.loads(capsys.readouterr().out)["epoch"] == 1
                with broker_process(
                    tmp_path / "next", storePathRootDir=slave.store, haListenPort=0, **settings
                ) as successor:
                    _go_on(successor.address)
                    wait_until(
                        lambda: _masters(namesrv).get(0) == successor.ready["listen"],
                        "the name server has the old master",
                    )
                    master.start()
                    wait_until(lambda: not master.running, "the replaced master serves")
                    assert _masters(namesrv)[0] == successor.ready["listen"]
            finally:
                slave.stop()


def _use(address: str) -> None:
    """Send and consume half of what is sent."""
    with Admin(namesrv=address) as admin:
        admin.create_group("readers")
        wait_until(lambda: _sends(address), "the slave did not connect")
        with Producer("writers", namesrv=address) as producer:
            for number in range(20):
                producer.send(Message("orders", b"%d" % number))
        with Consumer("readers", {"orders": "*"}, start_from="first", namesrv=address) as consumer:
            for _ in range(10):
                message = consumer.receive(PATIENCE_S)
                assert message is not None
                message.ack()
        wait_until(lambda: _lag(admin) <= 10, "the offsets are not committed")


def _lag(admin: Admin) -> int:
    return sum(one.lag for one in admin.offsets("readers", "orders"))


def _sends(address: str) -> bool:
    with Admin(namesrv=address) as admin:
        (found,) = admin.metrics().values()
    return found["halfmq.replication.refusing"] == "0" and (
        found["halfmq.replication.connected"] == "1"
    )


def _compare(master: Path, slave: Path) -> None:
    """The log is byte-identical, and so is what the tables say."""
    for path in sorted((slave / "commitlog").iterdir()):
        assert path.read_bytes() == (master / "commitlog" / path.name).read_bytes()
    assert _offsets(slave)["orders@readers"]
    assert "orders" in (slave / "config/topics.json").read_text(encoding="utf-8")
    assert (slave / "config/delayOffset.json").exists()


def _go_on(address: str) -> None:
    """The group gets the rest, and its members' offsets are at most a minute old."""
    with Consumer("readers", {"orders": "*"}, namesrv=address) as consumer:
        bodies: set[bytes] = set()
        while len(bodies) < 10:
            message = consumer.receive(PATIENCE_S)
            assert message is not None
            bodies.add(message.body)
            message.ack()


def test_a_slave_is_a_user_of_a_master_with_access_control(tmp_path: Path) -> None:
    """It signs as one that may read the cluster; the log needs no right but its address."""
    access = {
        "authenticationEnabled": "true",
        "authorizationEnabled": "true",
        "initAuthenticationUser": json.dumps({"username": "root", "password": "root-secret"}),
    }
    inner = {"accessKey": "slave", "secretKey": "slave-secret"}
    with rocketmq_name_server(tmp_path / "names") as namesrv:
        settings = {"namesrvAddr": namesrv, "slaveAddresses": "127.0.0.1", **SIZES, **access}
        with broker_process(
            tmp_path / "master", haListenPort=free_port(), minInSyncReplicas=2, **settings
        ) as master:
            config = ClientConfig(
                namesrv=master.address,
                access_key="root",
                secret_key="root-secret",
                send_timeout=PATIENCE_S,
            )
            with Admin(config=config) as admin:
                admin.create_group("readers")
                admin.create_user("slave", "slave-secret")
                entry = AclEntry(resource="Cluster:*", actions=("Get", "List"))
                admin.create_acl("slave", entry)
                slave = OfficialSlave(
                    tmp_path / "slave",
                    namesrv,
                    innerClientAuthenticationCredentials=json.dumps(inner),
                    authenticationMetadataProvider=USERS_OF_A_SLAVE,
                    **SIZES,
                )
                slave.start()
                try:
                    with Producer("writers", config=config) as producer:
                        producer.send(Message("orders", b"confirmed by the slave"))
                    wait_until(lambda: CONFIRMED_KEY in _offsets(slave.store), "no offsets")
                    wait_until(lambda: "readers" in _groups(slave.store), "no groups")
                finally:
                    slave.stop()
