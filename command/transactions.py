"""The noun ``tx`` of the command ``halfmq``: undecided transactions."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any, Final, Literal

import typer

from halfmq.client.admin import PendingTransaction

from .output import ROWS_AT_ONCE, cut, format_duration, print_error, print_line, print_table
from .verbs import Cli, CommandError, noun, verb

TX: Final = noun("tx", "undecided transactions")

LIST_LIMIT: Final = 1_000
"""Transactions listed by default."""

TITLES: Final = (
    *("HALF MESSAGE ID", "TRANSACTION ID", "STATE", "GROUP", "TOPIC", "KEYS", "AGE", "OWNER"),
    *("SENT", "DELIVERED", "ANSWERED", "NEXT CHECK"),
)

Id = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="half message id, or transaction id, as list shows them",
        show_default=False,
    ),
]
Reason = Annotated[str | None, typer.Option(metavar="TEXT", help="for the broker's log")]


@verb("list", TX)
async def list_(
    cli: Cli,
    group: Annotated[
        str | None, typer.Option(metavar="G", help="only of this producer group")
    ] = None,
    state: Annotated[
        Literal["prepared", "parked"] | None, typer.Option(help="only in this state")
    ] = None,
    limit: Annotated[
        int, typer.Option(metavar="N", min=0, help="maximum number; 0: all")
    ] = LIST_LIMIT,
) -> None:
    """List undecided transactions, the oldest first."""
    admin = await cli.admin()
    most = limit or None
    shown = _JsonList() if cli.json else _Table()
    count = 0
    # One more is requested, to know whether the list is complete.
    async for one in admin.transactions(group, state, limit=None if most is None else most + 1):
        if count == most:
            print_error(f"only the first {limit} are listed; --limit 0 lists all")
            break
        count += 1
        shown.add(one)
    shown.end()


@verb("show", TX)
async def show(cli: Cli, id: Id) -> None:  # noqa: A002 -- the name of the argument
    """Show one transaction."""
    found = await (await cli.admin()).transaction(id)
    if found is None:
        raise CommandError(f"no undecided transaction has the id {id}")
    checks = (
        f"{found.checks_sent} sent, {found.checks_delivered} delivered, "
        f"{found.checks_answered} answered"
    )
    cli.pairs(
        _fields(found),
        {
            "half message id": found.half_message_id,
            "transaction id": found.transaction_id,
            "state": _state(found),
            "group": found.group,
            "topic": found.topic,
            "keys": found.keys,
            "messages": found.messages,
            "prepared": found.prepared_at.isoformat(timespec="milliseconds"),
            "age": format_duration(found.age),
            "owner": _owner(found),
            "checks": checks,
            "next check": _next_check(found),
            "broker": found.broker_name,
            "log offset": found.offset,
        },
    )


@verb("commit", TX)
async def commit(cli: Cli, id: Id, reason: Reason = None) -> None:  # noqa: A002
    """Commit a transaction: its message is delivered."""
    message_id = await (await cli.admin()).commit(id, reason=reason)
    text = f"committed {id}; its message is {message_id}"
    cli.done(text, id=id, action="commit", message_id=message_id)


@verb("rollback", TX)
async def rollback(cli: Cli, id: Id, reason: Reason = None) -> None:  # noqa: A002
    """Roll back a transaction: its message is dropped."""
    await (await cli.admin()).rollback(id, reason=reason)
    cli.done(f"rolled back {id}", id=id, action="rollback")


@verb("resume", TX)
async def resume(cli: Cli, id: Id, reason: Reason = None) -> None:  # noqa: A002
    """Resume the checks of a parked transaction."""
    await (await cli.admin()).resume(id, reason=reason)
    cli.done(f"resumed {id}", id=id, action="resume")


class _Table:
    """A table, printed as its rows come."""

    def __init__(self) -> None:
        self._rows: list[Sequence[object]] = []
        self._titles: Sequence[str] = TITLES

    def add(self, transaction: PendingTransaction) -> None:
        self._rows.append(_row(transaction))
        if len(self._rows) == ROWS_AT_ONCE:
            self._print()

    def end(self) -> None:
        if self._rows:
            self._print()
        elif self._titles:
            print_line("no transaction is undecided")

    def _print(self) -> None:
        print_table(self._titles, self._rows)
        self._rows, self._titles = [], ()


class _JsonList:
    """A JSON array, printed as its elements come, one a line."""

    def __init__(self) -> None:
        self._lead = "["

    def add(self, transaction: PendingTransaction) -> None:
        sys.stdout.write(self._lead + "\n" + json.dumps(_fields(transaction)))
        self._lead = ","

    def end(self) -> None:
        print_line("[]" if self._lead == "[" else "\n]")


def _row(transaction: PendingTransaction) -> Sequence[object]:
    return (
        transaction.half_message_id,
        transaction.transaction_id,
        _state(transaction),
        transaction.group,
        transaction.topic,
        cut(transaction.keys),
        format_duration(transaction.age),
        _owner(transaction),
        transaction.checks_sent,
        transaction.checks_delivered,
        transaction.checks_answered,
        _next_check(transaction),
    )


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
