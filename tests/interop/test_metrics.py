"""Metrics, health and alerts of a running broker over HTTP."""

from __future__ import annotations

import json
import re
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
import yaml
from prometheus_client.parser import text_string_to_metric_families

from halfmq.broker.http.families import FAMILIES
from halfmq.client import AclEntry, Decision, Message
from halfmq.client.blocking import Admin, Consumer, Producer, TransactionProducer
from halfmq.client.testing import BrokerProcess, broker_process
from tests.support.patience import PATIENCE_S, wait_until

CONF = Path(__file__).parents[2] / "conf"
ALERTS = CONF / "prometheus" / "alerts.yml"

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is missing (apt-get install prometheus): formats and alerts are NOT tested",
)


def _url(broker: BrokerProcess, path: str) -> str:
    return f"http://{broker.ready['http']}{path}"


def _get(broker: BrokerProcess, path: str, **more: Any) -> httpx.Response:
    return httpx.get(_url(broker, path), timeout=PATIENCE_S, **more)


def _scrape(broker: BrokerProcess) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return labels and value of each sample, by name."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(_get(broker, "/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


def _value(broker: BrokerProcess, name: str, **labels: str) -> float:
    return sum(
        value for found, value in _scrape(broker).get(name, []) if labels.items() <= found.items()
    )


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker that has seen some of everything."""
    with broker_process(
        tmp_path_factory.mktemp("metrics"),
        httpListenPort=0,
        transactionTimeOut=200,
        transactionCheckInterval=200,
        transactionCheckMax=1,
        messageDelayLevel="1s 1s 1s 1s",
    ) as running:
        with Admin(namesrv=running.address) as admin:
            admin.create_topic("orders", queues=2)
        _use(running)
        yield running


def _use(broker: BrokerProcess) -> None:
    """Five messages of which a group acknowledges three; a dead letter; two transactions."""
    with Producer("shop", namesrv=broker.address) as producer:
        for number in range(5):
            producer.send(Message("orders", b"x" * 100, keys=str(number)))
    with Consumer("mail", {"orders": "*"}, namesrv=broker.address) as consumer:
        for number in range(5):
            message = consumer.receive(timeout=PATIENCE_S)
            assert message is not None
            if number == 0:
                message.reject("unreadable")
            elif number < 4:
                assert message.ack()
    with TransactionProducer(
        "payments", checker=lambda _half: Decision.UNKNOWN, namesrv=broker.address
    ) as producer:
        with producer.transaction(Message("orders", b"paid")):
            pass
        with producer.transaction(Message("orders", b"stuck")) as transaction:
            transaction.decide(Decision.UNKNOWN)
        wait_until(
            lambda: _value(broker, "halfmq_transactions_pending_parked") == 1, "it is not parked"
        )


def test_figures_are_those_of_the_admin(broker: BrokerProcess) -> None:
    """What an operator sees in one place agrees with the other."""
    with Admin(namesrv=broker.address) as admin:
        lag = sum(one.lag for one in admin.offsets("mail", "orders"))

    assert _value(broker, "rocketmq_consumer_lag_messages", consumer_group="mail") == lag > 0
    assert _value(broker, "rocketmq_consumer_lag_latency", consumer_group="mail") > 0
    assert _value(broker, "halfmq_consumer_lag_seconds", consumer_group="mail") > 0
    assert _value(broker, "rocketmq_messages_in_total", topic="orders") == 6
    assert _value(broker, "rocketmq_messages_out_total", topic="orders") == 5
    assert _value(broker, "rocketmq_send_to_dlq_messages_total", consumer_group="mail") == 1
    assert _value(broker, "halfmq_dead_letters", consumer_group="mail") == 1
    assert _value(broker, "rocketmq_commit_messages_total") == 1
    assert _value(broker, "halfmq_transaction_decision_seconds_count") == 1
    origin = {"producer_group": "payments", "topic": "orders"}
    assert _value(broker, "halfmq_transactions_pending", **origin) == 1
    assert _value(broker, "halfmq_transactions_oldest_age_seconds", **origin) > 0
    assert _value(broker, "halfmq_flush_seconds_count") > 0
    assert _value(broker, "halfmq_event_loop_delay_seconds_count") > 0
    assert _value(broker, "halfmq_writable") == 1


def test_every_documented_metric_is_served(broker: BrokerProcess) -> None:
    """The table of families leaves out none, and promises none that does not come."""
    with (
        Producer("lives", namesrv=broker.address),
        Consumer("alive", {"orders": "*"}, namesrv=broker.address) as consumer,
    ):
        message = consumer.receive(timeout=PATIENCE_S)
        assert message is not None
        message.retry()
        served = set(_scrape(broker))

    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in served} == set(FAMILIES)


def test_probes_say_whether_it_lives_and_takes_messages(tmp_path: Path) -> None:
    """A broker whose disk is full lives, but is not ready, and says why."""
    with broker_process(tmp_path, httpListenPort=0) as broker:
        assert [_get(broker, path).status_code for path in ("/livez", "/readyz")] == [200, 200]
        broker.restart(diskMaxUsedSpaceRatio=10, diskSpaceWarningLevelRatio=10)
        wait_until(lambda: _get(broker, "/readyz").status_code == 503, "it is ready")

        assert "diskSpaceWarningLevelRatio=10" in _get(broker, "/readyz").text
        assert _get(broker, "/livez").status_code == 200
        assert _value(broker, "halfmq_writable") == 0


def test_a_port_that_is_taken_is_an_error_only_if_it_was_set(tmp_path: Path) -> None:
    """Two brokers on one machine both start with the defaults."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [
                *(sys.executable, "-m", "halfmq.broker", "--set", f"httpListenPort={port}"),
                *("--set", "listenPort=0", "--set", "namesrvListenPort=0"),
                *("--set", f"storePathRootDir={tmp_path}"),
            ],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    assert done.returncode == 5
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "set httpListenPort" in done.stderr


def test_with_access_control_metrics_need_a_user_and_probes_none(tmp_path: Path) -> None:
    """Users and policies are those of all other requests."""
    with broker_process(
        tmp_path,
        httpListenPort=0,
        authenticationEnabled="true",
        authorizationEnabled="true",
        initAuthenticationUser='{"username":"admin","password":"secret"}',
    ) as broker:
        with Admin(namesrv=broker.address, access_key="admin", secret_key="secret") as admin:
            admin.create_user("guest", "nothing")
            admin.create_user("reader", "may-read")
            admin.create_acl("reader", AclEntry(resource="Cluster:DefaultCluster", actions=["Get"]))

        for name, password, code in [
            ("admin", "secret", 200),
            ("reader", "may-read", 200),
            ("guest", "nothing", 401),
            ("admin", "wrong", 401),
            ("nobody", "", 401),
        ]:
            answer = _get(broker, "/metrics", auth=(name, password))
            assert (name, answer.status_code) == (name, code)
        assert _get(broker, "/metrics").status_code == 401
        assert [_get(broker, path).status_code for path in ("/livez", "/readyz")] == [200, 200]


def test_it_speaks_tls_as_the_other_ports(tmp_path: Path) -> None:
    """PERMISSIVE serves both on one port."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    with broker_process(
        tmp_path / "broker",
        httpListenPort=0,
        tlsServerMode="permissive",
        tlsServerCertPath=tmp_path / "cert.pem",
        tlsServerKeyPath=tmp_path / "key.pem",
    ) as broker:
        secure = f"https://{broker.ready['http']}/livez"

        assert httpx.get(secure, verify=trusted, timeout=PATIENCE_S).text == "ok\n"
        assert _get(broker, "/livez").text == "ok\n"


def test_strangers_cannot_use_up_connections(broker: BrokerProcess) -> None:
    """Probes are answered while others hold as many connections as there may be, and more."""
    host, port = broker.ready["http"].split(":")
    opened = [socket.create_connection((host, int(port)), PATIENCE_S) for _ in range(200)]
    try:
        for _ in range(3):
            assert _get(broker, "/livez").status_code == 200
        assert opened[0].recv(1) == b""  # the oldest one was closed
    finally:
        for one in opened:
            one.close()


@needs_promtool
@pytest.mark.parametrize("accept", ["text/plain;version=0.0.4", "application/openmetrics-text"])
def test_prometheus_accepts_the_format(broker: BrokerProcess, accept: str) -> None:
    """Both text formats; promtool checks names, types and units of the first."""
    answer = _get(broker, "/metrics", headers={"Accept": accept})

    assert answer.headers["content-type"].startswith(accept.partition(";")[0])
    if "openmetrics" in accept:
        assert answer.text.endswith("# EOF\n")
        return
    checked = subprocess.run(
        ["promtool", "check", "metrics"],
        input=answer.text,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    # Names of RocketMQ are not all as promtool's lint wants them; a syntax error is another text.
    foreign = [line for line in checked.stderr.splitlines() if not line.startswith("rocketmq_")]
    assert foreign == []


def _names_in(expression: str) -> set[str]:
    return {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for name in re.findall(r"\b(?:halfmq|rocketmq)_\w+", expression)
    }


def test_alerts_and_dashboard_use_metrics_that_exist() -> None:
    """An alert on a name that nobody serves never fires."""
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    board = json.loads((CONF / "grafana" / "halfmq.json").read_text())
    used = [rule["expr"] for rule in rules]
    used += [target["expr"] for panel in board["panels"] for target in panel["targets"]]

    assert {name for one in used for name in _names_in(one)} <= set(FAMILIES)


WELL: dict[str, str] = {
    'up{job="halfmq"}': "1x60",
    "halfmq_writable": "1x60",
    "halfmq_replication_required": "1x60",
    "halfmq_replication_connected": "1x60",
    "halfmq_recovery_damages": "0x60",
    "halfmq_disk_full_in_seconds": "1000000x60",
    "halfmq_retention_blocked_at": "-1x120",
    "halfmq_archive_failing": "0x60",
    'halfmq_transactions_oldest_age_seconds{producer_group="g"}': "3x60",
    "halfmq_transactions_waiting_for_producers": "0x60",
    "halfmq_transactions_pending_parked": "0x60",
    'rocketmq_send_to_dlq_messages_total{consumer_group="g"}': "7x60",
    'rocketmq_consumer_lag_latency{consumer_group="g"}': "50x60",
    'rocketmq_consumer_lag_messages{consumer_group="g"}': "5x60",
    'rocketmq_consumer_connections{consumer_group="g"}': "1x60",
    "halfmq_consumers_groups_unequal": "0x60",
    'halfmq_flush_seconds_bucket{le="0.005"}': "0+60x60",
    'halfmq_flush_seconds_bucket{le="1.0"}': "0+60x60",
    'halfmq_flush_seconds_bucket{le="+Inf"}': "0+60x60",
    'halfmq_event_loop_delay_seconds_bucket{le="0.005"}': "0+600x60",
    'halfmq_event_loop_delay_seconds_bucket{le="1.0"}': "0+600x60",
    'halfmq_event_loop_delay_seconds_bucket{le="+Inf"}': "0+600x60",
    'halfmq_limit_used{limit="topics"}': "50x60",
    'halfmq_limit_most{limit="topics"}': "100x60",
    "halfmq_access_refused_authentication_total": "0x60",
    "halfmq_access_refused_authorization_total": "0x60",
}
"""What each metric is while all is well: start, step and count of samples a minute apart."""

FAULTS: dict[str, dict[str, str]] = {
    "HalfmqDown": {'up{job="halfmq"}': "0x60"},
    "HalfmqRefusesMessages": {"halfmq_writable": "0x60"},
    "HalfmqNoSlave": {"halfmq_replication_connected": "0x60"},
    "HalfmqStoreDamaged": {"halfmq_recovery_damages": "1x60"},
    "HalfmqDiskFullSoon": {"halfmq_disk_full_in_seconds": "7200x60"},
    "HalfmqDeletionBlocked": {"halfmq_retention_blocked_at": "0x120"},
    "HalfmqArchiveFails": {"halfmq_archive_failing": "1x60"},
    "HalfmqTransactionUndecided": {
        'halfmq_transactions_oldest_age_seconds{producer_group="g"}': "0+60x60"
    },
    "HalfmqNobodyToAsk": {"halfmq_transactions_waiting_for_producers": "1x60"},
    "HalfmqTransactionParked": {"halfmq_transactions_pending_parked": "1x60"},
    "HalfmqDeadLetters": {'rocketmq_send_to_dlq_messages_total{consumer_group="g"}': "7+1x60"},
    "HalfmqConsumerLags": {'rocketmq_consumer_lag_latency{consumer_group="g"}': "0+60000x60"},
    "HalfmqNoConsumer": {'rocketmq_consumer_connections{consumer_group="g"}': "_x60"},
    "HalfmqUnequalSubscriptions": {"halfmq_consumers_groups_unequal": "1x60"},
    "HalfmqSlowFlush": {'halfmq_flush_seconds_bucket{le="0.005"}': "0+30x60"},
    "HalfmqSlowLoop": {'halfmq_event_loop_delay_seconds_bucket{le="0.005"}': "0+300x60"},
    "HalfmqLimitNearlyReached": {'halfmq_limit_used{limit="topics"}': "90x60"},
    "HalfmqAccessRefused": {"halfmq_access_refused_authentication_total": "0+60x60"},
}


def _fired(tmp_path: Path, series: dict[str, str], alert: str) -> bool:
    """Return whether Prometheus' own rule engine fires an alert within an hour and a half."""
    test = {
        "rule_files": [str(ALERTS)],
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": at} for name, at in series.items()],
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{alert}", alertstate="firing"}}) > 0',
                        "eval_time": at,
                        "exp_samples": [],
                    }
                    for at in ("30m", "55m", "90m")
                ],
            }
        ],
    }
    file = tmp_path / f"{alert}.yml"
    file.write_text(yaml.safe_dump(test))
    done = subprocess.run(
        ["promtool", "test", "rules", str(file)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert "parse error" not in done.stdout + done.stderr, done.stdout + done.stderr
    return done.returncode != 0  # it expected nothing


@needs_promtool
@pytest.mark.parametrize("alert", FAULTS)
def test_each_alert_fires_on_its_fault_and_on_nothing_else(tmp_path: Path, alert: str) -> None:
    """By Prometheus' own rule engine, on a healthy broker and on one with the fault."""
    assert not _fired(tmp_path, WELL, alert)
    assert _fired(tmp_path, WELL | FAULTS[alert], alert)


def test_each_alert_has_its_fault() -> None:
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]

    assert [rule["alert"] for rule in rules] == list(FAULTS)
