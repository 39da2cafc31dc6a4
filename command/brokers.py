"""The nouns ``broker`` and ``config`` of the command ``halfmq``: brokers and their settings."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from .output import print_json, print_line, print_pairs
from .verbs import Cli, CommandError, noun, verb


def add_nouns(app: typer.Typer) -> None:
    """Add the nouns to the command."""
    brokers = noun(app, "broker", "brokers as a whole")
    verb(brokers, "metrics")(metrics)
    if sys.platform != "win32":  # the broker does not run there
        brokers.command(
            "run",
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
            add_help_option=False,
        )(run)
    settings = noun(app, "config", "settings of brokers")
    verb(settings, "list")(list_)
    verb(settings, "get")(get)
    verb(settings, "set")(change)


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


def run(context: typer.Context) -> None:
    """Run a broker in this process; the options are those of the command broker."""
    os.execv(sys.executable, [sys.executable, "-m", "halfmq.broker", *context.args])  # noqa: S606


async def list_(
    cli: Cli,
    filter: Annotated[str, typer.Option(metavar="TEXT", help="only keys that contain it")] = "",  # noqa: A002
) -> None:
    """List the settings of each broker; secrets are hidden."""
    found = await (await cli.admin()).settings()
    shown = {
        name: {key: value for key, value in table.items() if filter.lower() in key.lower()}
        for name, table in found.items()
    }
    if cli.json:
        print_json(shown)
        return
    for name, table in shown.items():
        print_line(name)
        print_pairs({f"  {key}": value for key, value in sorted(table.items())})


async def get(
    cli: Cli, key: Annotated[str, typer.Argument(metavar="KEY", show_default=False)]
) -> None:
    """Show one setting of each broker."""
    found = await (await cli.admin()).settings()
    values = {name: table[key] for name, table in found.items() if key in table}
    if not values:
        raise CommandError(f"no broker has a setting {key}: halfmq config list shows all")
    cli.pairs(values, values)


async def change(
    cli: Cli,
    key: Annotated[str, typer.Argument(metavar="KEY", show_default=False)],
    value: Annotated[str, typer.Argument(metavar="VALUE", show_default=False)],
) -> None:
    """Change a setting of all brokers while they run, and in their files."""
    await (await cli.admin()).change_setting(key, value)
    cli.done(f"{key}={value}", key=key, value=value, action="set")


def _number(text: str) -> int | float | str:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text
