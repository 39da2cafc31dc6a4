"""Entry point of the command ``halfmq``: nouns, then verbs.

``halfmq tx``, ``dlq``, ``delayed``, ``group``, ``broker``, ``user`` and ``acl`` connect to a broker
with ``halfmq.client``; ``halfmq store`` reads a broker's files with ``halfmq.store``. Output is
text for people, or with ``--json`` for programs; JSON keys are stable.

Exit codes: 0 done · 1 refused, not found or not reached; of ``store verify``, damage found ·
2 usage; of ``store``, a directory that cannot be read.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Final

from . import broker, delayed, dlq, users
from .output import DONE

INTERRUPTED: Final = 130  # what a shell reports for Ctrl-C


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `| head`, has closed the pipe
        # Without this, Python reports the broken pipe again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="halfmq",
        description="Inspect a halfmq broker and its files, and decide transactions that its "
        "producers left undecided.",
        epilog="exit codes: 0 done, 1 refused, not found, not reached or damage found, 2 usage or "
        "a directory that cannot be read",
    )
    nouns = parser.add_subparsers(metavar="NOUN", required=True)
    broker.add_nouns(nouns)
    delayed.add_nouns(nouns)
    dlq.add_nouns(nouns)
    users.add_nouns(nouns)
    if sys.platform != "win32":  # the broker and its file lock do not exist there
        from halfmq.store.tools import command as store_command  # noqa: PLC0415

        store_command.add_nouns(nouns)
    return parser
