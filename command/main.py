"""Entry point of the command ``halfmq``: nouns, then verbs.

Most nouns connect to a broker with ``halfmq.client``; ``halfmq store`` reads a broker's files with
``halfmq.store``. Output is text for people, or with ``--json`` for programs; JSON keys are stable.

Exit codes: 0 done · 1 refused, not found or not reached; of ``store verify``, damage found ·
2 usage; of ``store``, a directory that cannot be read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from . import (
    bench,
    brokers,
    dead_letters,
    delayed,
    doctor,
    groups,
    messages,
    topics,
    transactions,
    users,
)
from .verbs import DONE

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Inspect and operate halfmq brokers, their messages and files. Exit codes: 0 done, "
    "1 refused, not found, not reached or damage found, 2 usage or an unreadable directory.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415 -- 20 ms that no verb needs

        print(version("halfmq"))  # noqa: T201
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="show the version"),
    ] = False,
) -> None:
    pass


for _module in (transactions, groups, topics, messages, dead_letters, delayed, brokers, users):
    _module.add_nouns(app)
doctor.add_verbs(app)
bench.add_verbs(app)
if sys.platform != "win32":  # the broker and its file lock do not exist there
    from . import store

    store.add_nouns(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        app(arguments, prog_name="halfmq")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else DONE
    return DONE
