"""docs/compatibility.md says of every request whether it is served, and what clients can do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from halfmq.broker.config import BrokerConfig, NetworkConfig, StoreSettings
from halfmq.broker.handlers.admin.access import PlainAclHandlers, UserHandlers
from halfmq.broker.service import Broker
from halfmq.remoting.codes import RequestCode
from tests.support.features import CLIENTS_OF, shown_by_tests

DOCUMENT: Final = Path(__file__).parents[3] / "docs" / "compatibility.md"
ROW: Final = re.compile(r"^\| (\d+) \| (\w+) \| ([^|]+?) \|", re.MULTILINE)

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
    """Who reads that a request is served can rely on it, and finds every request."""
    rows = {int(code): (name, state) for code, name, state in ROW.findall(DOCUMENT.read_text())}
    network = NetworkConfig(listen_port=0, namesrv_listen_port=0)
    broker = Broker(BrokerConfig(network=network, store=StoreSettings(root=tmp_path)))
    served = {code for code, (_, state) in rows.items() if state == "served"}
    with_access = {code for code, (_, state) in rows.items() if state.startswith("served with")}

    assert {code: name for code, (name, _) in rows.items()} == {
        int(code): code.name for code in RequestCode
    }
    assert served == broker.codes
    users = UserHandlers.handlers(UserHandlers.__new__(UserHandlers))
    accounts = PlainAclHandlers.handlers(PlainAclHandlers.__new__(PlainAclHandlers))
    assert with_access == users.keys() | accounts.keys()
