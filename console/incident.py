"""Pages for an incident: what is wrong now, undecided transactions, the life of a message."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from datetime import datetime, timedelta
from typing import Any, Final

from nicegui import ui

from halfmq.client.admin import Admin, PendingTransaction
from halfmq.client.errors import ClientError, UnsupportedRequestError
from halfmq.client.message import ReceivedMessage

from .history import CHARTS, SAMPLE_S, SAMPLES
from .session import reported
from .widgets import PAGE_ROWS, SearchTable, body_of, confirm, facts

TRANSACTIONS_MAX: Final = 100_000
"""Transactions that are read for the list; 1 KiB each."""

MESSAGES_MAX: Final = 10
"""Messages that are shown with their lives."""
READ_MAX: Final = 1_000
"""Messages of a topic from a time on that are read, to find the first ones of all queues."""
SPAN: Final = timedelta(minutes=1)
"""After a time, in which messages are looked for first."""

_COLORS: Final = {"ok": "green-9", "warning": "orange-10", "problem": "red-9"}
_ICONS: Final = {"ok": "check_circle", "warning": "warning", "problem": "error"}


async def now(admin: Admin, _query: str) -> None:
    """Whether it can write, who lags, what fails; and the last hour."""
    found = ui.column().classes("w-full gap-1")
    with ui.grid().classes("w-full grid-cols-1 md:grid-cols-2"):
        charts = {title: ui.echart(SAMPLES.chart(title)).classes("h-52") for title in CHARTS}

    async def refresh() -> None:
        await SAMPLES.sample(admin)
        for title, chart in charts.items():
            chart.options.update(SAMPLES.chart(title))
            chart.update()
        results = [one async for one in admin.diagnose()]
        found.clear()
        with found:
            for one in results:
                with ui.row().classes("items-center no-wrap w-full"):
                    ui.icon(_ICONS[one.level], color=_COLORS[one.level], size="sm")
                    if one.page:
                        ui.link(f"{one.subject}: {one.text}", one.page)
                    else:
                        ui.label(f"{one.subject}: {one.text}")
                    if one.remedy:
                        ui.label(one.remedy).classes("text-grey-8 text-sm")

    await refresh()
    ui.timer(SAMPLE_S, reported(refresh))


async def transactions(admin: Admin, query: str) -> None:
    """Undecided transactions: search, check, decide."""

    async def load() -> None:
        found: list[PendingTransaction] = []
        async for one in admin.transactions(limit=TRANSACTIONS_MAX):
            found.append(one)
            if len(found) == PAGE_ROWS:  # the oldest, before the rest has come
                table.fill(tuple(found))
        table.fill(found)

    with ui.row():
        ui.button("Reload", icon="refresh", on_click=reported(load)).props("outline")
    table = SearchTable[PendingTransaction](
        {
            "Half message id": lambda one: one.half_message_id,
            "Age in s": lambda one: round(one.age),
            "Topic": lambda one: one.topic,
            "Keys": lambda one: one.keys,
            "Group": lambda one: one.group,
            "Producers": lambda one: "-" if one.producers is None else one.producers,
            "State": _state,
            "Checks": lambda one: one.checks_delivered,
        },
        empty="no transaction is undecided",
        on_open=lambda one: _open_transaction(admin, one.half_message_id, load),
        search=query,
        also=lambda one: one.transaction_id,
    )
    await load()


def _state(one: PendingTransaction) -> str:
    return f"{one.state} ({one.parked_reason})" if one.parked_reason else one.state


async def _open_transaction(admin: Admin, half_id: str, load: Any) -> None:
    try:
        one = await admin.transaction(half_id)
    except ClientError as error:
        ui.notify(str(error), type="negative")
        return
    if one is None:
        ui.notify("It is decided by now", type="info")
        return

    async def commit(reason: str) -> str:
        message_id = await admin.commit(half_id, reason=reason or None)
        await load()
        return f"committed; its message is {message_id}"

    async def roll_back(reason: str) -> str:
        await admin.rollback(half_id, reason=reason or None)
        await load()
        return "rolled back"

    async def resume(reason: str) -> str:
        await admin.resume(half_id, reason=reason or None)
        await load()
        return "its checks begin again"

    with ui.dialog(value=True) as dialog, ui.card().classes("min-w-96"):
        ui.label("Undecided transaction").classes("text-lg")
        facts(
            {
                "Half message id": one.half_message_id,
                "Transaction id": one.transaction_id,
                "State": _state(one),
                "Topic": one.topic,
                "Keys": one.keys or "-",
                "Group": one.group,
                "Messages": one.messages,
                "Prepared": one.prepared_at.isoformat(timespec="seconds"),
                "Owner": one.owner or "-",
                "Checks": f"{one.checks_sent} sent, {one.checks_delivered} delivered, "
                f"{one.checks_answered} answered",
                "Broker": one.broker_name,
            }
        )
        with ui.row():
            for text, word, action in (
                ("Commit", "commit", commit),
                ("Roll back", "roll back", roll_back),
                ("Resume" if one.parked_reason else "Check now", "check", resume),
            ):
                ui.button(
                    text,
                    on_click=lambda _event, text=text, word=word, action=action: confirm(
                        f"{text} {one.transaction_id}?", word, action, with_reason=True
                    ),
                ).props("outline")
            ui.button("Close", on_click=dialog.close).props("flat")


async def message(admin: Admin, query: str) -> None:
    """One box for a message id, a transaction id, a key or a time; and its life."""

    async def find() -> None:
        result.clear()
        text, name = box.value.strip(), topic.value.strip()
        with result:
            if not text:
                ui.label("Enter an id, a key or a time")
                return
            pending = await _pending(admin, text)
            for half in pending[:MESSAGES_MAX]:
                ui.label("An undecided transaction:")
                ui.link(half.half_message_id, f"/transactions?open={half.half_message_id}")
            topics = {name} if name else {o.name for o in await admin.topics() if not o.is_internal}
            found = await _found(admin, text, sorted(topics))
            if not found and not pending:
                where = f"topic {name}" if name else f"{len(topics)} topics"
                ui.label(f"Nothing in {where} has the id or key “{text}”, or was stored then")
            for each in found:
                await _life(admin, each)

    with ui.row().classes("items-center w-full"):
        box = ui.input("Id, key or time", value=query).classes("min-w-80").props("outlined dense")
        topic = ui.input("Topic", placeholder="all").props("outlined dense")
        ui.button("Find", icon="search", on_click=reported(find))
        box.on("keydown.enter", reported(find))
        topic.on("keydown.enter", reported(find))
    result = ui.column().classes("w-full")
    if query:
        await find()


async def _pending(admin: Admin, text: str) -> list[PendingTransaction]:
    """Return the undecided transactions with an id or a key."""
    try:
        one = await admin.transaction(text)
        if one is not None:
            return [one]
        waiting = admin.transactions(limit=TRANSACTIONS_MAX)
        return [one async for one in waiting if text in one.keys.split()]
    except UnsupportedRequestError:  # a broker of Apache RocketMQ
        return []


async def _found(admin: Admin, text: str, topics: Sequence[str]) -> list[ReceivedMessage]:
    """Return the messages with an id or a key; without any, those stored from a time on."""
    one = await admin.message(text)
    if one is not None and (topic := one.properties.get("REAL_TOPIC")):  # a half message
        one = await admin.message(one.message_id, topic) or one
    if one is not None:
        return [one]
    found: list[ReceivedMessage] = []
    for topic in topics:
        one = await admin.message(text, topic)
        found += [one] if one is not None else await admin.messages_with_key(topic, text)
    since = None if found else _time(text)
    if since is not None:
        for until in (since + SPAN, None):  # later ones only if none are found
            for topic in () if found else topics:
                found += await _first(admin.browse(topic, since=since, until=until))
    return sorted(found, key=lambda each: each.store_timestamp)[:MESSAGES_MAX]


async def _first(messages: AsyncGenerator[ReceivedMessage, None]) -> list[ReceivedMessage]:
    found: list[ReceivedMessage] = []
    async with aclosing(messages):
        async for one in messages:
            found.append(one)
            if len(found) == READ_MAX:
                break
    return found


def _time(text: str) -> datetime | None:
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat(text).astimezone()
    return None


def _shown(time: datetime) -> str:
    return time.isoformat(timespec="milliseconds")


async def _life(admin: Admin, message: ReceivedMessage) -> None:
    half_id = message.half_message_id
    half = None if half_id is None else await admin.message(half_id)
    with ui.card().classes("w-full"):
        facts(
            {
                "Topic": message.topic,
                "Message id": message.message_id,
                "Place": message.offset_message_id,
                "Queue": f"{message.queue.broker_name}:{message.queue.queue_id}, offset "
                f"{message.queue_offset}",
                "Keys": message.keys or "-",
                "Tags": message.tags or "-",
                **({} if half_id is None else {"Half message": half_id}),
                **({} if half is None else {"Prepared": _shown(half.store_timestamp)}),
                "Sent": _shown(message.born_timestamp),
                "Stored" if half_id is None else "Committed": _shown(message.store_timestamp),
            }
        )
        groups = await admin.consumption(message)
        if message.topic == "RMQ_SYS_TRANS_HALF_TOPIC":
            ui.label("No message of it was delivered: it is undecided, or was rolled back")
        elif not groups:
            ui.label(f"No group consumes topic {message.topic}")
        for one in groups:
            many = "s" * (one.attempts != 1)
            attempts = f", {one.attempts} failed attempt{many}" if one.attempts else ""
            ui.label(f"{one.group}: {one.fate}{attempts}")
        with ui.expansion("Body and properties").classes("w-full"):
            ui.code(body_of(message, 10_000)).classes("w-full")
            facts(message.properties)
