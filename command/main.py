"""Entry point of the command ``halfmq``: nouns, then verbs.

Most nouns connect to a broker with ``halfmq.client``; ``halfmq store`` reads a broker's files with
``halfmq.store``. Output is text for people, or with ``--json`` for programs; JSON keys are stable.

Exit codes: 0 done · 1 refused, not found or not reached; of ``store verify``, damage found ·
2 usage; of ``store``, a directory that cannot be read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Final

import typer

from .verbs import DONE, app

MODULES: Final = {
    "transactions": ("tx",),
    "groups": ("group",),
    "topics": ("topic",),
    "messages": ("message",),
    "dead_letters": ("dlq",),
    "delayed": ("delayed",),
    "brokers": ("broker", "config", "console", "ha"),
    "users": ("user", "acl"),
    "doctor": ("doctor",),
    "bench": ("bench",),
    # The broker and its file lock do not exist on Windows.
    **({} if sys.platform == "win32" else {"store": ("store",)}),
}
"""Module → the nouns and verbs that it adds. Importing all of them takes 100 ms."""


def _show_version(wanted: bool) -> None:
    if wanted:
        import halfmq  # noqa: PLC0415 -- 20 ms that no verb needs

        print(halfmq.__version__)  # noqa: T201
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="show the version"),
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    # All modules are needed for other words, such as --help, and for completion.
    wanted = [name for name, own in MODULES.items() if {*words[:1]} & {*own}] or MODULES
    for name in wanted:
        import_module(f"halfmq.command.{name}")
    try:
        app(words, prog_name="halfmq")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else DONE
    return DONE
