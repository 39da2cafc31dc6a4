"""The examples of the README and of the client's page print what is shown beside them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from halfmq.client.blocking import ClientConfig, Decision, Message, TransactionProducer
from halfmq.client.testing import BrokerProcess, broker_process
from tests.support.documents import ROOT, comparable, examples
from tests.support.patience import PATIENCE_S
from tests.support.python import python

README = (ROOT / "README.md").read_text(encoding="utf-8")
_CLIENT = ("client", "producer", "consumer", "recipes", "cookbook", "testing", "faststream")
PAGES = ["README.md", *(f"docs/{name}.md" for name in _CLIENT)]
SHORT_LINES = [*PAGES, "docs/architecture.md", "docs/quickstart.md"]
LINE_MAX = 100


def _environment(broker: BrokerProcess, home: Path) -> dict[str, str]:
    """What a shell would have, but for the port: the test does not count on 9876 being free."""
    return {
        **os.environ,
        "NAMESRV_ADDR": broker.address,
        "HOME": str(home),
        "PYTHONUNBUFFERED": "1",
    }


def _commands() -> list[tuple[str, str | None]]:
    return [
        (one.code.strip(), one.output) for one in examples("README.md") if one.language == "bash"
    ]


def test_the_first_screen_has_the_two_commands() -> None:
    """One installs and starts the broker, one installs and runs the tests."""
    set_up = [command for command, _ in _commands()[:2]]

    assert set_up == [
        "pip install . && broker --conf conf/broker.conf",
        "pip install -e '.[test]' && pytest",
    ]
    assert README.index(set_up[1]) < len("\n".join(README.splitlines()[:25]))


def test_it_can_be_read_in_one_go() -> None:
    """A README that nobody finishes protects nobody."""
    assert len(README.splitlines()) < 165


@pytest.mark.parametrize("page", SHORT_LINES)
def test_lines_fit_an_editor(page: str) -> None:
    text = re.sub(
        r"```text\n.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL
    )
    long = [line for line in text.splitlines() if len(line) > LINE_MAX and line[:1] != "|"]

    assert long == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """Every page and every heading that is linked to exists."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for path, anchor in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", text):
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), path
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in headings]
            assert anchor in slugs, (path, anchor)


def test_the_architecture_names_what_is_there() -> None:
    """A reader who follows a path finds each file and folder."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    paths = {f"/{path}" for path in tracked}
    paths |= {f"/{path.rpartition('/')[0]}/" for path in tracked}
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", text))

    assert len(named) > 40
    assert {name for name in named if not any(path.endswith(f"/{name}") for path in paths)} == set()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker whose data lie where the README says, under a home directory of the test."""
    with broker_process(
        tmp_path / "broker", storePathRootDir=tmp_path / ".halfmq" / "store"
    ) as running:
        yield running


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_print_what_is_shown(page: str, broker: BrokerProcess, tmp_path: Path) -> None:
    """Run one after the other, as a reader does."""
    programs = [one for one in examples(page) if one.language == "python"]
    assert programs
    for program in programs:
        if "def test_" in program.code:  # run by pytest in tests/unit/testing
            continue
        if program.file is not None:  # run by gunicorn in tests/interop/test_recipes.py
            continue
        assert program.output is not None, program.code
        done = python("-c", program.code, cwd=tmp_path, env=_environment(broker, tmp_path))
        # A worker that starts before its topic exists says so.
        said = [one for one in done.stderr.splitlines() if "event=topic_missing" not in one]
        assert (done.returncode, said) == (0, [])
        assert comparable(done.stdout) == comparable(program.output)


def test_the_operators_line_runs(broker: BrokerProcess, tmp_path: Path) -> None:
    """Pasted into a shell, it tells of a transaction that nobody has decided."""
    line, shown = next(one for one in _commands() if one[0].startswith("halfmq "))
    installed = tmp_path / "bin" / "halfmq"
    installed.parent.mkdir()
    installed.write_text(f'#!/bin/sh\nexec {sys.executable} -m halfmq.command "$@"\n')
    installed.chmod(0o755)
    environment = _environment(broker, tmp_path)
    environment["PATH"] = f"{installed.parent}{os.pathsep}{environment['PATH']}"

    def unknown(_message: object) -> Decision:
        return Decision.UNKNOWN

    with TransactionProducer("orders-tx", unknown, namesrv=broker.address) as producer:
        with producer.transaction(Message("orders", b"o-5", keys="o-5")) as transaction:
            transaction.decide(Decision.UNKNOWN)
        done = subprocess.run(
            line,
            shell=True,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    assert done.returncode == 0, done.stderr
    assert shown is not None
    assert comparable(done.stdout) == comparable(shown)


def test_the_audit_line_runs_on_the_live_directory(broker: BrokerProcess, tmp_path: Path) -> None:
    """The line after the installation, pasted into a shell, finds the store and calls it clean."""
    program = next(one for one in examples("README.md") if "TransactionProducer" in one.code)
    line, _ = next(one for one in _commands() if "audit" in one[0])
    environment = _environment(broker, tmp_path)
    subprocess.run([sys.executable, "-c", program.code], cwd=tmp_path, env=environment, check=True)

    done = subprocess.run(
        line.partition("&& ")[2].replace("python ", f"{sys.executable} "),
        shell=True,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "committed   1" in done.stdout
    assert "anomalies     0" in done.stdout


def test_the_settings_of_producers_are_as_documented() -> None:
    """Each has its name and its default in the table."""
    page = (ROOT / "docs/producer.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ([^|]+) \|", page, re.MULTILINE)
    stated = [
        (name, default.strip('"` '))
        for names, defaults in rows
        for name, default in zip(re.findall(r"\w+", names), defaults.split(", "), strict=False)
        if hasattr(ClientConfig, name)
    ]

    assert len(stated) == 12
    defaults = {one.name: str(one.default) for one in fields(ClientConfig)}
    assert stated == [(name, defaults[name]) for name, _ in stated]
