"""Pages about topics, groups, dead letters and delayed messages."""

from __future__ import annotations

from contextlib import aclosing
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any, Final

from nicegui import ui

from halfmq.client.admin import Admin, DelayedMessage, Topic
from halfmq.client.administration.dead_letters import DeadLetter, DeadLetterCause
from halfmq.client.administration.groups import ConsumerGroup
from halfmq.client.administration.progress import GroupLag
from halfmq.client.message import Message, ReceivedMessage
from halfmq.client.producer import Producer

from .session import reported
from .widgets import SearchTable, body_of, confirm, facts

MESSAGES_SHOWN: Final = 50
"""Latest messages of each queue in the viewer."""
LETTERS_SHOWN: Final = 5_000


async def topics(admin: Admin, query: str) -> None:
    """Topics: list, messages, send, create, change, delete."""

    async def load() -> None:
        found = []
        for one in await admin.topics():
            if internal.value or not one.is_internal:
                stored = sum(queue.end - queue.first for queue in await admin.queues(one.name))
                found.append((one, stored, ", ".join(await admin.groups_of(one.name))))
        table.fill(found)

    async def create() -> None:
        await admin.create_topic(name.value, queues=int(queues.value))
        ui.notify(f"created topic {name.value}", type="positive")
        await load()

    with ui.row().classes("items-center"):
        name = ui.input("New topic").props("outlined dense")
        queues = ui.number("Queues", value=4, min=1, max=1024, precision=0).props("outlined dense")
        ui.button("Create", on_click=reported(create)).props("outline")
        internal = ui.checkbox("Internal topics, too", on_change=reported(load))
    table = SearchTable[tuple[Topic, int, str]](
        {
            "Topic": lambda one: one[0].name,
            "Broker": lambda one: one[0].broker_name,
            "Queues": lambda one: one[0].write_queues,
            "Messages": itemgetter(1),
            "Access": lambda one: (
                "/".join(["read"] * one[0].readable + ["write"] * one[0].writable) or "-"
            ),
            "Groups": itemgetter(2),
        },
        empty="there is no topic",
        on_open=lambda one: _open_topic(admin, one[0].name, load),
        search=query,
    )
    await load()


async def _open_topic(admin: Admin, topic: str, load: Any) -> None:
    async def fill() -> None:
        async with aclosing(admin.browse(topic, latest=MESSAGES_SHOWN)) as messages:
            found = [one async for one in messages]
        table.fill(sorted(found, key=lambda one: one.store_timestamp, reverse=True))

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
        table = SearchTable[ReceivedMessage](
            {
                "Stored": lambda one: one.store_timestamp.isoformat(timespec="milliseconds"),
                "Queue and offset": lambda one: (
                    f"{one.queue.broker_name}:{one.queue.queue_id} / {one.queue_offset}"
                ),
                "Tags": lambda one: one.tags,
                "Keys": lambda one: one.keys,
                "Body": lambda one: body_of(one, 200),
            },
            empty="it has no messages",
            on_open=lambda one: ui.navigate.to(f"/message?q={one.offset_message_id}"),
            also=lambda one: one.offset_message_id,
        )
        await fill()
        timer = ui.timer(1.0, reported(fill), active=False)
        live.bind_value_to(timer, "active")
        dialog.on("hide", timer.cancel)


async def groups(admin: Admin, query: str) -> None:
    """Groups: members, lag, reset with a preview."""
    connected: dict[str, ConsumerGroup] = {}

    async def load() -> None:
        connected.clear()
        connected.update(await admin.connected_groups())
        table.fill([await admin.lag(name) for name in await admin.group_names()])

    def subscriptions(one: GroupLag) -> str:
        group = connected.get(one.group)
        return "-" if group is None else "UNEQUAL" if group.unequal_topics else "equal"

    ui.button("Reload", icon="refresh", on_click=reported(load)).props("outline")
    table = SearchTable[GroupLag](
        {
            "Group": lambda one: one.group,
            "Members": lambda one: one.members,
            "Lag": lambda one: one.messages,
            "Lag in s": lambda one: round(one.seconds),
            "Topics": lambda one: ", ".join(topic.topic for topic in one.topics),
            "Subscriptions": subscriptions,
        },
        empty="there is no consumer group",
        on_open=lambda one: _open_group(admin, one.group, load),
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
            names = sorted((one.topic for one in lag.topics), key=lambda one: (one[0] == "%", one))
            with ui.row().classes("items-center"):
                topic = ui.select(names, value=names[0], label="Topic")
                to = ui.select(["first", "last", "time"], value="last", label="Continue at")
                to.classes("min-w-28")
                at = ui.input("Time", value=f"{datetime.now(UTC):%Y-%m-%dT%H:%MZ}")
                at.bind_visibility_from(to, "value", value="time")
                ui.button("Preview", on_click=reported(preview)).props("outline")
        shown = ui.column()
        ui.button("Close", on_click=dialog.close).props("flat")


async def dead_letters(admin: Admin, query: str) -> None:
    """Dead letters by group and cause; send them again."""

    async def load() -> None:
        table.fill(
            [
                (group, cause)
                for group in await admin.dead_letter_groups()
                for cause in await admin.dead_letter_causes(group)
            ]
        )

    async def open_cause(of_group: tuple[str, DeadLetterCause]) -> None:
        group, cause, count = of_group[0], of_group[1].cause, of_group[1].count

        async def redrive(_reason: str) -> str:
            result = await admin.redrive(group, cause=cause)
            failed = f", {len(result.failures)} failed" if result.failures else ""
            return f"sent {result.sent}{failed}"

        with ui.dialog(value=True).props("full-width") as dialog, ui.card().classes("w-full"):
            ui.label(f"{group}: {cause}").classes("text-lg")
            letters = SearchTable[DeadLetter](
                {
                    "Died": lambda one: one.died_at.isoformat(timespec="seconds"),
                    "Topic": lambda one: one.topic,
                    "Keys": lambda one: one.keys,
                    "Attempts": lambda one: one.attempts,
                },
                empty="it has no dead letters",
                on_open=lambda one: ui.navigate.to(f"/message?q={one.offset_message_id}"),
                also=lambda one: one.offset_message_id,
            )
            shown: list[DeadLetter] = []
            async with aclosing(admin.dead_letters(group, cause=cause)) as found:
                async for one in found:
                    shown.append(one)
                    if len(shown) == LETTERS_SHOWN:
                        break
            letters.fill(shown)
            with ui.row():
                ui.button(
                    "Send again",
                    on_click=lambda: confirm(
                        f"Send {count} letters to their topics again?", group, redrive
                    ),
                ).props("outline")
                ui.button("Close", on_click=dialog.close).props("flat")

    table = SearchTable[tuple[str, DeadLetterCause]](
        {
            "Group": itemgetter(0),
            "Cause": lambda one: one[1].cause,
            "Letters": lambda one: one[1].count,
            "First": lambda one: one[1].first.isoformat(timespec="seconds"),
            "Last": lambda one: one[1].last.isoformat(timespec="seconds"),
        },
        empty="no group has dead letters",
        on_open=reported(open_cause),
        search=query,
    )
    await load()


async def delayed(admin: Admin, query: str) -> None:
    """Messages that wait for their delivery; cancel one."""

    async def load() -> None:
        table.fill(await admin.delayed())

    def cancel(one: DelayedMessage) -> None:
        async def act(_reason: str) -> str:
            await admin.cancel_delayed(one.recall_handle)
            await load()
            return "cancelled: nobody gets it"

        confirm(f"Cancel message {one.message_id} of topic {one.topic}?", "cancel", act)

    table = SearchTable[DelayedMessage](
        {
            "Delivery": lambda one: one.deliver_at.isoformat(timespec="milliseconds"),
            "Topic": lambda one: one.topic,
            "Keys": lambda one: one.keys,
            "Message id": lambda one: one.message_id,
            "Broker": lambda one: one.broker_name,
        },
        empty="no message waits for its delivery",
        on_open=cancel,
        search=query,
        also=lambda one: one.recall_handle,
    )
    await load()
