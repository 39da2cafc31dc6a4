"""docs/compatibility.md says of every request whether it is served, and what clients can do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from halfmq.broker.config import BrokerConfig, NetworkConfig, StoreSettings
from halfmq.broker.handlers.admin.access import PlainAclHandlers, UserHandlers
from halfmq.broker.net.unserved import UNSERVED, WITHOUT_ACCESS, remark_of
from halfmq.broker.service import Broker
from halfmq.remoting.codes import RequestCode
from tests.support.features import CLIENTS_OF, shown_by_tests

DOCUMENT: Final = Path(__file__).parents[3] / "docs" / "compatibility.md"
ROW: Final = re.compile(r"^\| (\d+) \| (\w+) \| ([^|]+?) \| (?:(.*?) ?)?\|$", re.MULTILINE)

FEATURES: Final = re.compile(r"^\| feature \| (.+) \|\n\|[-| ]+\|\n((?:\|.+\|\n)+)", re.MULTILINE)


def test_every_feature_in_the_document_has_a_test() -> None:
    """A cell that is no hyphen stands for a test with that client, and each test for a cell."""
    table = FEATURES.search(DOCUMENT.read_text())
    assert table is not None
    clients = table[1].split(" | ")
    rows = [line.strip("| ").split(" | ") for line in table[2].splitlines()]
    told = {
        (name, client)
        for name, *cells in rows
        for client, cell in zip(clients, cells, strict=True)
        if cell != "-"
    }

    assert set(clients) == {client for names in CLIENTS_OF.values() for client in names}
    assert told == shown_by_tests()


def test_the_document_agrees_with_the_router(tmp_path: Path) -> None:
    """A reader can rely on which requests are served, and finds every request."""
    found = ROW.findall(DOCUMENT.read_text())
    rows = {int(code): (name, state) for code, name, state, _ in found}
    network = NetworkConfig(listen_port=0, namesrv_listen_port=0)
    broker = Broker(BrokerConfig(network=network, store=StoreSettings(root=tmp_path)))
    served = {code for code, (_, state) in rows.items() if state == "served"}
    with_access = {code for code, (_, state) in rows.items() if state.startswith("served with")}

    refused = {int(code): (name, why) for code, name, state, why in found if state == "refused"}

    assert {code: name for code, (name, _) in rows.items()} == {
        **{int(code): code.name for code in RequestCode},
        **{code: name for code, (name, _) in UNSERVED.items()},
    }
    assert served == broker.codes
    assert refused == UNSERVED, "each refused request has its reason in broker/net/unserved.py"
    users = UserHandlers.handlers(UserHandlers.__new__(UserHandlers))
    accounts = PlainAclHandlers.handlers(PlainAclHandlers.__new__(PlainAclHandlers))
    assert with_access == users.keys() | accounts.keys()
    assert with_access == WITHOUT_ACCESS.keys()


def test_the_answer_to_a_refused_request_says_why() -> None:
    """In RocketMQ's words first, by which tools know it; an unknown code has no reason."""
    assert remark_of(907) == (
        " request type 907 not supported: there is no replication; this broker is a master without "
        "slaves"
    )
    assert "authenticationEnabled=true" in remark_of(3005)
    assert remark_of(9999) == " request type 9999 not supported"
