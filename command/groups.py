"""The noun ``group`` of the command ``halfmq``: consumer groups, their members and their lag."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any, Final

import typer

from halfmq.client.administration.groups import ConsumerGroup
from halfmq.client.administration.progress import GroupLag
from halfmq.client.errors import ConfigurationError

from .output import format_duration, print_json, print_line, print_pairs, print_table
from .verbs import Cli, CommandError, a_time, noun, verb

GROUP: Final = noun("group", "consumer groups")

Name = Annotated[
    str, typer.Argument(metavar="GROUP", help="the consumer group", show_default=False)
]


@verb("list", GROUP)
async def list_(
    cli: Cli,
    all: Annotated[  # noqa: A002 -- the name of the option
        bool, typer.Option("--all", help="those that every broker has, too")
    ] = False,
) -> None:
    """List all groups with their members and their lag in messages and in time."""
    admin = await cli.admin()
    connected = await admin.connected_groups()
    found = [
        (await admin.lag(name), connected.get(name))
        for name in sorted({*await admin.group_names(built_in=all), *connected})
    ]
    rows = [
        (
            lag.group,
            group.message_model.lower() if group else "-",
            len(group.members) if group else 0,
            sum(one.refused for one in group.members) if group else 0,
            _subscriptions(group),
            lag.messages,
            format_duration(lag.seconds) if lag.messages else "-",
        )
        for lag, group in found
    ]
    titles = ("GROUP", "MODEL", "MEMBERS", "REFUSED", "SUBSCRIPTIONS", "LAG", "LAG IN TIME")
    cli.rows([_fields(*one) for one in found], titles, rows, "there is no consumer group")


@verb("show", GROUP)
async def show(cli: Cli, name: Name) -> None:
    """Show the members of a group, their subscriptions, and its lag in each topic."""
    admin = await cli.admin()
    group = (await admin.connected_groups(name)).get(name)
    if group is None and name not in await admin.group_names():
        raise CommandError(f"there is no consumer group {name}")
    lag = await admin.lag(name)
    if cli.json:
        print_json(_fields(lag, group))
        return
    print_pairs(
        {
            "group": name,
            "model": group.message_model.lower() if group else "-",
            "members": len(group.members) if group else 0,
            "subscriptions": _subscriptions(group),
            "lag": lag.messages,
            "lag in time": format_duration(lag.seconds) if lag.messages else "-",
        }
    )
    if group is not None:
        if group.unequal_topics:
            print_line(
                "messages that go to a member which does not want them are lost to the group"
            )
        print_line("")
        _print_members(group)
    if lag.topics:
        print_line("")
        rows = [(one.topic, one.messages, format_duration(one.seconds)) for one in lag.topics]
        print_table(("TOPIC", "LAG", "LAG IN TIME"), rows)


@verb("reset", GROUP)
async def reset(
    cli: Cli,
    name: Name,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", show_default=False)],
    to: Annotated[
        str,
        typer.Option(metavar="first|last|TIME", help="where to continue, such as 2026-01-31T08:00"),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="change nothing, and show what would change")
    ] = False,
) -> None:
    """Set the offsets of a group in a topic: it consumes again, or skips."""
    admin = await cli.admin()
    position: Any = to if to in ("first", "last") else _position(to)
    offsets = {one.queue: one.offset for one in await admin.offsets(name, topic)}
    targets = await admin.offsets_at(topic, position)
    if not dry_run:
        targets = await admin.reset_offsets(name, topic, position)
    rows = [
        (f"{one.broker_name}:{one.queue_id}", offsets.get(one, "-"), target)
        for one, target in targets.items()
    ]
    data = {
        "group": name,
        "topic": topic,
        "dry_run": dry_run,
        "queues": [
            {**one._asdict(), "from": offsets.get(one), "to": target}
            for one, target in targets.items()
        ],
    }
    cli.rows(data, ("QUEUE", "FROM", "WOULD BE" if dry_run else "NOW"), rows, "it has no queues")


@verb("delete", GROUP)
async def delete(
    cli: Cli,
    name: Name,
    offsets: Annotated[bool, typer.Option("--offsets", help="its offsets, too")] = False,
) -> None:
    """Delete a group."""
    admin = await cli.admin()
    if name not in await admin.group_names():
        raise CommandError(f"there is no consumer group {name}")
    await admin.delete_group(name, offsets=offsets)
    cli.done(f"deleted group {name}", name=name, action="delete")


def _position(text: str) -> datetime:
    try:
        return a_time(text)
    except typer.BadParameter:
        expected = "first, last or a time such as 2026-01-31T08:00Z"
        raise ConfigurationError("--to", text, expected) from None


def _subscriptions(group: ConsumerGroup | None) -> str:
    if group is None:
        return "-"
    unequal = group.unequal_topics
    return f"UNEQUAL: {', '.join(unequal)}" if unequal else "equal"


def _print_members(group: ConsumerGroup) -> None:
    rows = [
        (
            member.client_id,
            member.address,
            topic,
            member.filters.get(topic, "-"),
            "refused" if member.refused else "",
        )
        for member in group.members
        for topic in sorted({*member.filters, *group.unequal_topics})
    ]
    print_table(("CLIENT ID", "ADDRESS", "TOPIC", "FILTER", ""), rows)


def _fields(lag: GroupLag, group: ConsumerGroup | None) -> dict[str, Any]:
    return {
        "name": lag.group,
        "message_model": None if group is None else group.message_model,
        "members": [] if group is None else [asdict(one) for one in group.members],
        "unequal_topics": [] if group is None else list(group.unequal_topics),
        "lag": lag.messages,
        "lag_seconds": lag.seconds,
        "topics": [asdict(one) for one in lag.topics],
    }
