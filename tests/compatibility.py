"""The tables of docs/compatibility.md, from the tests, the router and the reasons of refusals.

``python -m tests.compatibility`` writes them. People write what stands around them, and the notes
in their last column, which stay with their rows. A test compares the page with what is written.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from halfmq.broker.config import BrokerConfig, NetworkConfig, StoreSettings
from halfmq.broker.handlers.admin.access import PlainAclHandlers
from halfmq.broker.net.refused_codes import REFUSED_CODES, WITHOUT_ACCESS
from halfmq.broker.service import Broker
from halfmq.remoting.codes import RequestCode
from tests.interop import test_mqadmin_commands as commands
from tests.interop import test_operators_hour, test_traces
from tests.support.broker_parts import router_of
from tests.support.features import CLIENTS_OF, shown_by_tests

DOCUMENT: Final = Path(__file__).parents[1] / "docs" / "compatibility.md"
NOT_SHOWN: Final = "-"
ABSENT: Final = "not in this client"

Rows = dict[str, list[str]]
"""The cells of a table after the first one, by the first one."""


def features(old: Rows) -> Rows:
    """Return what each client is shown to do; a cell keeps the difference that it names."""
    clients = dict.fromkeys(client for names in CLIENTS_OF.values() for client in names)
    shown = shown_by_tests()
    names = [name for name in old if any(row == name for row, _ in shown)]
    names += sorted({name for name, _ in shown} - old.keys())
    rows: Rows = {}
    for name in names:
        cells = old.get(name, [NOT_SHOWN] * len(clients))
        rows[name] = [
            _cell(cell, is_shown=(name, client) in shown)
            for client, cell in zip(clients, cells, strict=True)
        ]
    return rows


def _cell(old: str, *, is_shown: bool) -> str:
    if is_shown:
        return "passes" if old in (NOT_SHOWN, ABSENT) else old
    return ABSENT if old == ABSENT else NOT_SHOWN


def requests(old: Rows) -> Rows:
    """Return every request code with its name, state and note."""
    names = {int(code): code.name for code in RequestCode}
    names |= {code: row.name for code, row in REFUSED_CODES.items()}
    with tempfile.TemporaryDirectory() as root:
        network = NetworkConfig(listen_port=0, namesrv_listen_port=0)
        store = StoreSettings(root=Path(root))
        served = router_of(Broker(BrokerConfig(network=network, store=store))).codes
    accounts = PlainAclHandlers.__new__(PlainAclHandlers)
    refused = {code for code, one in accounts.handlers().items() if one == accounts.refuse}
    rows: Rows = {}
    for code, name in sorted(names.items()):
        _, state, note = old.get(str(code), ["", "not sent", ""])
        if code in refused:
            state = "refused"
        elif code in REFUSED_CODES:
            state, note = "refused", REFUSED_CODES[code].why
        elif code in served:
            state = "served"
        elif code in WITHOUT_ACCESS:
            state = "served with users" if code > 3000 else "served with a plain ACL"
        rows[str(code)] = [name, state, note]
    return rows


def mqadmin(old: Rows) -> Rows:
    """Return every command with what its test shows, and its note."""
    rows: Rows = {}
    for name in sorted(commands.CASES.keys() | commands.ENDLESS):
        case = commands.CASES.get(name)
        note = old.get(f"`{name}`", ["", ""])[1]
        state = "works"
        if case is not None and case.refused in WITHOUT_ACCESS:
            state = "works with users"
        elif case is not None and case.refused is not None:
            state, note = "refused", REFUSED_CODES[case.refused].why
        elif name in commands.FAILING:
            state = "refused"
        rows[f"`{name}`"] = [state, note]
    return rows


def differences(_old: Rows) -> Rows:
    """Return why lines of commands differ from those at RocketMQ."""
    rows: Rows = {}
    for row in (*test_operators_hour.DIFFERENCES, *test_traces.DIFFERENCES):
        names = [f"`{name}`" for name in row.commands.split(", ") if name]
        reasons = rows.setdefault(", ".join(names) or "all", [""])
        reasons[0] = "; ".join(filter(None, (reasons[0], row.why)))
    return rows


TABLES: Final[dict[str, Callable[[Rows], Rows]]] = {
    "feature": features,
    "code": requests,
    "command": mqadmin,
    "lines of": differences,
}
"""First title of a table → what fills it."""


def written(page: str) -> str:
    """Return the page with its tables filled anew."""
    for title, fill in TABLES.items():
        head = re.escape(title)
        found = re.search(rf"^(\| {head} \|.*\n\|[-|]+\n)((?:\|.*\n?)*)", page, re.MULTILINE)
        assert found is not None, f"no table begins with {title}"
        rows = fill(dict(_cells(line) for line in found[2].splitlines()))
        page = page[: found.start(2)] + "".join(_lines(rows.items())) + page[found.end(2) :]
    return page


def _cells(line: str) -> tuple[str, list[str]]:
    first, *others = [cell.strip() for cell in line.strip().strip("|").split("|")]
    return first, others


def _lines(rows: Iterable[tuple[str, list[str]]]) -> Iterable[str]:
    for first, others in rows:
        yield f"| {' | '.join((first, *others))} |".replace("|  |", "| |") + "\n"


def main() -> None:
    """Write the page."""
    page = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(written(page), encoding="utf-8")


if __name__ == "__main__":
    main()
