"""The noun ``dlq`` of the command ``halfmq``: dead letters, and sending them again."""

from __future__ import annotations

import argparse
import base64
import json
from contextlib import aclosing
from dataclasses import asdict
from datetime import datetime
from typing import Any, Final

from halfmq.client.admin import Admin
from halfmq.client.administration.dead_letters import DeadLetter
from halfmq.client.errors import UnreadableBodyError

from .broker import KEYS_SHOWN, add_verb
from .output import (
    DONE,
    FAILED,
    print_error,
    print_line,
    print_pairs,
    print_table,
    printable,
    report_done,
)

SHOW_LIMIT: Final = 100
"""Dead letters shown by default."""
BODY_SHOWN: Final = 1_000
"""Characters of a body that are shown to people."""
FAILURES_SHOWN: Final = 10
TITLES: Final = ("MESSAGE ID", "DIED", "TOPIC", "KEYS", "ATTEMPTS", "CAUSE")


def add_nouns(nouns: Any) -> None:
    """Add the noun to the command's parser."""
    dead = nouns.add_parser("dlq", help="dead letters: messages that a consumer group gave up")
    verbs = dead.add_subparsers(metavar="VERB", required=True)
    listing = add_verb(verbs, "list", _list, "list groups with dead letters, or causes of a group")
    listing.add_argument("group", metavar="GROUP", nargs="?", help="count its letters by cause")
    show = add_verb(verbs, "show", _show, "show the dead letters of a group, the oldest first")
    redrive = add_verb(verbs, "redrive", _redrive, "send dead letters to their topics again")
    for parser in (show, redrive):
        parser.add_argument("group", metavar="GROUP", help="the consumer group")
        parser.add_argument("--id", metavar="ID", help="only the one with this message id")
        parser.add_argument(
            "--cause", metavar="TEXT", help="only with this cause, as list shows it"
        )
    for parser in (listing, show, redrive):
        for name, what in (("--since", "at this time or later"), ("--until", "before this time")):
            parser.add_argument(
                name,
                type=_time,
                metavar="TIME",
                help=f"only what died {what}, such as 2026-01-31T08:00 (local time) or …T08:00Z",
            )
    show.add_argument(
        "--limit",
        type=int,
        default=SHOW_LIMIT,
        metavar="N",
        help=f"maximum number (default {SHOW_LIMIT})",
    )
    redrive.add_argument("--rate", type=float, metavar="N", help="letters per second at most")
    redrive.add_argument(
        "--dry-run", action="store_true", help="send nothing, and say what would be sent"
    )


def _time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 2026-01-31T08:00Z") from None


async def _list(admin: Admin, options: argparse.Namespace) -> int:
    if options.group is None:
        groups = await admin.dead_letter_groups()
        if options.json:
            print_line(json.dumps(groups, indent=2))
        elif groups:
            print_table(("GROUP", "LETTERS"), [(name, str(n)) for name, n in groups.items()])
        else:
            print_line("no group has dead letters")
        return DONE
    causes = await admin.dead_letter_causes(options.group, since=options.since, until=options.until)
    if options.json:
        rows = [asdict(one) for one in causes]
        print_line(json.dumps(rows, indent=2, default=datetime.isoformat))
    elif causes:
        print_table(
            ("LETTERS", "FIRST", "LAST", "CAUSE"),
            [(str(one.count), _shown(one.first), _shown(one.last), one.cause) for one in causes],
        )
    else:
        print_line(f"group {options.group} has no such dead letters")
    return DONE


async def _show(admin: Admin, options: argparse.Namespace) -> int:
    if options.id is not None:
        return await _show_one(admin, options)
    found: list[DeadLetter] = []
    cut = False
    letters = admin.dead_letters(
        options.group, since=options.since, until=options.until, cause=options.cause
    )
    async with aclosing(letters):
        async for letter in letters:
            cut = len(found) >= options.limit
            if cut:
                break
            found.append(letter)
    if options.json:
        print_line(json.dumps([_fields(one) for one in found], indent=2))
    elif found:
        print_table(TITLES, [_row(one) for one in found])
    else:
        print_line(f"group {options.group} has no such dead letters")
    if cut:
        print_error(f"only the first {options.limit} are shown; --limit and --since show others")
    return DONE


async def _show_one(admin: Admin, options: argparse.Namespace) -> int:
    letter = await _named(admin, options)
    if letter is None:
        return FAILED
    fields = _fields(letter)
    if options.json:
        print_line(json.dumps(fields, indent=2))
        return DONE
    properties = fields.pop("properties")
    pairs = {name.replace("_", " "): str(value)[:BODY_SHOWN] for name, value in fields.items()}
    print_pairs(pairs | {f"  {name}": value for name, value in properties.items()})
    return DONE


async def _redrive(admin: Admin, options: argparse.Namespace) -> int:
    if options.id is not None and await _named(admin, options) is None:
        return FAILED
    result = await admin.redrive(
        options.group,
        options.id,
        since=options.since,
        until=options.until,
        cause=options.cause,
        rate=options.rate,
        dry_run=options.dry_run,
    )
    for letter, error in result.failures[:FAILURES_SHOWN]:
        print_error(printable(f"{letter.message_id} is not sent: {error}"))
    if len(result.failures) > FAILURES_SHOWN:
        print_error(f"{len(result.failures)} letters are not sent")
    if not result.complete:
        print_error("ended early: the letters after this one were not tried")
    topics = ", ".join(f"{count} to {topic}" for topic, count in sorted(result.topics.items()))
    verb = "would send" if options.dry_run else "sent"
    text = f"{verb} {topics or 'nothing'}"
    partly = options.dry_run or options.id or options.until or result.failures
    if result.sent and not partly:  # otherwise a time would also skip what was not sent
        since = result.begun.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        text += f"; they stay in the queue: --since {since} skips them the next time"
    fields = {
        "group": options.group,
        "dry_run": options.dry_run,
        "sent": result.sent,
        "topics": dict(result.topics),
        "failures": [
            {"message_id": letter.message_id, "error": str(error)}
            for letter, error in result.failures
        ],
        "complete": result.complete,
        "begun": result.begun.isoformat(),
    }
    report_done(options, fields, text)
    return FAILED if result.failures else DONE


async def _named(admin: Admin, options: argparse.Namespace) -> DeadLetter | None:
    letter = await admin.dead_letter(options.group, options.id)
    if letter is None:
        print_error(f"group {options.group} has no dead letter {options.id}")
    return letter


def _shown(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S}Z"


def _row(letter: DeadLetter) -> tuple[str, ...]:
    return (
        letter.message_id,
        _shown(letter.died_at),
        letter.topic,
        letter.keys[:KEYS_SHOWN],
        str(letter.attempts),
        letter.cause,
    )


def _fields(letter: DeadLetter) -> dict[str, Any]:
    try:
        body = letter.body
    except UnreadableBodyError:
        body = letter.record.body
    try:
        content = {"body": body.decode()}
    except UnicodeDecodeError:
        content = {"body_base64": base64.b64encode(body).decode()}
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
        "sent_at": letter.born_timestamp.isoformat(),
        "died_at": letter.died_at.isoformat(),
        "broker": letter.queue.broker_name,
        **content,
        "properties": dict(letter.properties),
    }
