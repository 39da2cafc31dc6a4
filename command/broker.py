"""The nouns ``tx``, ``group`` and ``broker`` of the command ``halfmq``, for a running broker.

Examples are ``halfmq tx list``, ``halfmq group show NAME`` and ``halfmq broker metrics``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, Final, TypeAlias

from halfmq.client.admin import Admin, PendingTransaction
from halfmq.client.administration.groups import ConsumerGroup
from halfmq.client.errors import ClientError, ConfigurationError, TlsError

from .connection_options import add_options, client_config
from .output import (
    DONE,
    FAILED,
    USAGE,
    format_duration,
    print_error,
    print_line,
    print_pairs,
    print_table,
    printable,
    report_done,
)

LIST_LIMIT: Final = 1_000
"""Transactions listed by default."""

KEYS_SHOWN: Final = 24  # characters of the keys in a table

TITLES: Final = (
    *("HALF MESSAGE ID", "TRANSACTION ID", "STATE", "GROUP", "TOPIC", "KEYS", "AGE", "OWNER"),
    *("SENT", "DELIVERED", "ANSWERED", "NEXT CHECK"),
)

Verb: TypeAlias = Callable[[Admin, argparse.Namespace], Awaitable[int]]


def add_nouns(nouns: Any) -> None:
    """Add the nouns to the command's parser; each verb sets ``run`` in the parsed options."""
    transactions = nouns.add_parser("tx", help="undecided transactions")
    _add_transaction_verbs(transactions.add_subparsers(metavar="VERB", required=True))
    groups = nouns.add_parser("group", help="connected consumer groups")
    verbs = groups.add_subparsers(metavar="VERB", required=True)
    add_verb(
        verbs, "list", _list_groups, "list groups, and whether their members subscribe to the same"
    )
    show = add_verb(
        verbs, "show", _show_group, "show the members of a group and their subscriptions"
    )
    show.add_argument("name", metavar="NAME", help="of the consumer group")
    broker = nouns.add_parser("broker", help="the broker itself")
    verbs = broker.add_subparsers(metavar="VERB", required=True)
    metrics = add_verb(verbs, "metrics", _metrics, "show the broker's metrics")
    metrics.add_argument(
        "--all", action="store_true", help="include RocketMQ's keys, not only halfmq's own"
    )


def run(options: argparse.Namespace) -> int:
    """Run the verb in the parsed options and return the exit code."""
    logging.basicConfig(level=logging.ERROR, format="halfmq: %(message)s")
    try:
        if options.prepare is not None:
            options.prepare(options)
        return asyncio.run(_run(options))
    except ConfigurationError as error:
        return _print_failure(error, USAGE)
    except TlsError as error:
        print_error(f"{error}; of this command: --tls, or --ca FILE")
        return FAILED
    except ClientError as error:
        return _print_failure(error, FAILED)


async def _run(options: argparse.Namespace) -> int:
    verb: Verb = options.verb
    async with Admin(config=client_config(options, os.environ)) as admin:
        return await verb(admin, options)


# -- arguments ---------------------------------------------------------------------------------


def _add_transaction_verbs(verbs: Any) -> None:
    listing = add_verb(verbs, "list", _list, "list undecided transactions, the oldest first")
    listing.add_argument("--group", metavar="G", help="only of this producer group")
    listing.add_argument("--state", choices=("prepared", "parked"), help="only in this state")
    listing.add_argument(
        "--limit",
        type=_count,
        default=LIST_LIMIT,
        metavar="N",
        help=f"maximum number; 0: all (default {LIST_LIMIT})",
    )
    show = add_verb(verbs, "show", _show, "show one transaction")
    commit = add_verb(verbs, "commit", _commit, "commit a transaction: its message is delivered")
    rollback = add_verb(
        verbs, "rollback", _rollback, "roll back a transaction: its message is dropped"
    )
    resume = add_verb(verbs, "resume", _resume, "resume the checks of a parked transaction")
    for parser in (show, commit, rollback, resume):
        parser.add_argument(
            "id", metavar="ID", help="half message id, or transaction id, as list shows them"
        )
    for parser in (commit, rollback, resume):
        parser.add_argument("--reason", metavar="TEXT", help="for the broker's log")


def add_verb(verbs: Any, name: str, verb: Verb, text: str) -> argparse.ArgumentParser:
    """Add a verb; if its parser gets a default ``prepare``, that runs before the connection."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}."
    )
    parser.add_argument(
        "--namesrv",
        metavar="HOST:PORT",
        help="name server or halfmq broker (default: NAMESRV_ADDR, else 127.0.0.1:9876)",
    )
    add_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(verb=verb, run=run, prepare=None)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


# -- verbs -------------------------------------------------------------------------------------


async def _list(admin: Admin, options: argparse.Namespace) -> int:
    limit: int | None = options.limit or None
    # One more is requested, to know whether the list is complete.
    found = admin.transactions(
        options.group, options.state, limit=None if limit is None else limit + 1
    )
    show = _JsonList() if options.json else _Table()
    count = 0
    async for transaction in found:
        if count == limit:
            print_error(f"only the first {limit} are listed; --limit 0 lists all")
            break
        count += 1
        show.add(transaction)
    show.end()
    return DONE


async def _show(admin: Admin, options: argparse.Namespace) -> int:
    transaction = await admin.transaction(options.id)
    if transaction is None:
        print_error(f"no undecided transaction has the id {options.id}")
        return FAILED
    if options.json:
        print_line(json.dumps(_fields(transaction), indent=2))
        return DONE
    checks = (
        f"{transaction.checks_sent} sent, {transaction.checks_delivered} delivered, "
        f"{transaction.checks_answered} answered"
    )
    print_pairs(
        {
            "half message id": transaction.half_message_id,
            "transaction id": transaction.transaction_id,
            "state": _state(transaction),
            "group": transaction.group,
            "topic": transaction.topic,
            "keys": transaction.keys,
            "messages": str(transaction.messages),
            "prepared": transaction.prepared_at.isoformat(timespec="milliseconds"),
            "age": format_duration(transaction.age),
            "owner": _owner(transaction),
            "checks": checks,
            "next check": _next_check(transaction),
            "broker": transaction.broker_name,
            "log offset": str(transaction.offset),
        }
    )
    return DONE


async def _commit(admin: Admin, options: argparse.Namespace) -> int:
    message_id = await admin.commit(options.id, reason=options.reason)
    text = f"committed {options.id}; its message is {message_id}"
    return report_done(
        options, {"id": options.id, "action": "commit", "message_id": message_id}, text
    )


async def _rollback(admin: Admin, options: argparse.Namespace) -> int:
    await admin.rollback(options.id, reason=options.reason)
    return report_done(
        options, {"id": options.id, "action": "rollback"}, f"rolled back {options.id}"
    )


async def _resume(admin: Admin, options: argparse.Namespace) -> int:
    await admin.resume(options.id, reason=options.reason)
    return report_done(options, {"id": options.id, "action": "resume"}, f"resumed {options.id}")


async def _list_groups(admin: Admin, options: argparse.Namespace) -> int:
    groups = await admin.groups()
    if options.json:
        print_line(json.dumps([_group_fields(group) for group in groups], indent=2))
        return DONE
    if not groups:
        print_line("no consumer is connected")
        return DONE
    rows = [
        (
            group.name,
            group.message_model.lower(),
            str(len(group.members)),
            str(sum(member.refused for member in group.members)),
            f"UNEQUAL: {', '.join(group.unequal_topics)}" if group.unequal_topics else "equal",
        )
        for group in groups
    ]
    print_table(("GROUP", "MODEL", "MEMBERS", "REFUSED", "SUBSCRIPTIONS"), rows)
    return DONE


async def _show_group(admin: Admin, options: argparse.Namespace) -> int:
    groups = await admin.groups(options.name)
    if not groups:
        print_error(f"no consumer of group {options.name} is connected")
        return FAILED
    (group,) = groups
    unequal = group.unequal_topics
    if options.json:
        print_line(json.dumps(_group_fields(group), indent=2))
        return DONE
    print_pairs(
        {
            "group": group.name,
            "model": group.message_model.lower(),
            "members": str(len(group.members)),
            "subscriptions": f"UNEQUAL: {', '.join(unequal)}" if unequal else "equal",
        }
    )
    if unequal:
        print_line("messages that go to a member which does not want them are lost to the group")
    print_line("")
    rows = [
        (
            member.client_id,
            member.address,
            topic,
            member.filters.get(topic, "-"),
            "refused" if member.refused else "",
        )
        for member in group.members
        for topic in sorted({*member.filters, *unequal})
    ]
    print_table(("CLIENT ID", "ADDRESS", "TOPIC", "FILTER", ""), rows)
    return DONE


async def _metrics(admin: Admin, options: argparse.Namespace) -> int:
    found = await admin.metrics()
    if options.json:
        print_line(json.dumps(found, indent=2, sort_keys=True))
        return DONE
    for broker_name, table in sorted(found.items()):
        ours = {key: value for key, value in table.items() if key.startswith("halfmq.")}
        shown = table if options.all or not ours else ours
        print_line(broker_name)
        print_pairs({f"  {key}": value for key, value in sorted(shown.items())})
    return DONE


# -- output ------------------------------------------------------------------------------------


class _Table:
    """A table, streamed: the first rows determine the width of the columns."""

    _FIRST_ROWS: Final = 500

    def __init__(self) -> None:
        self._rows: list[Sequence[str]] = [TITLES]
        self._widths: list[int] = []

    def add(self, transaction: PendingTransaction) -> None:
        self._rows.append(_row(transaction))
        if len(self._rows) > self._FIRST_ROWS:
            self._flush()

    def end(self) -> None:
        if not self._widths and len(self._rows) == 1:
            print_line("no transaction is undecided")
        else:
            self._flush()

    def _flush(self) -> None:
        if not self._widths:
            self._widths = [max(map(len, column)) for column in zip(*self._rows, strict=True)]
        for row in self._rows:
            cells = (cell.ljust(width) for cell, width in zip(row, self._widths, strict=True))
            print_line("  ".join(cells).rstrip())
        self._rows.clear()


class _JsonList:
    """A JSON array, streamed with one element per line."""

    def __init__(self) -> None:
        self._lead = "["

    def add(self, transaction: PendingTransaction) -> None:
        sys.stdout.write(self._lead + "\n" + json.dumps(_fields(transaction)))
        self._lead = ","

    def end(self) -> None:
        print_line("[]" if self._lead == "[" else "\n]")


def _group_fields(group: ConsumerGroup) -> dict[str, Any]:
    return asdict(group) | {"unequal_topics": list(group.unequal_topics)}


def _row(transaction: PendingTransaction) -> Sequence[str]:
    keys = transaction.keys
    cells: Iterable[str] = (
        transaction.half_message_id,
        transaction.transaction_id,
        _state(transaction),
        transaction.group,
        transaction.topic,
        keys if len(keys) <= KEYS_SHOWN else keys[: KEYS_SHOWN - 1] + "…",
        format_duration(transaction.age),
        _owner(transaction),
        str(transaction.checks_sent),
        str(transaction.checks_delivered),
        str(transaction.checks_answered),
        _next_check(transaction),
    )
    return [printable(cell) for cell in cells]


def _fields(transaction: PendingTransaction) -> dict[str, Any]:
    return asdict(transaction) | {"prepared_at": transaction.prepared_at.isoformat()}


def _state(transaction: PendingTransaction) -> str:
    reason = transaction.parked_reason
    return transaction.state if reason is None else f"{transaction.state} ({reason})"


def _owner(transaction: PendingTransaction) -> str:
    nobody = "no members" if transaction.producers == 0 else "-"  # of the group, to be asked
    return transaction.owner or nobody


def _next_check(transaction: PendingTransaction) -> str:
    if transaction.next_check is None:
        return "-"
    return "now" if transaction.next_check < 1 else f"in {format_duration(transaction.next_check)}"


def _print_failure(error: ClientError, code: int) -> int:
    print_error(str(error))
    return code
