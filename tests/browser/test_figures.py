"""What metrics, the command, mqadmin and the console show of one broker is the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from halfmq.client import Decision, Message
from halfmq.client.blocking import Consumer, Producer, TransactionProducer
from halfmq.client.testing import BrokerProcess
from halfmq.command.main import main
from tests.browser.test_console import console, text_of, until
from tests.support.browser import Page
from tests.support.mqadmin import Mqadmin, mqadmin
from tests.support.patience import PATIENCE_S, wait_until

SENT, CONSUMED, DEAD, COMMITTED, UNDECIDED = 9, 4, 1, 2, 3
Figures = Mapping[str, int]


def expected() -> Figures:
    return {
        "messages": SENT + COMMITTED,
        "lag": SENT + COMMITTED - CONSUMED - DEAD,
        "dead": DEAD,
        "undecided": UNDECIDED,
        "queues": 2,
    }


def by_metrics(broker: BrokerProcess) -> Figures:
    text = httpx.get(f"http://{broker.ready['http']}/metrics", timeout=PATIENCE_S).text

    def value(name: str, **labels: str) -> int:
        return round(
            sum(
                sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
                if sample.name == name and labels.items() <= sample.labels.items()
            )
        )

    return {
        "messages": value("rocketmq_messages_in_total", topic="orders"),
        "lag": value("rocketmq_consumer_lag_messages", consumer_group="mail", topic="orders"),
        "dead": value("halfmq_dead_letters", consumer_group="mail"),
        "undecided": value("halfmq_transactions_pending", producer_group="pay", topic="orders"),
    }


def by_command(broker: BrokerProcess, capsys: pytest.CaptureFixture[str]) -> Figures:
    def ask(*words: str) -> list[dict[str, object]]:
        assert main([*words, "--json", "--namesrv", broker.address]) == 0
        found: list[dict[str, object]] = json.loads(capsys.readouterr().out)
        return found

    (topic,) = [one for one in ask("topic", "list") if one["name"] == "orders"]
    (group,) = [one for one in ask("group", "list") if one["name"] == "mail"]
    lags = {one["topic"]: one["messages"] for one in group["topics"]}  # type: ignore[attr-defined]
    causes = ask("dlq", "list", "mail")
    return {
        "messages": int(str(topic["messages"])),
        "lag": lags["orders"],
        "dead": sum(int(str(one["count"])) for one in causes),
        "undecided": len(ask("tx", "list", "--group", "pay")),
    }


def by_mqadmin(tool: Mqadmin) -> Figures:
    status = [line.split() for line in tool.run("topicStatus", "-t", "orders")]
    queues = [cells for cells in status if cells[:1] == ["broker-a"]]
    progress = [line.split() for line in tool.run("consumerProgress", "-g", "mail")]
    dead = [line.split() for line in tool.run("topicStatus", "-t", "%DLQ%mail")]
    return {
        "messages": sum(int(cells[3]) - int(cells[2]) for cells in queues),
        "lag": sum(int(cells[3]) - int(cells[4]) for cells in progress if cells[:1] == ["orders"]),
        "dead": sum(int(cells[3]) - int(cells[2]) for cells in dead if cells[:1] == ["broker-a"]),
        "queues": len(queues),
    }


def by_console(broker: BrokerProcess, tab: Page) -> Figures:
    def row(address: str, path: str) -> list[str]:
        tab.open(address + path)
        until(tab, "1-1 of 1")
        cells = "[...document.querySelectorAll('tbody tr td')].map(e => e.innerText.trim())"
        found: list[str] = tab.run(cells)
        return found

    tab.look(width=1280)
    with console(broker.address) as address:
        topic = row(address, "/topics?q=orders")
        group = row(address, "/groups?q=mail")
        dead = row(address, "/dead-letters?q=mail")
        tab.open(f"{address}/transactions?q=pay")
        until(tab, f"of {UNDECIDED}")
        undecided = text_of(tab).rpartition(" of ")[2].split()[0]
    return {
        "queues": int(topic[2]),
        "messages": int(topic[3]),
        "lag": int(group[2]),
        "dead": int(dead[2]),
        "undecided": int(undecided),
    }


def test_all_places_show_the_same_figures(
    tmp_path: Path, tab: Page, capsys: pytest.CaptureFixture[str]
) -> None:
    """Messages, lag, dead letters, undecided transactions and queues, counted by the test too."""
    with ExitStack() as stack:
        tool = mqadmin(stack, "5.3.3", tmp_path, httpListenPort=0, transactionTimeOut=600_000)
        broker = tool.broker
        tool.run("updateTopic", *tool.at, "-t", "orders", "-r", "2", "-w", "2")
        with Producer("shop", namesrv=broker.address) as producer:
            for number in range(SENT):
                producer.send(Message("orders", b"%d" % number))
        with TransactionProducer(
            "pay", lambda _half: Decision.UNKNOWN, namesrv=broker.address
        ) as transactions:
            for number in range(COMMITTED + UNDECIDED):
                with transactions.transaction(Message("orders", b"paid")) as one:
                    if number >= COMMITTED:
                        one.decide(Decision.UNKNOWN)
        with Consumer("mail", {"orders": "*"}, namesrv=broker.address) as consumer:
            for number in range(CONSUMED + DEAD):
                message = consumer.receive(PATIENCE_S)
                assert message is not None
                if number < DEAD:
                    message.reject("unreadable")
                else:
                    message.ack()
        wait_until(lambda: by_metrics(broker)["lag"] == expected()["lag"], "offsets do not arrive")

        for place, figures in (
            ("metrics", by_metrics(broker)),
            ("command", by_command(broker, capsys)),
            ("mqadmin", by_mqadmin(tool)),
            ("console", by_console(broker, tab)),
        ):
            assert figures == {name: expected()[name] for name in figures}, place
