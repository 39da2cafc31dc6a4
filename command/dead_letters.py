"""The noun ``dlq`` of the command ``halfmq``: dead letters, and sending them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Annotated, Any, Final

import typer

from halfmq.client.admin import Admin
from halfmq.client.administration.dead_letters import DeadLetter

from .messages import BODY_SHOWN, content_of
from .output import cut, format_time, print_error, print_json, print_pairs, printable
from .verbs import DONE, FAILED, Cli, CommandError, Time, noun, verb

DLQ: Final = noun("dlq", "dead letters: messages that a consumer group gave up")

SHOW_LIMIT: Final = 100
FAILURES_SHOWN: Final = 10
TITLES: Final = ("MESSAGE ID", "DIED", "TOPIC", "KEYS", "ATTEMPTS", "CAUSE")

Group = Annotated[
    str, typer.Argument(metavar="GROUP", help="the consumer group", show_default=False)
]
Id = Annotated[str | None, typer.Option(metavar="ID", help="only the one with this message id")]
Cause = Annotated[
    str | None, typer.Option(metavar="TEXT", help="only with this cause, as list shows it")
]


@verb("list", DLQ)
async def list_(
    cli: Cli,
    group: Annotated[
        str | None, typer.Argument(metavar="[GROUP]", help="count its letters by cause")
    ] = None,
    since: Time = None,
    until: Time = None,
) -> None:
    """List groups with dead letters, or causes of a group; since and until are times of death."""
    admin = await cli.admin()
    if group is None:
        groups = await admin.dead_letter_groups()
        cli.rows(groups, ("GROUP", "LETTERS"), list(groups.items()), "no group has dead letters")
        return
    causes = await admin.dead_letter_causes(group, since=since, until=until)
    rows = [(one.count, format_time(one.first), format_time(one.last), one.cause) for one in causes]
    titles = ("LETTERS", "FIRST", "LAST", "CAUSE")
    cli.rows(causes, titles, rows, f"group {group} has no such dead letters")


@verb("show", DLQ)
async def show(
    cli: Cli,
    group: Group,
    id: Id = None,  # noqa: A002 -- the name of the option
    cause: Cause = None,
    since: Time = None,
    until: Time = None,
    limit: Annotated[int, typer.Option(metavar="N", help="maximum number")] = SHOW_LIMIT,
) -> None:
    """Show the dead letters of a group, the oldest first."""
    admin = await cli.admin()
    if id is not None:
        fields = _fields(await _named(admin, group, id))
        if cli.json:
            print_json(fields)
            return
        properties = fields.pop("properties")
        pairs = {name.replace("_", " "): str(value)[:BODY_SHOWN] for name, value in fields.items()}
        print_pairs(pairs | {f"  {name}": value for name, value in properties.items()})
        return
    found: list[DeadLetter] = []
    is_cut = False
    letters = admin.dead_letters(group, since=since, until=until, cause=cause)
    async with aclosing(letters):
        async for letter in letters:
            is_cut = len(found) >= limit
            if is_cut:
                break
            found.append(letter)
    rows, data = [_row(one) for one in found], [_fields(one) for one in found]
    cli.rows(data, TITLES, rows, f"group {group} has no such dead letters")
    if is_cut:
        print_error(f"only the first {limit} are shown; --limit and --since show others")


@verb("redrive", DLQ)
async def redrive(
    cli: Cli,
    group: Group,
    id: Id = None,  # noqa: A002 -- the name of the option
    cause: Cause = None,
    since: Time = None,
    until: Time = None,
    rate: Annotated[
        float | None, typer.Option(metavar="N", help="letters per second at most")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="send nothing, and say what would be sent")
    ] = False,
) -> int:
    """Send dead letters to their topics again."""
    admin = await cli.admin()
    if id is not None:
        await _named(admin, group, id)
    count = 1 if id else (await admin.dead_letter_groups()).get(group)
    with _progress(None if dry_run else count) as progress:
        result = await admin.redrive(
            group,
            id,
            since=since,
            until=until,
            cause=cause,
            rate=rate,
            dry_run=dry_run,
            on_progress=progress,
        )
    for letter, error in result.failures[:FAILURES_SHOWN]:
        print_error(printable(f"{letter.message_id} is not sent: {error}"))
    if len(result.failures) > FAILURES_SHOWN:
        print_error(f"{len(result.failures)} letters are not sent")
    if not result.complete:
        print_error("ended early: the letters after this one were not tried")
    topics = ", ".join(f"{count} to {topic}" for topic, count in sorted(result.topics.items()))
    text = f"{'would send' if dry_run else 'sent'} {topics or 'nothing'}"
    partly = dry_run or id or until or result.failures
    if result.sent and not partly:  # otherwise a time would also skip what was not sent
        begun = result.begun.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        text += f"; they stay in the queue: --since {begun} skips them the next time"
    cli.done(
        text,
        group=group,
        dry_run=dry_run,
        sent=result.sent,
        topics=dict(result.topics),
        failures=[
            {"message_id": letter.message_id, "error": str(error)}
            for letter, error in result.failures
        ],
        complete=result.complete,
        begun=result.begun,
    )
    return FAILED if result.failures else DONE


@contextmanager
def _progress(total: int | None) -> Iterator[Callable[[DeadLetter], None]]:
    """Show a bar on a terminal; yield what is called with each letter that is done."""
    from rich.console import Console  # noqa: PLC0415 -- no other verb shows progress
    from rich.progress import Progress  # noqa: PLC0415

    console = Console(stderr=True)
    hidden = total is None or not console.is_terminal
    with Progress(console=console, disable=hidden, transient=True) as bar:
        letters = bar.add_task("letters", total=total)
        yield lambda _letter: bar.advance(letters)


async def _named(admin: Admin, group: str, message_id: str) -> DeadLetter:
    letter = await admin.dead_letter(group, message_id)
    if letter is None:
        raise CommandError(f"group {group} has no dead letter {message_id}")
    return letter


def _row(letter: DeadLetter) -> tuple[object, ...]:
    return (
        letter.message_id,
        format_time(letter.died_at),
        letter.topic,
        cut(letter.keys),
        letter.attempts,
        letter.cause,
    )


def _fields(letter: DeadLetter) -> dict[str, Any]:
    return {
        "message_id": letter.message_id,
        "offset_message_id": letter.offset_message_id,
        "inbox_id": letter.inbox_id,
        "group": letter.group,
        "topic": letter.topic,
        "tags": letter.tags,
        "keys": letter.keys,
        "attempts": letter.attempts,
        "cause": letter.cause,
        "sent_at": letter.born_timestamp,
        "died_at": letter.died_at,
        "broker": letter.queue.broker_name,
        **content_of(letter),
        "properties": dict(letter.properties),
    }
