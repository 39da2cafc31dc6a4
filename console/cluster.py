"""Pages about connections, brokers, their settings and users."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from operator import itemgetter
from typing import Final

from nicegui import ui

from halfmq.client.access import AclEntry, User
from halfmq.client.admin import Admin
from halfmq.client.administration.settings import BrokerSetting, BrokerStatus
from halfmq.client.errors import UnsupportedRequestError

from .session import reported
from .widgets import SearchTable, confirm, facts

ACTIONS: Final = ("Pub", "Sub", "Create", "Update", "Delete", "Get", "List", "All")
"""What a permission may be for."""
LIMITS_SHOWN: Final = 5
"""Limits that are nearest to their ends."""


async def connections(admin: Admin, query: str) -> None:
    """Connected consumers and producers."""
    table = SearchTable[tuple[str, ...]](
        {
            title: itemgetter(number)
            for number, title in enumerate(
                ("Role", "Group", "Client id", "Address", "Subscriptions", "State")
            )
        },
        empty="no client is connected",
        search=query,
    )
    consumers = [
        (
            *("consumer", group.name, member.client_id, member.address),
            ", ".join(f"{name}: {text}" for name, text in sorted(member.filters.items())),
            "refused" if member.refused else "consumes",
        )
        for group in (await admin.connected_groups()).values()
        for member in group.members
    ]
    producers = [
        ("producer", one.group, one.client_id, one.address, "", f"sends to {one.broker_name}")
        for one in await admin.producers()
    ]
    table.fill([*consumers, *producers])


async def brokers(admin: Admin, query: str) -> None:
    """All figures of all brokers."""

    async def load() -> None:
        statuses = await admin.broker_statuses()
        overview.clear()
        with overview:
            for one in statuses:
                ui.label(f"{one.name} at {one.address}").classes("text-lg")
                facts(_overview(one))
        table.fill(
            [
                (one.name, key, value)
                for one in statuses
                for key, value in sorted(one.metrics.items())
            ]
        )

    overview = ui.column().classes("w-full")
    table = SearchTable[tuple[str, str, str]](
        {"Broker": itemgetter(0), "Figure": itemgetter(1), "Value": itemgetter(2)},
        empty="no broker tells figures",
        search=query,
    )
    await load()
    ui.timer(5.0, reported(load))


def _overview(broker: BrokerStatus) -> dict[str, object]:
    """Return the state of a broker, of its log, flush, disk and limits."""
    if broker.error is not None:
        return {"State": broker.error}
    figures = broker.metrics
    first, end = (int(figures.get(f"commitLog{name}Offset", 0)) for name in ("Min", "Max"))
    ratio = round(100 * float(figures.get("commitLogDiskRatio", 0)))
    refused = figures.get("halfmq.refuses_messages")
    used = {
        key.split(".")[2]: (int(value), int(figures[key.removesuffix("used") + "most"]))
        for key, value in figures.items()
        if key.startswith("halfmq.limits.") and key.endswith(".used")
    }
    nearest = sorted(used, key=lambda name: -used[name][0] / used[name][1])[:LIMITS_SHOWN]
    return {
        "State": f"refuses messages: {refused}" if refused else "answers",
        "Log": f"{end - first} bytes, from offset {first} to {end}",
        "Flush": f"{figures.get('remainHowManyDataToFlush', '-')} are not on disk yet",
        "Disk": f"{figures.get('halfmq.disk.used_percent', ratio)} % in use",
        "Limits": "; ".join(f"{name}: {used[name][0]} of {used[name][1]}" for name in nearest)
        or "the broker tells none",
    }


async def settings(admin: Admin, query: str) -> None:
    """Settings of all brokers; a click changes one."""

    async def load() -> None:
        table.fill(
            [
                (name, key, one)
                for name, values in (await admin.described_settings()).items()
                for key, one in sorted(values.items())
            ]
        )

    def change(setting: tuple[str, str, BrokerSetting]) -> None:
        _broker, key, now = setting

        async def act() -> None:
            dialog.close()
            await admin.change_setting(key, value.value)
            ui.notify(f"{key}={value.value}", type="positive")
            await load()

        with ui.dialog(value=True) as dialog, ui.card().classes("min-w-80"):
            ui.label(f"{key} of all brokers").classes("text-lg")
            value = ui.input("Value", value=now.value).classes("w-full")
            with ui.row():
                ui.button("Change", on_click=reported(act))
                ui.button("Cancel", on_click=dialog.close).props("flat")

    table = SearchTable[tuple[str, str, BrokerSetting]](
        {
            "Setting": itemgetter(1),
            "Value": lambda one: one[2].value,
            "Change": lambda one: one[2].change,
            "Source": lambda one: one[2].source,
            "Broker": itemgetter(0),
        },
        empty="no broker tells settings",
        on_open=change,
        search=query,
    )
    await load()


async def access(admin: Admin, query: str) -> None:
    """Users and their permissions."""
    try:
        users = await admin.users()
    except UnsupportedRequestError:
        ui.label("The broker has no users: authenticationEnabled turns access control on")
        return

    permissions: dict[str, str] = {}

    async def load() -> None:
        permissions.clear()
        for acl in await admin.acls():
            permissions[acl.subject.removeprefix("User:")] = "; ".join(
                f"{'' if one.allow else 'not '}{','.join(one.actions)} on {one.resource}"
                for one in acl.entries
            )
        table.fill(await admin.users())

    async def create() -> None:
        await admin.create_user(name.value, password.value)
        ui.notify(f"created user {name.value}", type="positive")
        name.value = password.value = ""
        await load()

    with ui.row().classes("items-center"):
        name = ui.input("New user").props("outlined dense")
        password = ui.input("Password", password=True).props("outlined dense")
        ui.button("Create", on_click=reported(create)).props("outline")
    table = SearchTable[User](
        {
            "User": lambda one: one.name,
            "Type": lambda one: "super" if one.is_super else "normal",
            "Status": lambda one: "enabled" if one.enabled else "disabled",
            "Permissions": lambda one: permissions.get(one.name, ""),
        },
        empty="there are no users" if not users else "no user",
        on_open=reported(lambda user: _open_user(admin, user, load)),
        search=query,
    )
    await load()


async def _open_user(admin: Admin, user: User, load: Callable[[], Awaitable[None]]) -> None:
    word = "disable" if user.enabled else "enable"

    async def fill() -> None:
        acl = await admin.acl(user.name)
        table.fill([] if acl is None else acl.entries)
        await load()

    async def toggle(_reason: str) -> str:
        await admin.update_user(user.name, enabled=not user.enabled)
        dialog.close()
        await load()
        return f"{word}d {user.name}"

    async def save(_reason: str) -> str:
        entry = AclEntry(
            resource=resource.value,
            actions=actions.value,
            allow=decision.value == "allow",
            sources=[one.strip() for one in sources.value.split(",") if one.strip()],
        )
        await admin.create_acl(user.name, entry)
        await fill()
        return f"{user.name}: {decision.value} {', '.join(entry.actions)} on {entry.resource}"

    def remove(entry: AclEntry) -> None:
        async def act(_reason: str) -> str:
            await admin.delete_acl(user.name, entry.resource, entry.policy_type)
            await fill()
            return f"{user.name} has no entry for {entry.resource}"

        title = f"Delete the permissions of {user.name} on {entry.resource}?"
        confirm(title, user.name, act)

    with ui.dialog(value=True).props("full-width") as dialog, ui.card().classes("w-full"):
        with ui.row().classes("items-center w-full"):
            ui.label(f"User {user.name}").classes("text-lg")
            ui.space()
            ui.button(
                word,
                on_click=lambda: confirm(f"{word.title()} user {user.name}?", user.name, toggle),
            ).props("outline color=negative")
            ui.button("Close", on_click=dialog.close).props("flat")
        with ui.row().classes("items-center"):
            resource = ui.input("Resource", placeholder="Topic:orders").props("outlined dense")
            actions = ui.select(list(ACTIONS), multiple=True, value=[], label="Actions")
            actions.classes("min-w-40").props("outlined dense")
            decision = ui.select(["allow", "deny"], value="allow", label="Decision")
            sources = ui.input("From addresses", placeholder="anywhere").props("outlined dense")
            ui.button(
                "Set",
                on_click=lambda: confirm(
                    f"{decision.value.title()} {', '.join(actions.value)} on {resource.value}? "
                    "It replaces what the user has on this resource",
                    user.name,
                    save,
                ),
            ).props("outline")
        table = SearchTable[AclEntry](
            {
                "Resource": lambda one: one.resource,
                "Actions": lambda one: ", ".join(one.actions),
                "Decision": lambda one: "allow" if one.allow else "deny",
                "From": lambda one: ", ".join(one.sources) or "anywhere",
                "Policy": lambda one: one.policy_type,
            },
            empty="the user has no permissions",
            on_open=remove,
        )
        await fill()
