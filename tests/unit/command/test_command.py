"""The command ``halfmq`` against a scripted broker: what it prints and how it ends."""

from __future__ import annotations

import asyncio
import importlib
import json
import threading
import tomllib
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from halfmq.client import ClientConfig
from halfmq.command.main import main
from halfmq.command.output import format_duration
from halfmq.remoting.bodies import encode_table
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.replies import encode_reply
from tests.support.documents import ROOT
from tests.support.fake_broker import FakeBroker
from tests.support.operated import QUERY, Operated


class OperatedThread:
    """A scripted broker on the loop of a thread of its own: the command runs a loop itself."""

    def __init__(self) -> None:
        self.broker = FakeBroker()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self._run(self.broker.start())
        self.operated = Operated(self.broker, 100, 200, 300)

    def change(self, offset: int, **fields: object) -> None:
        """Give one of its transactions other fields."""
        infos = self.operated.infos
        at = next(n for n, info in enumerate(infos) if info.offset == offset)
        infos[at] = msgspec.structs.replace(infos[at], **fields)

    def close(self) -> None:
        self._run(self.broker.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self.loop).result(10)


@pytest.fixture
def served() -> Iterator[OperatedThread]:
    thread = OperatedThread()
    yield thread
    thread.close()


@dataclass
class Outcome:
    """What a run of the command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Shell:
    """Runs the command in this process."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture
        self.address: str | None = None

    def __call__(self, *words: str) -> Outcome:
        rest = [] if self.address is None else ["--namesrv", self.address]
        try:
            code = main([*words, *rest])
        except SystemExit as ended:  # argparse
            code = int(ended.code or 0)
        shown = self._capture.readouterr()
        return Outcome(code, shown.out, shown.err)


@pytest.fixture
def halfmq(capsys: pytest.CaptureFixture[str], served: OperatedThread) -> Shell:
    shell = Shell(capsys)
    shell.address = served.broker.address
    return shell


def test_the_table_tells_people_what_is_undecided(halfmq: Shell, served: OperatedThread) -> None:
    """It has the state with its reason, the age in words, the owner, and the checks."""
    parked = {"state": "parked", "parked_reason": "no-answer", "next_check_ms": None}
    served.change(200, **parked, age_ms=18_720_000, keys="o-" + "9" * 40, owner="10.0.0.7:4711")
    served.change(300, next_check_ms=0, producers=0)

    done = halfmq("tx", "list")

    head, first, second, third = [line.split("  ") for line in done.out.splitlines()]
    cells = [[cell.strip() for cell in row if cell] for row in (head, first, second, third)]
    assert cells[0] == [
        *("HALF MESSAGE ID", "TRANSACTION ID", "STATE", "GROUP", "TOPIC", "KEYS", "AGE", "OWNER"),
        *("SENT", "DELIVERED", "ANSWERED", "NEXT CHECK"),
    ]
    assert cells[1] == [
        *(served.operated.id_of(100), "Key100", "prepared", "pg", "orders", "o-1", "1 s", "-"),
        *("3", "2", "1", "in 2 s"),
    ]
    assert cells[2] == [
        *(served.operated.id_of(200), "Key200", "parked (no-answer)", "pg", "orders"),
        *("o-" + "9" * 21 + "…", "5 h 12 min", "10.0.0.7:4711", "3", "2", "1", "-"),
    ]
    assert (cells[3][7], cells[3][-1]) == ("no members", "now")
    assert (done.code, done.err) == (0, "")


def test_a_program_gets_json(halfmq: Shell, served: OperatedThread) -> None:
    """The array has all fields; it is empty if nothing is undecided."""
    served.change(200, producers=0)
    served.change(300, producers=2)
    done = halfmq("tx", "list", "--json")

    assert [one["offset"] for one in done.json] == [100, 200, 300]
    assert done.json[0]["half_message_id"] == served.operated.id_of(100)
    assert done.json[0]["prepared_at"] == "2023-11-14T22:13:20+00:00"
    assert [one["producers"] for one in done.json] == [None, 0, 2]
    served.operated.infos.clear()
    assert halfmq("tx", "list", "--json").json == []
    assert halfmq("tx", "list").out == "no transaction is undecided\n"


def test_filters_go_to_the_broker(halfmq: Shell, served: OperatedThread) -> None:
    """A filtered list must not fetch a million transactions."""
    assert halfmq("tx", "list", "--group", "g", "--state", "parked").code == 0

    (request,) = served.broker.requests_of(QUERY)[:1]
    assert getattr(request.header, "producer_group", None) == "g"
    assert getattr(request.header, "state", None) == "parked"


def test_a_listing_that_was_cut_says_so(halfmq: Shell) -> None:
    """The note goes to standard error, so that the JSON stays valid."""
    cut = halfmq("tx", "list", "--json", "--limit", "2")
    assert [one["offset"] for one in cut.json] == [100, 200]
    assert cut.err == "halfmq: only the first 2 are listed; --limit 0 lists all\n"

    for limit in ("0", "3"):
        whole = halfmq("tx", "list", "--json", "--limit", limit)
        assert (len(whole.json), whole.err) == (3, "")


def test_one_transaction_is_shown_in_full(halfmq: Shell, served: OperatedThread) -> None:
    """Either id works, and output is text or JSON."""
    done = halfmq("tx", "show", "Key200")
    shown = dict(line.split("  ", 1) for line in done.out.splitlines())

    assert shown["half message id"].strip() == served.operated.id_of(200)
    assert shown["checks"].strip() == "3 sent, 2 delivered, 1 answered"
    assert shown["owner"].strip() == "-"
    again = halfmq("tx", "show", served.operated.id_of(200), "--json")
    assert again.json["transaction_id"] == "Key200"
    missing = halfmq("tx", "show", "other")
    assert (missing.code, missing.out) == (1, "")
    assert missing.err == "halfmq: no undecided transaction has the id other\n"


def test_an_operator_decides_with_a_reason(halfmq: Shell, served: OperatedThread) -> None:
    commit = halfmq("tx", "commit", "Key100", "--reason", "the row is there")
    rollback = halfmq("tx", "rollback", "Key200")
    resume = halfmq("tx", "resume", "Key300", "--json")

    assert commit.out == "committed Key100; its message is FINAL\n"
    assert rollback.out == "rolled back Key200\n"
    assert resume.json == {"id": "Key300", "action": "resume"}
    assert [one.code for one in (commit, rollback, resume)] == [0, 0, 0]
    assert served.operated.decided == [
        (100, "commit", "the row is there"),
        (200, "rollback", None),
        (300, "resume", None),
    ]


def test_a_refusal_is_exit_code_1_with_its_reason(halfmq: Shell, served: OperatedThread) -> None:
    """A script must notice that the decision was refused."""
    served.operated.refusal = (ResponseCode.ILLEGAL_OPERATION, "it was rolled back at noon")

    done = halfmq("tx", "commit", "Key100")

    assert (done.code, done.out) == (1, "")
    assert "it was rolled back at noon" in done.err


def test_metrics_are_those_of_halfmq_unless_all_are_wanted(
    halfmq: Shell, served: OperatedThread
) -> None:
    """RocketMQ's eighty keys are shown only with ``--all``."""
    table = {"brokerVersion": "479", "halfmq.transactions.pending": "3", "halfmq.connections": "2"}
    code = RequestCode.GET_BROKER_RUNTIME_INFO
    served.broker.handlers[code] = lambda command, _: encode_reply(
        command, body=encode_table(table)
    )

    assert halfmq("broker", "metrics").out.splitlines() == [
        "broker-a",
        "  halfmq.connections           2",
        "  halfmq.transactions.pending  3",
    ]
    assert "brokerVersion" in halfmq("broker", "metrics", "--all").out
    assert halfmq("broker", "metrics", "--json").json == {
        "broker-a": {
            "brokerVersion": 479,
            "halfmq.transactions.pending": 3,
            "halfmq.connections": 2,
        }
    }


def test_texts_of_others_do_not_steer_the_terminal(halfmq: Shell, served: OperatedThread) -> None:
    """Keys may contain control characters, which are replaced."""
    served.change(100, keys="\x1b[2J\n")

    for words in (("tx", "list"), ("tx", "show", "Key100")):
        out = halfmq(*words).out
        assert "\x1b" not in out
        assert "?[2J?" in out


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("tx",),
        ("tx", "show"),
        ("tx", "list", "--state", "odd"),
        ("tx", "list", "--limit", "-1"),
        ("tx", "list", "--limit", "many"),
        ("tx", "list", "--namesrv", "host:port"),
        ("store", "list"),
    ],
)
def test_wrong_usage_is_exit_code_2(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    done = Shell(capsys)(*words)

    assert (done.code, done.out) == (2, "")
    assert done.err


def test_a_broker_that_is_not_there_is_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the address and a remedy."""
    monkeypatch.setitem(ClientConfig.__init__.__kwdefaults__ or {}, "send_timeout", 1.0)
    done = Shell(capsys)("tx", "list", "--namesrv", "127.0.0.1:1")

    assert done.code == 1
    assert done.err == (
        "halfmq: cannot connect to 127.0.0.1:1: connection refused; is the broker running?\n"
    )


def test_the_installed_command_is_this_one() -> None:
    """The entry point ``halfmq`` runs this module."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    module, _, function = project["project"]["scripts"]["halfmq"].partition(":")

    assert getattr(importlib.import_module(module), function) is main


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (3_599, "59 min"),
        (3_600, "1 h 0 min"),
        (86_400, "1 d 0 h"),
        (273_600, "3 d 4 h"),
    ],
)
def test_ages_are_words(seconds: float, words: str) -> None:
    """An age has at most two units."""
    assert format_duration(seconds) == words
