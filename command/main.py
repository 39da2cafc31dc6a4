"""The command ``halfmq``: nouns, then verbs.

``halfmq tx``, ``group``, ``broker``, ``user`` and ``acl`` talk to a broker and come from
``halfmq.client``; ``halfmq store`` looks at a broker's files and comes from ``halfmq.store``.
Neither knows of the other. Tables are for people; with ``--json`` the same is for programs, and its
keys stay.

Exit codes: 0 done · 1 refused, not found or not reached; of ``store verify``, damage found ·
2 usage; of ``store``, a directory that cannot be read.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Final

from . import broker, users

DONE: Final = 0
INTERRUPTED: Final = 130  # what a shell reports for Ctrl-C


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the exit complains too
        return DONE
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="halfmq",
        description="Look at a halfmq broker and its files, and decide what its producers could "
        "not.",
        epilog="exit codes: 0 done, 1 refused, not found, not reached or damage found, 2 usage or "
        "a directory that cannot be read",
    )
    nouns = parser.add_subparsers(metavar="NOUN", required=True)
    broker.add_nouns(nouns)
    users.add_nouns(nouns)
    if sys.platform != "win32":  # there is no broker there either, and no file lock to ask for it
        from halfmq.store.tools import command as store_command  # noqa: PLC0415

        store_command.add_nouns(nouns)
    return parser
