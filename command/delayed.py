"""The noun ``delayed`` of the command ``halfmq``: messages that wait for their time of delivery."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from typing import Any

from halfmq.client.admin import Admin
from halfmq.client.administration.delayed import DELAYED_LIMIT, DelayedMessage

from .broker import KEYS_SHOWN, add_verb
from .output import DONE, format_duration, print_line, print_table, report_done

TITLES = ("DELIVER AT", "IN", "TOPIC", "KEYS", "MESSAGE ID", "HANDLE")


def add_nouns(nouns: Any) -> None:
    """Add the noun to the command's parser."""
    delayed = nouns.add_parser("delayed", help="messages that wait for their time of delivery")
    verbs = delayed.add_subparsers(metavar="VERB", required=True)
    listing = add_verb(verbs, "list", _list, "list them, the next ones first")
    listing.add_argument("--topic", metavar="T", help="only of this topic")
    listing.add_argument(
        "--limit",
        type=int,
        default=DELAYED_LIMIT,
        metavar="N",
        help=f"maximum number (default {DELAYED_LIMIT})",
    )
    cancel = add_verb(verbs, "cancel", _cancel, "cancel one: nobody gets it")
    cancel.add_argument("handle", metavar="HANDLE", help="as list shows it")


async def _list(admin: Admin, options: argparse.Namespace) -> int:
    found = await admin.delayed(options.topic, limit=options.limit)
    if options.json:
        print_line(json.dumps([_fields(one) for one in found], indent=2))
        return DONE
    if not found:
        of_topic = "" if options.topic is None else f" of topic {options.topic}"
        print_line(f"no message{of_topic} waits for its time of delivery")
        return DONE
    now = datetime.now(UTC)
    print_table(
        TITLES,
        [
            (
                f"{one.deliver_at:%Y-%m-%d %H:%M:%S}Z",
                format_duration(max((one.deliver_at - now).total_seconds(), 0)),
                one.topic,
                one.keys[:KEYS_SHOWN],
                one.message_id,
                one.recall_handle,
            )
            for one in found
        ],
    )
    return DONE


async def _cancel(admin: Admin, options: argparse.Namespace) -> int:
    await admin.cancel_delayed(options.handle)
    return report_done(
        options, {"handle": options.handle, "action": "cancel"}, f"cancelled {options.handle}"
    )


def _fields(one: DelayedMessage) -> dict[str, str]:
    return {
        "topic": one.topic,
        "message_id": one.message_id,
        "keys": one.keys,
        "deliver_at": one.deliver_at.isoformat(),
        "stored_at": one.stored_at.isoformat(),
        "broker": one.broker_name,
        "handle": one.recall_handle,
    }
