"""Pages about topics, groups, dead letters and delayed messages."""

from __future__ import annotations

from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, Final

from nicegui import ui

from halfmq.client.admin import Admin
from halfmq.client.message import Message, ReceivedMessage
from halfmq.client.producer import Producer

from .session import reported
from .widgets import Row, SearchTable, confirm, facts

MESSAGES_SHOWN: Final = 50
"""Latest messages of each queue in the viewer."""
LETTERS_SHOWN: Final = 5_000


async def topics(admin: Admin, query: str) -> None:
    """Topics: list, messages, send, create, change, delete."""

    async def load() -> None:
        rows = []
        for one in await admin.topics():
            if one.is_internal and not internal.value:
                continue
            stored = await admin.queues(one.name)
            rows.append(
                {
                    "key": f"{one.name}@{one.broker_name}",
                    "name": one.name,
                    "broker": one.broker_name,
                    "queues": one.write_queues,
                    "messages": sum(queue.end - queue.first for queue in stored),
                    "access": "/".join(["read"] * one.readable + ["write"] * one.writable) or "-",
                    "groups": ", ".join(await admin.groups_of(one.name)),
                }
            )
        table.fill(rows)

    async def create() -> None:
        await admin.create_topic(name.value, queues=int(queues.value))
        ui.notify(f"created topic {name.value}", type="positive")
        await load()

    with ui.row().classes("items-center"):
        name = ui.input("New topic").props("outlined dense")
        queues = ui.number("Queues", value=4, min=1, max=1024, precision=0).props("outlined dense")
        ui.button("Create", on_click=reported(create)).props("outline")
        internal = ui.checkbox("Internal topics, too", on_change=reported(load))
    table = SearchTable(
        {
            "name": "Topic",
            "broker": "Broker",
            "queues": "Queues",
            "messages": "Messages",
            "access": "Access",
            "groups": "Groups",
        },
        empty="there is no topic",
        on_open=lambda row: _open_topic(admin, row["name"], load),
        search=query,
    )
    await load()


async def _open_topic(admin: Admin, topic: str, load: Any) -> None:
    async def fill() -> None:
        found: list[ReceivedMessage] = []
        async with aclosing(admin.browse(topic, latest=MESSAGES_SHOWN)) as messages:
            found = [one async for one in messages]
        found.sort(key=lambda one: one.store_timestamp, reverse=True)
        table.fill([_message_row(one) for one in found])

    async def send() -> None:
        async with Producer("halfmq-console", config=admin.config) as producer:
            result = await producer.send(Message(topic, body.value.encode(), keys=keys.value))
        ui.notify(f"sent {result.message_id}", type="positive")
        await fill()

    async def delete(_reason: str) -> str:
        await admin.delete_topic(topic)
        dialog.close()
        await load()
        return f"deleted topic {topic}"

    now = next(one for one in await admin.topics() if one.name == topic)

    async def change() -> None:
        count = int(queues.value)
        await admin.create_topic(
            topic,
            queues=count,
            read_queues=max(count, now.read_queues),
            readable=readable.value,
            writable=writable.value,
        )
        ui.notify(f"changed topic {topic}", type="positive")
        await load()

    with ui.dialog(value=True).props("full-width") as dialog, ui.card().classes("w-full"):
        with ui.row().classes("items-center w-full"):
            ui.label(topic).classes("text-lg")
            live = ui.switch("Follow")
            ui.space()
            ui.button(
                "Delete", on_click=lambda: confirm(f"Delete topic {topic}?", topic, delete)
            ).props("outline color=negative")
            ui.button("Close", on_click=dialog.close).props("flat")
        with ui.row().classes("items-center"):
            queues = ui.number("Queues", value=now.write_queues, min=1, max=1024, precision=0)
            queues.props("outlined dense")
            readable = ui.checkbox("Consumers may read", value=now.readable)
            writable = ui.checkbox("Producers may send", value=now.writable)
            ui.button("Change", on_click=reported(change)).props("outline")
        with ui.row().classes("items-center"):
            body = ui.input("Body").props("outlined dense")
            keys = ui.input("Keys").props("outlined dense")
            ui.button("Send", on_click=reported(send)).props("outline")
        table = SearchTable(
            {
                "stored": "Stored",
                "place": "Queue and offset",
                "tags": "Tags",
                "keys": "Keys",
                "body": "Body",
            },
            empty="it has no messages",
            on_open=lambda row: ui.navigate.to(f"/message?q={row['place_id']}"),
        )
        await fill()
        timer = ui.timer(1.0, reported(fill), active=False)
        live.bind_value_to(timer, "active")
        dialog.on("hide", timer.cancel)


def _message_row(one: ReceivedMessage) -> Row:
    return {
        "key": one.offset_message_id,
        "place_id": one.offset_message_id,
        "stored": one.store_timestamp.isoformat(timespec="milliseconds"),
        "place": f"{one.queue.broker_name}:{one.queue.queue_id} / {one.queue_offset}",
        "tags": one.tags,
        "keys": one.keys,
        "body": one.record.body[:200].decode(errors="replace"),
    }


async def groups(admin: Admin, query: str) -> None:
    """Groups: members, lag, reset with a preview."""

    async def load() -> None:
        connected = await admin.connected_groups()
        rows = []
        for name in await admin.group_names():
            lag, group = await admin.lag(name), connected.get(name)
            unequal = group is not None and group.unequal_topics
            rows.append(
                {
                    "key": name,
                    "members": lag.members,
                    "lag": lag.messages,
                    "seconds": round(lag.seconds),
                    "topics": ", ".join(one.topic for one in lag.topics),
                    "subscriptions": "UNEQUAL" if unequal else "equal" if group else "-",
                }
            )
        table.fill(rows)

    ui.button("Reload", icon="refresh", on_click=reported(load)).props("outline")
    table = SearchTable(
        {
            "key": "Group",
            "members": "Members",
            "lag": "Lag",
            "seconds": "Lag in s",
            "topics": "Topics",
            "subscriptions": "Subscriptions",
        },
        empty="there is no consumer group",
        on_open=lambda row: _open_group(admin, row["key"], load),
        search=query,
    )
    await load()


async def _open_group(admin: Admin, group: str, load: Any) -> None:
    lag = await admin.lag(group)
    members = await admin.connected_groups(group)

    async def position() -> Any:
        if to.value in ("first", "last"):
            return to.value
        return datetime.fromisoformat(at.value).astimezone()

    async def preview() -> None:
        offsets = {one.queue: one.offset for one in await admin.offsets(group, topic.value)}
        targets = await admin.offsets_at(topic.value, await position())
        shown.clear()
        with shown:
            for queue, target in targets.items():
                before = offsets.get(queue, "-")
                ui.label(f"{queue.broker_name}:{queue.queue_id}: {before} → {target}")
            ui.button(
                "Reset", on_click=lambda: confirm(f"Reset group {group}?", group, reset)
            ).props("outline color=negative")

    async def reset(_reason: str) -> str:
        await admin.reset_offsets(group, topic.value, await position())
        await load()
        return f"reset group {group}"

    with ui.dialog(value=True) as dialog, ui.card().classes("min-w-96"):
        ui.label(group).classes("text-lg")
        facts({one.topic: f"lag {one.messages}, {one.seconds:.0f} s" for one in lag.topics})
        for one in (member for each in members.values() for member in each.members):
            ui.label(f"{one.client_id} at {one.address}" + (" (refused)" if one.refused else ""))
        if lag.topics:
            names = [one.topic for one in lag.topics]
            with ui.row().classes("items-center"):
                topic = ui.select(names, value=names[0], label="Topic")
                to = ui.select(["first", "last", "time"], value="last", label="Continue at")
                at = ui.input("Time", value=f"{datetime.now(UTC):%Y-%m-%dT%H:%MZ}")
                at.bind_visibility_from(to, "value", value="time")
                ui.button("Preview", on_click=reported(preview)).props("outline")
        shown = ui.column()
        ui.button("Close", on_click=dialog.close).props("flat")


async def dead_letters(admin: Admin, query: str) -> None:
    """Dead letters by group and cause; send them again."""

    async def load() -> None:
        rows = []
        for group in await admin.dead_letter_groups():
            rows += [
                {
                    "key": f"{group}\n{one.cause}",
                    "group": group,
                    "cause": one.cause,
                    "count": one.count,
                    "first": one.first.isoformat(timespec="seconds"),
                    "last": one.last.isoformat(timespec="seconds"),
                }
                for one in await admin.dead_letter_causes(group)
            ]
        table.fill(rows)

    async def open_cause(row: Row) -> None:
        group, cause = row["group"], row["cause"]

        async def redrive(_reason: str) -> str:
            result = await admin.redrive(group, cause=cause)
            failed = f", {len(result.failures)} failed" if result.failures else ""
            return f"sent {result.sent}{failed}"

        with ui.dialog(value=True).props("full-width") as dialog, ui.card().classes("w-full"):
            ui.label(f"{group}: {cause}").classes("text-lg")
            letters = SearchTable(
                {"died": "Died", "topic": "Topic", "keys": "Keys", "attempts": "Attempts"},
                empty="it has no dead letters",
                on_open=lambda one: ui.navigate.to(f"/message?q={one['key']}"),
            )
            rows: list[Row] = []
            async with aclosing(admin.dead_letters(group, cause=cause)) as found:
                async for one in found:
                    rows.append(
                        {
                            "key": one.offset_message_id,
                            "died": one.died_at.isoformat(timespec="seconds"),
                            "topic": one.topic,
                            "keys": one.keys,
                            "attempts": one.attempts,
                        }
                    )
                    if len(rows) == LETTERS_SHOWN:
                        break
            letters.fill(rows)
            with ui.row():
                ui.button(
                    "Send again",
                    on_click=lambda: confirm(
                        f"Send {row['count']} letters to their topics again?", group, redrive
                    ),
                ).props("outline")
                ui.button("Close", on_click=dialog.close).props("flat")

    table = SearchTable(
        {"group": "Group", "cause": "Cause", "count": "Letters", "first": "First", "last": "Last"},
        empty="no group has dead letters",
        on_open=reported(open_cause),
        search=query,
    )
    await load()


async def delayed(admin: Admin, query: str) -> None:
    """Messages that wait for their time of delivery; cancel one."""

    async def load() -> None:
        table.fill(
            [
                {
                    "key": one.recall_handle,
                    "at": one.deliver_at.isoformat(timespec="milliseconds"),
                    "topic": one.topic,
                    "keys": one.keys,
                    "id": one.message_id,
                    "broker": one.broker_name,
                }
                for one in await admin.delayed()
            ]
        )

    def cancel(row: Row) -> None:
        async def act(_reason: str) -> str:
            await admin.cancel_delayed(row["key"])
            await load()
            return "cancelled: nobody gets it"

        confirm(f"Cancel message {row['id']} of topic {row['topic']}?", "cancel", act)

    table = SearchTable(
        {
            "at": "Delivery",
            "topic": "Topic",
            "keys": "Keys",
            "id": "Message id",
            "broker": "Broker",
        },
        empty="no message waits for its time of delivery",
        on_open=cancel,
        search=query,
    )
    await load()
