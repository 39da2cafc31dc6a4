"""The noun ``ha`` of the command ``halfmq``: the second copy of a broker's log.

Exit codes of ``status``: 0 every broker that needs a slave has one that keeps up · 1 one has not.
Of ``promote``: 0 done · 1 refused · 2 the directory cannot be read or written.
"""

from __future__ import annotations

import sys
from typing import Final

import typer

from halfmq.store.errors import DirectoryInUseError, NotPromotableError, StoreError

from .output import print_error, print_json, print_line
from .store import CommitLog, Directory, Json
from .verbs import DONE, FAILED, USAGE, Cli, noun, verb

PREFIX: Final = "halfmq.replication."


def add_to(app: typer.Typer) -> None:
    """Add what is here to the command."""
    replicas = noun(app, "ha", "the second copy of a broker's log")
    verb(replicas, "status")(status)
    if sys.platform != "win32":  # the broker and its file lock do not exist there
        replicas.command("promote")(promote)


def promote(directory: Directory, commit_log: CommitLog = None, as_json: Json = False) -> None:
    """Make the files of a slave that has stopped the store of the next master."""
    from halfmq.store.tools import promotion  # noqa: PLC0415 -- numpy, for which status need not wait

    try:
        done = promotion.promote(directory, commit_log)
    except (NotPromotableError, DirectoryInUseError) as error:
        print_error(str(error))
        raise typer.Exit(FAILED) from error
    except (StoreError, OSError) as error:
        print_error(str(error))
        raise typer.Exit(USAGE) from error
    if as_json:
        print_json(done._asdict(), indent=None)
    else:
        print_line(
            f"epoch {done.epoch}: the log ends at {done.log_end}, and {done.confirmed} was "
            f"confirmed when the master last told; start a broker on {directory}"
        )


async def status(cli: Cli) -> int:
    """Show for each broker whether a slave has its log."""
    found = {
        name: {key.removeprefix(PREFIX): one[key] for key in one if key.startswith(PREFIX)}
        for name, one in sorted((await (await cli.admin()).metrics()).items())
    }
    cli.rows(
        found,
        ("BROKER", "NEEDS A SLAVE", "SLAVE", "LACKS BYTES", "EPOCH", "MESSAGES"),
        [
            (
                name,
                "yes" if one["required"] == "1" else "no",
                one["slave"] or "none",
                one["lag_bytes"],
                one["epoch"],
                "refused" if one["refusing"] == "1" else "accepted",
            )
            for name, one in found.items()
            if one
        ],
        empty="no broker has slaveAddresses",
    )
    lacks = [
        one["connected"] == "0" or one["refusing"] == "1"
        for one in found.values()
        if one and one["required"] == "1"
    ]
    return FAILED if any(lacks) else DONE
