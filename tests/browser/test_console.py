"""The console, used by a browser as an operator would, at a real broker."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from halfmq.client import Decision, Message, TransactionProducer
from halfmq.client.blocking import Admin, Consumer, Producer
from halfmq.client.testing import BrokerProcess, broker_process
from tests.support.browser import Page
from tests.support.patience import PATIENCE_S, wait_until

UNDECIDED = 50_000
PHONE, DESK = 390, 1280  # px
PATHS = (
    *("/", "/transactions", "/message", "/topics", "/groups", "/dead-letters", "/delayed"),
    *("/connections", "/brokers", "/settings", "/access"),
)


@contextmanager
def console(namesrv: str) -> Iterator[str]:
    """Run ``halfmq console`` and yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "halfmq.command", "console", "--namesrv", namesrv]
    # NiceGUI behaves differently in tests, which it recognises by this variable.
    environment = {key: value for key, value in os.environ.items() if "PYTEST" not in key}
    with subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.DEVNULL, env=environment
    ) as process:

        def answers() -> bool:
            assert process.poll() is None, "the console has ended"
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
            except OSError:
                return False
            return True

        try:
            wait_until(answers, "the console does not start")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    directory = tmp_path_factory.mktemp("console")
    with broker_process(directory, transactionTimeOut=600_000) as running:
        asyncio.run(_leave_undecided(running.address))
        with Producer("p", namesrv=running.address) as producer:
            for number in range(3):
                producer.send(Message("orders", b"<b>bold</b>", keys=f"o-{number}"))
        with Consumer("mail", {"orders": "*"}, namesrv=running.address) as consumer:
            message = consumer.receive(timeout=PATIENCE_S)
            assert message is not None
            message.reject("<i>unreadable</i>")
        yield running


async def _leave_undecided(namesrv: str) -> None:
    async with TransactionProducer(
        "pay", lambda _half: Decision.UNKNOWN, namesrv=namesrv
    ) as producer:
        numbers = iter(range(UNDECIDED))

        async def leave() -> None:
            for number in numbers:
                async with producer.transaction(
                    Message("payments", b"x", keys=f"pay-{number}")
                ) as one:
                    one.decide(Decision.UNKNOWN)

        await asyncio.gather(*(leave() for _ in range(64)))


@pytest.fixture(scope="module")
def address(broker: BrokerProcess) -> Iterator[str]:
    with console(broker.address) as served:
        yield served


def text_of(tab: Page) -> str:
    return str(tab.run("document.body?.innerText"))


def until(tab: Page, text: str) -> None:
    """Wait for a text on a page that listens: what is typed before it is connected is lost."""
    wait_until(
        lambda: bool(tab.run("!!window.did_handshake")) and text in text_of(tab),
        f"{text!r} does not appear",
    )


def click(tab: Page, selector: str, text: str = "") -> None:
    """Click the first element that has this text, when it is there and enabled."""
    find = (
        f"[...document.querySelectorAll({json.dumps(selector)})]"
        f".find(e => e.innerText.trim().startsWith({json.dumps(text)}) && !e.disabled)"
    )
    wait_until(lambda: bool(tab.run(f"!!{find}")), f"there is no {text!r} to click")
    tab.run(f"{find}.click()")


def type_into(tab: Page, label: str, text: str) -> None:
    quoted = json.dumps(label)
    tab.run(f"document.querySelector('input[aria-label=' + JSON.stringify({quoted}) + ']').focus()")
    tab.ask("Input.insertText", text=text)


def test_one_of_fifty_thousand_is_found_and_decided(
    broker: BrokerProcess, address: str, tab: Page
) -> None:
    """By its key in one action, opened by a second; decided by a word that is typed."""
    tab.look(width=DESK)
    begun = time.monotonic()
    tab.open(f"{address}/transactions")
    until(tab, f"1-25 of {UNDECIDED}")
    loaded = time.monotonic()
    type_into(tab, "Search", "pay-31415")
    until(tab, "1-1 of 1")
    print(f"list in {loaded - begun:.1f} s, search in {time.monotonic() - loaded:.1f} s")

    click(tab, "tbody tr")
    until(tab, "Undecided transaction")
    click(tab, "button", "COMMIT")
    until(tab, "to confirm")
    type_into(tab, "Reason, for the broker's log", "paid by hand")
    type_into(tab, "Type “commit” to confirm", "commit")
    click(tab, "button", "CONFIRM")
    until(tab, "its message is")

    assert "paid by hand" in broker.log
    with Admin(namesrv=broker.address) as admin:
        assert len(admin.messages_with_key("payments", "pay-31415")) == 1


def press(tab: Page, key: str, text: str = "") -> None:
    tab.ask("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
    tab.ask("Input.dispatchKeyEvent", type="keyUp", key=key)


def test_a_list_is_searched_linked_to_and_opened_by_keys(address: str, tab: Page) -> None:
    """``/`` goes to the search, which the address names; a row's first cell is a button."""
    tab.look(width=DESK)
    tab.open(f"{address}/transactions?q=pay-2718")
    until(tab, "with “pay-2718”")
    press(tab, "/")
    wait_until(
        lambda: bool(tab.run("document.activeElement.getAttribute('aria-label') === 'Search'")),
        "the search has no focus",
    )
    tab.run("document.activeElement.select()")
    tab.ask("Input.insertText", text="pay-31999")
    until(tab, "1-1 of 1")
    wait_until(lambda: "q=pay-31999" in str(tab.run("location.href")), "the address stays")
    tab.run("document.querySelector('tbody a').focus()")
    press(tab, "Enter", "\r")
    until(tab, "Undecided transaction")
    tab.open(str(tab.run("location.href")))
    until(tab, "1-1 of 1")


def _first_row(tab: Page) -> str:
    return str(tab.run("document.querySelector('tbody tr')?.innerText"))


def test_a_sorted_list_can_be_linked_to(address: str, tab: Page) -> None:
    """The address follows the order, also one that is chosen by keys, and restores it."""
    tab.look(width=DESK)
    tab.open(f"{address}/transactions?q=pay-499&sort=-Keys")
    until(tab, "with “pay-499”")
    wait_until(lambda: "pay-49999" in _first_row(tab), "the order of the address has no effect")
    tab.run("[...document.querySelectorAll('th')].find(e => e.innerText.includes('Keys')).focus()")
    press(tab, "Enter", "\r")  # from descending to unsorted
    wait_until(lambda: "sort" not in str(tab.run("location.href")), "the address stays")
    press(tab, "Enter", "\r")
    wait_until(
        lambda: str(tab.run("location.search")) == "?q=pay-499&sort=Keys", "the address stays"
    )
    wait_until(lambda: bool(re.search(r"pay-499\b", _first_row(tab))), "it is not sorted")
    assert tab.run("document.activeElement.innerText.includes('Keys')")  # where it was
    tab.open(str(tab.run("location.href")))
    until(tab, "with “pay-499”")
    wait_until(lambda: bool(re.search(r"pay-499\b", _first_row(tab))), "the order is lost")
    tab.open(f"{address}/transactions?q=pay-499&sort=nonsense")
    until(tab, "with “pay-499”")


def test_a_topic_is_changed(broker: BrokerProcess, address: str, tab: Page) -> None:
    """Its permissions, where it is opened."""
    with Admin(namesrv=broker.address) as admin:
        admin.create_topic("closing", queues=2)
        tab.look(width=DESK)
        tab.open(f"{address}/topics?q=closing")
        until(tab, "1-1 of 1")
        click(tab, "tbody tr")
        until(tab, "Producers may send")
        click(tab, "div.q-checkbox", "Producers may send")
        click(tab, "button", "CHANGE")
        until(tab, "changed topic closing")
        (topic,) = [one for one in admin.topics() if one.name == "closing"]
    assert (topic.writable, topic.readable, topic.write_queues) == (False, True, 2)


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_every_page_fits_and_asks_nobody_else(address: str, tab: Page, width: int) -> None:
    """At the width of a phone too; offline, without an error in the browser's console."""
    tab.look(width=width)
    for path in PATHS:
        tab.open(address + path)
        until(tab, "halfmq")
        wait_until(
            lambda: bool(tab.run("!!document.querySelector('.nicegui-content > *')")),
            f"{path} stays empty",
        )
        assert tab.run("document.scrollingElement.scrollWidth <= innerWidth"), path
        assert all(url.startswith((address, "data:", "blob:")) for url in tab.requests), path
        assert [one for one in tab.complaints if _is_error(one)] == [], path


def _is_error(complaint: dict[str, Any]) -> bool:
    return complaint.get("type") == "error" or "exceptionDetails" in complaint


def test_what_fails_is_named_with_its_cause(address: str, tab: Page) -> None:
    """From the first page to the cause; texts of others are shown as text."""
    tab.look(width=DESK)
    tab.open(address)
    until(tab, "group mail: has 1 dead letters, the last one: <i>unreadable</i>")
    click(tab, "a", "group mail: has 1")
    until(tab, "<i>unreadable</i>")
    click(tab, "tbody tr")
    until(tab, "SEND AGAIN")
    assert tab.run("document.querySelectorAll('td i, td b').length") == 0


def test_the_life_of_a_message_is_shown(address: str, tab: Page) -> None:
    """Found by its key, with what became of it in each group."""
    tab.look(width=DESK)
    tab.open(f"{address}/message")
    until(tab, "FIND")
    type_into(tab, "Id, key or time", "o-0")
    type_into(tab, "Topic", "orders")
    click(tab, "button", "search")
    until(tab, "mail: ")
    tab.open(f"{address}/message")
    until(tab, "FIND")
    type_into(tab, "Id, key or time", "2020-01-01T00:00")
    type_into(tab, "Topic", "orders")
    click(tab, "button", "search")
    until(tab, "mail: ")


STILL = "<style>*, ::before, ::after { transition: none !important }</style>"
"""A colour that changes slowly has less contrast meanwhile."""
AXE = importlib.util.find_spec("axe_core_python")


@pytest.mark.skipif(AXE is None, reason="axe-core-python is missing: NOT checked with axe")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_violation(address: str, tab: Page, scheme: str) -> None:
    """Names, roles and contrast, as axe checks them."""
    assert AXE is not None
    assert AXE.origin is not None
    (script,) = Path(AXE.origin).parent.rglob("axe.min.js")
    tab.look(width=DESK, scheme=scheme)
    found: dict[str, list[str]] = {}
    for path in PATHS:
        tab.open(address + path)
        until(tab, "halfmq")
        tab.run(f"document.head.insertAdjacentHTML('beforeend', {json.dumps(STILL)})")
        tab.run(script.read_text() + "; 0")
        for violation in tab.run("axe.run().then(r => r.violations)"):
            if violation["impact"] in ("serious", "critical"):
                nodes = "; ".join(node["html"][:120] for node in violation["nodes"][:3])
                found.setdefault(violation["id"], []).append(f"{path}: {nodes}")

    assert found == {}, json.dumps(found, indent=1)


def test_the_broker_keeps_it_running(
    tmp_path: Path, tab: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a child of lower priority, which is started again when it ends, and ends with it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name in [name for name in os.environ if "PYTEST" in name]:
        monkeypatch.delenv(name)
    with broker_process(tmp_path, consoleEnable="true", consoleListenPort=port) as broker:

        def pids() -> list[int]:
            lines = [line for line in broker.log.splitlines() if "child=console pid=" in line]
            return [int(line.rpartition("pid=")[2]) for line in lines]

        def serves() -> bool:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
            except OSError:
                return False
            return True

        wait_until(serves, "the console does not start")
        assert os.getpriority(os.PRIO_PROCESS, pids()[0]) == 10
        os.kill(pids()[0], signal.SIGKILL)
        wait_until(lambda: len(pids()) == 2 and serves(), "the console is not started again")
        tab.open(f"http://127.0.0.1:{port}")
        until(tab, "none is undecided")
        assert broker.stop() == 0
        assert not serves()


def test_with_access_control_a_user_signs_in(tmp_path: Path, tab: Page) -> None:
    """No page is shown before; a wrong password is refused."""
    with (
        broker_process(
            tmp_path,
            authenticationEnabled="true",
            initAuthenticationUser='{"username":"operator","password":"secret"}',
        ) as broker,
        console(broker.address) as address,
    ):
        tab.open(f"{address}/transactions")
        until(tab, "Sign in as a user of the broker")
        type_into(tab, "User", "operator")
        type_into(tab, "Password", "wrong")
        click(tab, "button", "SIGN IN")
        until(tab, "refuses this user")
        tab.open(f"{address}/sign-in")
        until(tab, "Sign in as a user of the broker")
        type_into(tab, "User", "operator")
        type_into(tab, "Password", "secret")
        click(tab, "button", "SIGN IN")
        until(tab, "none is undecided")
        tab.open(f"{address}/access")
        until(tab, "operator")
        _permissions_are_edited(broker.address, tab)


def _permissions_are_edited(namesrv: str, tab: Page) -> None:
    """Set for a user, changed, and deleted; each after its name was typed."""
    with Admin(namesrv=namesrv, access_key="operator", secret_key="secret") as admin:

        def confirm(shown: str) -> None:
            until(tab, "Type “ada” to confirm")
            type_into(tab, "Type “ada” to confirm", "ada")
            click(tab, "button", "CONFIRM")
            until(tab, shown)
            wait_until(lambda: "to confirm" not in text_of(tab), "the dialogue stays")

        def entries() -> list[tuple[str, tuple[str, ...], bool, tuple[str, ...]]]:
            acl = admin.acl("ada")
            found = () if acl is None else acl.entries
            return [
                (one.resource, tuple(one.actions), one.allow, tuple(one.sources)) for one in found
            ]

        type_into(tab, "New user", "ada")
        type_into(tab, "Password", "lovelace")
        click(tab, "button", "CREATE")
        until(tab, "created user ada")
        click(tab, "tbody a", "ada")
        until(tab, "the user has no permissions")
        type_into(tab, "Resource", "Topic:orders")
        type_into(tab, "From addresses", "10.0.0.0/8, 127.0.0.1")
        click(tab, "button", "SET")
        confirm("actions")  # none is chosen: refused, with the reason
        assert entries() == []
        click(tab, "label", "Actions")
        chosen = "document.querySelector('input[aria-label=Actions]').value"
        for name, shown in (("Pub", "Pub"), ("Sub", "Pub, Sub")):  # the server adds each
            click(tab, "div.q-item", name)
            wait_until(lambda: tab.run(chosen) == shown, f"{shown} is not chosen")  # noqa: B023
        press(tab, "Escape")
        click(tab, "button", "SET")
        confirm("ada: allow Pub, Sub on Topic:orders")
        expected = ("Topic:orders", ("Pub", "Sub"), True, ("10.0.0.0/8", "127.0.0.1"))
        wait_until(lambda: entries() == [expected], "it has no permission")
        click(tab, "div.q-dialog tbody button", "Topic:orders")
        confirm("ada has no entry for Topic:orders")
        assert entries() == []
        click(tab, "button", "DISABLE")
        confirm("disabled ada")
        user = admin.user("ada")
        assert user is not None
        assert not user.enabled
