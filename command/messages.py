"""The noun ``message`` of the command ``halfmq``: find, show, browse, follow and send messages."""

from __future__ import annotations

import asyncio
import base64
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from halfmq.client.message import Message, ReceivedMessage
from halfmq.client.net.compression import decompress_body
from halfmq.client.producer import Producer

from .output import cut, format_time, print_json, print_line, print_pairs, print_table, printable
from .verbs import Cli, CommandError, Time, noun, verb

MESSAGE: Final = noun("message", "stored messages")

BROWSE_LIMIT: Final = 20
BODY_SHOWN: Final = 1_000
"""Characters of a body that are shown to people."""
BODY_IN_TABLE: Final = 40
UNPACKED_MAX: Final = 4 << 20
"""Bytes that a compressed body may grow to; a list has up to 64 of them in memory."""
SEND_GROUP: Final = "halfmq-command"
TITLES: Final = ("STORED", "MESSAGE ID", "QUEUE", "OFFSET", "TAGS", "KEYS", "BODY")

Topic = Annotated[str, typer.Argument(metavar="TOPIC", show_default=False)]
Id = Annotated[
    str,
    typer.Argument(metavar="ID", help="message id, or the id of its place", show_default=False),
]


@verb("find", MESSAGE)
async def find(
    cli: Cli,
    topic: Topic,
    key: Annotated[str, typer.Argument(metavar="KEY", show_default=False)],
    since: Time = None,
    until: Time = None,
) -> None:
    """Find the messages of a topic that have a key."""
    admin = await cli.admin()
    found = await admin.messages_with_key(topic, key, since=since, until=until)
    _show_list(cli, found, f"no message of topic {topic} has the key {key}")


@verb("show", MESSAGE)
async def show(
    cli: Cli,
    id: Id,  # noqa: A002 -- the name of the argument
    topic: Annotated[
        str | None, typer.Option(metavar="T", help="the topic, which a message id needs")
    ] = None,
) -> None:
    """Show a message, and what became of it in each group."""
    admin = await cli.admin()
    message = await admin.message(id, topic)
    if message is None:
        hint = "" if topic else "; a message id also needs --topic"
        raise CommandError(f"no broker has a message {id}{hint}")
    fates = await admin.consumption(message)
    fields = fields_of(message)
    if cli.json:
        print_json({**fields, "groups": fates})
        return
    properties = fields.pop("properties")
    print_pairs({name.replace("_", " "): str(value)[:BODY_SHOWN] for name, value in fields.items()})
    print_pairs({f"  {name}": value for name, value in properties.items()})
    print_line("")
    if fates:
        rows = [(one.group, one.fate, one.attempts or "") for one in fates]
        print_table(("GROUP", "STATE", "FAILED ATTEMPTS"), rows)
    else:
        print_line(f"no group consumes topic {message.topic}")


@verb("browse", MESSAGE)
async def browse(
    cli: Cli,
    topic: Topic,
    since: Time = None,
    until: Time = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="maximum number")] = BROWSE_LIMIT,
) -> None:
    """Show the latest messages of a topic, or those from a time on, without consuming them."""
    found: list[ReceivedMessage] = []
    latest = limit if since is None and until is None else None
    messages = (await cli.admin()).browse(topic, since=since, until=until, latest=latest)
    async with aclosing(messages):
        async for message in messages:
            found.append(message)
            if latest is None and len(found) > 100 * limit:
                break  # of one queue so far; enough to choose from
    found.sort(key=lambda one: one.store_timestamp)
    found = found[:limit] if latest is None else found[-limit:]
    _show_list(cli, found, f"topic {topic} has no such messages")


@verb("tail", MESSAGE)
async def tail(cli: Cli, topic: Topic) -> None:
    """Show each message that is sent to a topic from now on, until Ctrl-C."""
    async for message in (await cli.admin()).follow(topic):
        if cli.json:
            print_json(fields_of(message), indent=None)
        else:
            print_line("  ".join(printable(str(cell)) for cell in _row(message)))
        sys.stdout.flush()


@verb("send", MESSAGE)
async def send(
    cli: Cli,
    topic: Topic,
    body: Annotated[
        str | None,
        typer.Argument(metavar="BODY", help="text; without it --file", show_default=False),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="the body; - is standard input")
    ] = None,
    keys: Annotated[str | None, typer.Option(metavar="KEYS", help="separated by blanks")] = None,
    tags: Annotated[str | None, typer.Option(metavar="TAG")] = None,
    order_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="messages of one key keep their order")
    ] = None,
) -> None:
    """Send a message."""
    if (body is None) == (file is None):
        raise CommandError("give either a BODY or --file", code=2)
    content = (body or "").encode() if file is None else await asyncio.to_thread(_content, file)
    config = (await cli.admin()).config
    async with Producer(SEND_GROUP, config=config) as producer:
        result = await producer.send(
            Message(topic, content, keys=keys or "", tags=tags), order_key=order_key
        )
    cli.done(
        f"sent {result.message_id}",
        message_id=result.message_id,
        offset_message_id=result.offset_message_id,
        queue=result.queue,
        queue_offset=result.queue_offset,
    )


def _content(file: Path) -> bytes:
    try:
        return sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise CommandError(f"{file} cannot be read: {error.strerror}", code=2) from error


def _show_list(cli: Cli, found: list[ReceivedMessage], empty: str) -> None:
    cli.rows([fields_of(one) for one in found], TITLES, [_row(one) for one in found], empty)


def _row(message: ReceivedMessage) -> tuple[object, ...]:
    return (
        format_time(message.store_timestamp),
        message.message_id,
        f"{message.queue.broker_name}:{message.queue.queue_id}",
        message.queue_offset,
        cut(message.tags),
        cut(message.keys),
        cut(body_of(message).decode(errors="replace"), BODY_IN_TABLE),
    )


def body_of(message: ReceivedMessage) -> bytes:
    """Return the body, as it is stored if it cannot be decompressed or grows too large."""
    record = message.record
    try:
        return decompress_body(record.body, record.sys_flag, UNPACKED_MAX)
    except ValueError:
        return record.body


def content_of(message: ReceivedMessage) -> dict[str, str]:
    """Return the body as a field of JSON: text, or in base64 if it is none."""
    body = body_of(message)
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}


def fields_of(message: ReceivedMessage) -> dict[str, Any]:
    """Return the fields of a message for JSON."""
    return {
        "message_id": message.message_id,
        "offset_message_id": message.offset_message_id,
        "topic": message.topic,
        "broker": message.queue.broker_name,
        "queue": message.queue.queue_id,
        "queue_offset": message.queue_offset,
        "tags": message.tags,
        "keys": message.keys,
        "sent_at": message.born_timestamp,
        "stored_at": message.store_timestamp,
        **content_of(message),
        "properties": dict(message.properties),
    }
