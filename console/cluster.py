"""Pages about connections, brokers, their settings and users."""

from __future__ import annotations

from nicegui import ui

from halfmq.client.admin import Admin
from halfmq.client.errors import UnsupportedRequestError

from .session import reported
from .widgets import Row, SearchTable, confirm


async def connections(admin: Admin, query: str) -> None:
    """Connected consumers and producers."""
    table = SearchTable(
        {
            "role": "Role",
            "group": "Group",
            "client": "Client id",
            "address": "Address",
            "filters": "Subscriptions",
            "state": "State",
        },
        empty="no client is connected",
        search=query,
    )
    table.fill(
        [
            {
                "key": f"{group.name}\n{member.client_id}",
                "role": "consumer",
                "group": group.name,
                "client": member.client_id,
                "address": member.address,
                "filters": ", ".join(
                    f"{name}: {text}" for name, text in sorted(member.filters.items())
                ),
                "state": "refused" if member.refused else "consumes",
            }
            for group in (await admin.connected_groups()).values()
            for member in group.members
        ]
        + [
            {
                "key": "\n".join(one),
                "role": "producer",
                "group": one.group,
                "client": one.client_id,
                "address": one.address,
                "filters": "",
                "state": f"sends to {one.broker_name}",
            }
            for one in await admin.producers()
        ]
    )


async def brokers(admin: Admin, query: str) -> None:
    """All figures of all brokers."""

    async def load() -> None:
        table.fill(
            [
                {"key": f"{name}\n{key}", "broker": name, "name": key, "value": value}
                for name, figures in (await admin.metrics()).items()
                for key, value in sorted(figures.items())
            ]
        )

    for one in await admin.broker_statuses():
        state = f"answers after {one.seconds * 1000:.0f} ms" if one.error is None else one.error
        ui.label(f"{one.name} at {one.address}: {state}")
    table = SearchTable(
        {"broker": "Broker", "name": "Figure", "value": "Value"},
        empty="no broker tells figures",
        search=query or "halfmq.",
    )
    await load()
    ui.timer(5.0, reported(load))


async def settings(admin: Admin, query: str) -> None:
    """Settings of all brokers; a click changes one."""

    async def load() -> None:
        table.fill(
            [
                {"key": f"{name}\n{key}", "broker": name, "name": key, **one._asdict()}
                for name, values in (await admin.described_settings()).items()
                for key, one in sorted(values.items())
            ]
        )

    def change(row: Row) -> None:
        async def act() -> None:
            dialog.close()
            await admin.change_setting(row["name"], value.value)
            ui.notify(f"{row['name']}={value.value}", type="positive")
            await load()

        with ui.dialog(value=True) as dialog, ui.card().classes("min-w-80"):
            ui.label(f"{row['name']} of all brokers").classes("text-lg")
            value = ui.input("Value", value=row["value"]).classes("w-full")
            with ui.row():
                ui.button("Change", on_click=reported(act))
                ui.button("Cancel", on_click=dialog.close).props("flat")

    table = SearchTable(
        {
            "name": "Setting",
            "value": "Value",
            "change": "Change",
            "source": "Source",
            "broker": "Broker",
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

    async def load() -> None:
        entries = {acl.subject: acl.entries for acl in await admin.acls()}
        table.fill(
            [
                {
                    "key": user.name,
                    "type": "super" if user.is_super else "normal",
                    "status": "enabled" if user.enabled else "disabled",
                    "entries": "; ".join(
                        f"{'' if one.allow else 'not '}{','.join(one.actions)} on {one.resource}"
                        for one in entries.get(f"User:{user.name}", ())
                    ),
                }
                for user in await admin.users()
            ]
        )

    async def create() -> None:
        await admin.create_user(name.value, password.value)
        ui.notify(f"created user {name.value}", type="positive")
        name.value = password.value = ""
        await load()

    def toggle(row: Row) -> None:
        enabled = row["status"] != "enabled"

        async def act(_reason: str) -> str:
            await admin.update_user(row["key"], enabled=enabled)
            await load()
            return f"{'enabled' if enabled else 'disabled'} {row['key']}"

        confirm(f"{'Enable' if enabled else 'Disable'} user {row['key']}?", row["key"], act)

    with ui.row().classes("items-center"):
        name = ui.input("New user").props("outlined dense")
        password = ui.input("Password", password=True).props("outlined dense")
        ui.button("Create", on_click=reported(create)).props("outline")
    table = SearchTable(
        {"key": "User", "type": "Type", "status": "Status", "entries": "Permissions"},
        empty="there are no users" if not users else "no user",
        on_open=toggle,
        search=query,
    )
    await load()
