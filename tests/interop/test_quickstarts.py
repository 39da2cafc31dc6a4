"""Each quick-start, from an empty folder to an order that is committed and a message consumed.

The commands and files are those of the page. The campaign installs what they name into a new
environment, as a reader does; otherwise everything is installed already.
"""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from halfmq.client.testing import broker_process
from tests.support.documents import ROOT, Example, examples, examples_of
from tests.support.programs import Program, free_port, running

PAGE: Final = "docs/quickstart.md"
SECTIONS: Final = re.findall(r"^## (.*)$", (ROOT / PAGE).read_text(), re.MULTILINE)
MAILS: Final = next(one.code for one in examples(PAGE) if one.file == "mails.py")
LINES_MAX: Final = 25
SECONDS_MAX: Final = 300.0
"""Five minutes, with the download of all packages."""


def blocks(section: str) -> list[Example]:
    """The commands and files of a section."""
    _, text = (ROOT / PAGE).read_text(encoding="utf-8").split(f"\n## {section}\n")
    return examples_of(text.partition("\n## ")[0])


@pytest.mark.parametrize("section", SECTIONS)
def test_it_is_short(section: str) -> None:
    """What a reader writes, blank lines not counted."""
    files = [one.code for one in blocks(section) if one.file not in (None, "mails.py")]
    lines = [line for content in files for line in content.splitlines() if line.strip()]
    assert len(lines) <= LINES_MAX


def environment_of(folder: Path, namesrv: str) -> dict[str, str]:
    """A shell whose ``python`` is this one; nothing is installed."""
    programs = folder.parent / "bin"
    programs.mkdir()
    python = programs / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    pip = programs / "pip"
    pip.write_text("#!/bin/sh\n")
    pip.chmod(0o755)
    path = f"{programs}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "NAMESRV_ADDR": namesrv, "HOME": str(folder)}


def new_environment(folder: Path, namesrv: str) -> dict[str, str]:
    """A new environment with halfmq, as ``pip install halfmq`` would make it."""
    home = folder.parent / "venv"
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    wheels = folder.parent / "wheels"
    build: list[str | Path] = [home / "bin" / "pip", "wheel", "-q", "--no-deps", "-w", wheels, ROOT]
    subprocess.run(build, check=True)
    install: list[str | Path] = [home / "bin" / "pip", "install", "-q", *wheels.glob("halfmq*.whl")]
    subprocess.run(install, check=True)
    path = f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"
    where = {"PIP_FIND_LINKS": str(wheels), "VIRTUAL_ENV": str(home)}
    return {"PATH": path, "NAMESRV_ADDR": namesrv, "HOME": str(folder), **where}


def wait_for_mail(shell: Program, began: float) -> None:
    while "mail about o-1" not in shell.output:
        assert shell.process.poll() is None, shell.output
        assert time.monotonic() - began < SECONDS_MAX, shell.output
        time.sleep(0.05)


@pytest.mark.parametrize(
    "prepare",
    [environment_of, pytest.param(new_environment, marks=pytest.mark.campaign)],
    ids=lambda prepare: prepare.__name__,
)
@pytest.mark.parametrize("section", SECTIONS)
def test_an_order_is_committed_and_its_message_consumed(
    section: str, prepare: Callable[[Path, str], dict[str, str]], tmp_path: Path
) -> None:
    """With the page's own files and commands, one after the other."""
    folder = tmp_path / "empty"
    folder.mkdir()
    began = time.monotonic()
    with broker_process(tmp_path / "broker") as broker:
        environment = prepare(folder, broker.address)
        script = ["set -eux"]
        for number, block in enumerate(blocks(section)):
            if block.file is None:
                script.append(block.code.replace("8000", str(free_port())))
                continue
            (folder.parent / f"block-{number}").write_text(block.code)
            script.append(f"cat ../block-{number} >> {block.file}")
        if section == "Django":
            (folder / "mails.py").write_text(MAILS)
        with running(
            ["bash", "-c", "\n".join(script)], folder, environment, tmp_path / "log"
        ) as shell:
            wait_for_mail(shell, began)
    django = section == "Django"
    with sqlite3.connect(folder / ("db.sqlite3" if django else "shop.db")) as connection:
        table = "orders_order" if django else "orders"
        assert connection.execute(f"select number from {table}").fetchall() == [("o-1",)]
    print(f"{section}: {time.monotonic() - began:.0f} s")
