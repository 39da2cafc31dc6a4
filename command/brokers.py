"""The nouns ``broker``, ``config`` and ``ha`` of the command ``halfmq``.

They are about brokers, their settings, and the second copy of a broker's log. Exit codes of
``ha status``: 0 every broker that needs a slave has one that keeps up · 1 one has not. Of
``ha promote``: 0 done · 1 refused · 2 the directory cannot be read or written.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from contextlib import suppress
from typing import Annotated, Final

import typer

from halfmq.client.administration.settings import DRAIN_S
from halfmq.client.errors import ConfigurationError
from halfmq.store.errors import DirectoryInUseError, NotPromotableError, StoreError

from .connection_options import client_config
from .output import print_error, print_json, print_line, print_pairs
from .store import CommitLog, Directory, Json
from .verbs import DONE, FAILED, USAGE, Ca, Cli, CommandError, NameServer, Tls, app, noun, verb

BROKER: Final = noun("broker", "brokers as a whole")
REPLICAS: Final = noun("ha", "the second copy of a broker's log")
CONFIG: Final = noun("config", "settings of brokers")

REPLICATION: Final = "halfmq.replication."
"""How the names of metrics of the second copy begin."""

CONSOLE_PORT: Final = 9_878
"""The one after that of metrics."""


@verb("metrics", BROKER)
async def metrics(
    cli: Cli,
    all: Annotated[  # noqa: A002 -- the name of the option
        bool, typer.Option("--all", help="RocketMQ's keys too, not only halfmq's own")
    ] = False,
) -> None:
    """Show the brokers' metrics."""
    found = await (await cli.admin()).metrics()
    if cli.json:
        print_json(
            {name: {key: _number(one[key]) for key in sorted(one)} for name, one in found.items()}
        )
        return
    for name, table in sorted(found.items()):
        ours = {key: value for key, value in table.items() if key.startswith("halfmq.")}
        print_line(name)
        shown = table if all or not ours else ours
        print_pairs({f"  {key}": value for key, value in sorted(shown.items())})


@verb("drain", BROKER)
async def drain(
    cli: Cli,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[BROKER]",
            help="its name, or the brokerName of several under one command; needed if there are "
            "several",
        ),
    ] = None,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="until it refuses messages")
    ] = DRAIN_S,
) -> None:
    """Send producers to other brokers, then stop a broker; ends when it has stopped."""
    admin = await cli.admin()
    names = [one.name for one in await admin.broker_statuses()]
    if name is None:
        if len(names) > 1:
            raise CommandError(f"name one of the brokers: {', '.join(names)}", USAGE)
        (name,) = names
    together = [one for one in names if re.fullmatch(rf"{re.escape(name)}-\d+", one)]
    wanted = [name] if name in names or not together else together
    await asyncio.gather(*(admin.drain(one, wait=wait) for one in wanted))
    cli.done(f"drained {name}", name=name, action="drain")


@BROKER.command(
    "run",
    hidden=sys.platform == "win32",  # the broker does not run there
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def run(context: typer.Context) -> None:
    """Run a broker in this process; the options are those of the command broker."""
    os.execv(sys.executable, [sys.executable, "-m", "halfmq.broker", *context.args])  # noqa: S606


@app.command("console")
def console(
    namesrv: NameServer = None,
    tls: Tls = False,
    ca: Ca = None,
    host: Annotated[str, typer.Option(help="address of the page")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port of the page")] = CONSOLE_PORT,
) -> None:
    """Serve a page for operators; whoever opens it signs in as a user of the broker."""
    try:
        from halfmq.console.pages import run as serve  # noqa: PLC0415 -- an extra
    except ImportError as error:
        print_error(f"{error}; pip install 'halfmq[console]'")
        raise typer.Exit(USAGE) from None
    # No credentials of this process: everybody who opens the page would have them.
    options = {"namesrv": namesrv, "credentials": None, "tls": tls, "ca": ca}
    try:
        config = client_config(options, {})
    except ConfigurationError as error:
        print_error(str(error))
        raise typer.Exit(USAGE) from None
    print_line(f"console http://{host}:{port}")
    sys.stdout.flush()
    serve(config, host=host, port=port)


@verb("list", CONFIG)
async def list_(
    cli: Cli,
    filter: Annotated[str, typer.Option(metavar="TEXT", help="only keys that contain it")] = "",  # noqa: A002
) -> None:
    """List the settings of each broker, and when a change takes effect; secrets are hidden."""
    rows = [
        {"broker": name, "key": key, **one._asdict(), "value": _number(one.value)}
        for name, table in (await (await cli.admin()).described_settings()).items()
        for key, one in sorted(table.items())
        if filter.lower() in key.lower()
    ]
    titles = ("BROKER", "KEY", "VALUE", "CHANGE", "SOURCE")
    cells = [["-" if cell is None else cell for cell in one.values()] for one in rows]
    cli.rows(rows, titles, cells, f"no setting has {filter} in its name")


@verb("get", CONFIG)
async def get(
    cli: Cli, key: Annotated[str, typer.Argument(metavar="KEY", show_default=False)]
) -> None:
    """Show one setting of each broker."""
    found = await (await cli.admin()).settings()
    values = {name: table[key] for name, table in found.items() if key in table}
    if not values:
        raise CommandError(f"no broker has a setting {key}: halfmq config list shows all")
    cli.pairs({name: _number(value) for name, value in values.items()}, values)


@verb("set", CONFIG)
async def change(
    cli: Cli,
    key: Annotated[str, typer.Argument(metavar="KEY", show_default=False)],
    value: Annotated[str, typer.Argument(metavar="VALUE", show_default=False)],
) -> None:
    """Change a setting of all brokers while they run, and in their files."""
    await (await cli.admin()).change_setting(key, value)
    cli.done(f"{key}={value}", key=key, value=value, action="set")


def _number(text: str) -> int | float | str:
    """Return a number for a text that is one; ``04``, an hour, is none."""
    for kind in (int, float):
        with suppress(ValueError):
            if str(number := kind(text)) == text:
                return number
    return text


@REPLICAS.command("promote", hidden=sys.platform == "win32")
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


@verb("status", REPLICAS)
async def status(cli: Cli) -> int:
    """Show for each broker whether a slave has its log."""
    found = {
        name: {
            key.removeprefix(REPLICATION): one[key] for key in one if key.startswith(REPLICATION)
        }
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
