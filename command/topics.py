"""The noun ``topic`` of the command ``halfmq``."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from typing import Annotated, Final

import typer

from halfmq.client.administration.topics import Topic

from .output import format_time, print_json, print_line, print_pairs, print_table
from .verbs import Cli, CommandError, noun, verb

TOPIC: Final = noun("topic", "topics and their queues")

Name = Annotated[str, typer.Argument(metavar="TOPIC", show_default=False)]
Queues = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="queues on each broker", show_default=False)
]


@verb("list", TOPIC)
async def list_(
    cli: Cli,
    all: Annotated[  # noqa: A002 -- the name of the option
        bool, typer.Option("--all", help="those of the broker, of retries and dead letters, too")
    ] = False,
) -> None:
    """List topics with their queues and the messages of each."""
    admin = await cli.admin()
    by_name: dict[str, list[Topic]] = defaultdict(list)
    for one in await admin.topics():
        if all or not one.is_internal:
            by_name[one.name].append(one)
    data, rows = [], []
    for name, parts in by_name.items():
        stored = await admin.queues(name)
        messages = sum(one.end - one.first for one in stored)
        last = max((one.last_stored for one in stored if one.last_stored), default=None)
        queues = sum(one.write_queues for one in parts)
        groups = await admin.groups_of(name)
        data.append(
            {
                "name": name,
                "brokers": [asdict(one) for one in parts],
                "messages": messages,
                "last_stored": last,
                "groups": groups,
            }
        )
        rows.append(
            (name, queues, messages, format_time(last), _access(parts[0]), ", ".join(groups) or "-")
        )
    titles = ("TOPIC", "QUEUES", "MESSAGES", "LAST STORED", "ACCESS", "GROUPS")
    cli.rows(data, titles, rows, "there is no topic; --all lists those of the broker")


@verb("show", TOPIC)
async def show(cli: Cli, name: Name) -> None:
    """Show a topic, its queues and who consumes it."""
    admin = await cli.admin()
    parts = await _parts(cli, name)
    stored, groups = await admin.queues(name), await admin.groups_of(name)
    traffic = await admin.traffic(name)
    if cli.json:
        queues = [asdict(one) | {"queue": one.queue._asdict()} for one in stored]
        print_json(
            {"brokers": parts, "queues": queues, "groups": groups, "traffic": asdict(traffic)}
        )
        return
    print_pairs(
        {
            "topic": name,
            "access": _access(parts[0]),
            "groups": ", ".join(groups) or "-",
            "stored in the last minute": traffic.minute.messages,
            "in the last day": traffic.day.messages,
            **{key: value for one in parts for key, value in one.attributes.items()},
        }
    )
    print_line("")
    rows = [
        (
            f"{one.queue.broker_name}:{one.queue.queue_id}",
            one.first,
            one.end,
            one.end - one.first,
            format_time(one.last_stored),
        )
        for one in stored
    ]
    print_table(("QUEUE", "FIRST", "END", "MESSAGES", "LAST STORED"), rows)


@verb("create", TOPIC)
async def create(
    cli: Cli,
    name: Name,
    queues: Queues = 4,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="only on its brokers (all)", show_default=False),
    ] = None,
) -> None:
    """Create a topic on every broker, or on those of one cluster."""
    admin = await cli.admin()
    if any(one.name == name for one in await admin.topics()):
        raise CommandError(f"topic {name} exists: halfmq topic change changes it")
    await admin.create_topic(name, queues=queues or 4, cluster=cluster)
    cli.done(f"created topic {name}", name=name, action="create")


@verb("change", TOPIC)
async def change(
    cli: Cli,
    name: Name,
    queues: Queues = None,
    read_queues: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="queues that consumers read; to shrink a topic, lower this when the last ones are "
            "consumed",
        ),
    ] = None,
    readable: Annotated[bool | None, typer.Option(help="consumers may read")] = None,
    writable: Annotated[bool | None, typer.Option(help="producers may send")] = None,
) -> None:
    """Change a topic on every broker; omitted options change nothing."""
    now = (await _parts(cli, name))[0]
    if queues is not None and read_queues is None:
        read_queues = max(queues, now.read_queues)
    await (await cli.admin()).create_topic(
        name,
        queues=now.write_queues if queues is None else queues,
        read_queues=now.read_queues if read_queues is None else read_queues,
        readable=now.readable if readable is None else readable,
        writable=now.writable if writable is None else writable,
    )
    cli.done(f"changed topic {name}", name=name, action="change")


@verb("delete", TOPIC)
async def delete(cli: Cli, name: Name) -> None:
    """Delete a topic with its messages and the offsets of its consumers."""
    await _parts(cli, name)
    await (await cli.admin()).delete_topic(name)
    cli.done(f"deleted topic {name}", name=name, action="delete")


async def _parts(cli: Cli, name: str) -> list[Topic]:
    """Return the topic as each broker has it."""
    found = [one for one in await (await cli.admin()).topics() if one.name == name]
    if not found:
        raise CommandError(f"there is no topic {name}")
    return found


def _access(topic: Topic) -> str:
    words = ["read"] * topic.readable + ["write"] * topic.writable
    return ", ".join(words) or "none"
