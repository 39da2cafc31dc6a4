"""The noun ``delayed`` of the command ``halfmq``: messages that wait for their delivery."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Final

import typer

from halfmq.client.administration.delayed import DELAYED_LIMIT

from .output import cut, format_duration, format_time
from .verbs import Cli, noun, verb

DELAYED: Final = noun("delayed", "messages that wait for their delivery")

TITLES = ("DELIVER AT", "IN", "TOPIC", "KEYS", "MESSAGE ID", "HANDLE")


@verb("list", DELAYED)
async def list_(
    cli: Cli,
    topic: Annotated[str | None, typer.Option(metavar="T", help="only of this topic")] = None,
    limit: Annotated[int, typer.Option(metavar="N", help="maximum number")] = DELAYED_LIMIT,
) -> None:
    """List them, the next ones first."""
    found = await (await cli.admin()).delayed(topic, limit=limit)
    now = datetime.now(UTC)
    rows = [
        (
            format_time(one.deliver_at),
            _when((one.deliver_at - now).total_seconds()),
            one.topic,
            cut(one.keys),
            one.message_id,
            one.recall_handle,
        )
        for one in found
    ]
    of_topic = "" if topic is None else f" of topic {topic}"
    cli.rows(found, TITLES, rows, f"no message{of_topic} waits for its delivery")


def _when(seconds: float) -> str:
    late = seconds <= -1
    return f"late by {format_duration(-seconds)}" if late else format_duration(max(seconds, 0))


@verb("cancel", DELAYED)
async def cancel(
    cli: Cli,
    handle: Annotated[
        str, typer.Argument(metavar="HANDLE", help="as list shows it", show_default=False)
    ],
) -> None:
    """Cancel one: nobody gets it."""
    await (await cli.admin()).cancel_delayed(handle)
    cli.done(f"cancelled {handle}", handle=handle, action="cancel")
