"""The pages' frame: navigation, sign-in, and how the console runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from nicegui import app, ui

from halfmq.client.admin import Admin
from halfmq.client.config import ClientConfig
from halfmq.client.errors import AccessDeniedError, ClientError

from .history import SAMPLE_S, SAMPLES
from .session import Sessions

Page = Callable[[Admin], Awaitable[None]]

PAGES: Final[dict[str, tuple[str, str]]] = {
    "/": ("Now", "monitor_heart"),
    "/transactions": ("Transactions", "rule"),
    "/message": ("Message", "mail"),
    "/topics": ("Topics", "topic"),
    "/groups": ("Groups", "groups"),
    "/dead-letters": ("Dead letters", "report"),
    "/delayed": ("Delayed", "schedule"),
    "/connections": ("Connections", "cable"),
    "/brokers": ("Brokers", "dns"),
    "/settings": ("Settings", "tune"),
    "/access": ("Access", "key"),
}
"""Path → title and icon, in the order of an incident."""

CONNECTED_S: Final = 60.0
"""Seconds for a browser to load the page's scripts."""

_STYLE: Final = """
.nicegui-link { color: var(--q-primary) }
.body--dark .nicegui-link { color: #8ec5ff }
@layer theme {
  .body--dark .q-btn.text-primary { color: #8ec5ff !important }
  .body--dark .text-grey-8 { color: #bdbdbd !important }
}
.q-field__focusable-action { opacity: 1 }
"""
"""Links, buttons and icons with enough contrast in both modes. What is important in NiceGUI's first
layer precedes what is so in the others."""

_HEAD: Final = """<script>
document.documentElement.lang = 'en';
new MutationObserver(() => {
  for (const title of document.querySelectorAll('th.sortable:not([tabindex])')) title.tabIndex = 0;
}).observe(document, {childList: true, subtree: true});
document.addEventListener('keydown', (event) => {
  if (event.key === 'Enter' && event.target.matches('th.sortable')) event.target.click();
});
</script>"""
"""Lists are sorted by the keyboard, too."""


class Console:
    """Registers pages, each in the same frame."""

    def __init__(self, config: ClientConfig) -> None:
        self.sessions = Sessions(config)
        ui.page("/sign-in", title="halfmq: sign in")(self._sign_in)
        app.on_shutdown(self.sessions.close)
        app.timer(SAMPLE_S, self._sample)

    async def _sample(self) -> None:
        """Go on with the charts while nobody looks, as the user who was signed in last."""
        admin = self.sessions.latest
        if admin is not None:
            with suppress(ClientError):
                await SAMPLES.sample(admin)

    def page(self, path: str, show: Callable[..., Awaitable[None]]) -> None:
        """Register ``show(admin, …)`` for a path; further arguments come from the query."""
        title, _ = PAGES[path]

        async def framed(q: str = "") -> None:
            try:
                admin = await self.sessions.admin()
            except ClientError as error:
                self._frame(path)
                ui.label(f"No broker answers: {error}").classes("text-lg text-negative")
                return
            if admin is None:
                ui.navigate.to("/sign-in")
                return
            self._frame(path)
            # The frame is shown at once; what the brokers tell comes when they do.
            await ui.context.client.connected(CONNECTED_S)
            try:
                await show(admin, q)
            except ClientError as error:
                ui.label(str(error)).classes("text-lg text-negative").props("role=alert")

        ui.page(path, title=f"halfmq: {title}")(framed)

    def _frame(self, path: str) -> None:
        ui.colors(primary="#1f5f8b")
        ui.add_css(_STYLE)
        ui.add_head_html(_HEAD)
        with ui.left_drawer(value=False).props(
            "show-if-above width=190 breakpoint=800 role=navigation"
        ) as drawer:
            for target, (title, icon) in PAGES.items():
                bold = "text-bold" if target == path else ""
                with ui.link(target=target).classes("no-underline w-full"), ui.row() as line:
                    line.classes("items-center gap-2 no-wrap")
                    ui.icon(icon)
                    ui.label(title).classes(bold)
        with ui.header().classes("items-center py-1"):
            ui.button(icon="menu", on_click=drawer.toggle).props("flat color=white aria-label=Menu")
            ui.label(f"halfmq · {PAGES[path][0]}").classes("text-lg").props(
                "role=heading aria-level=1"
            )
            ui.space()
            dark = ui.dark_mode(value=None)
            ui.button(icon="dark_mode", on_click=lambda: dark.set_value(not dark.value)).props(
                'flat color=white aria-label="Light or dark"'
            )
            if self.sessions.user:
                ui.button(f"Sign out {self.sessions.user}", on_click=self._sign_out).props(
                    "flat color=white"
                )

    async def _sign_out(self) -> None:
        await self.sessions.sign_out()
        ui.navigate.to("/sign-in")

    def _sign_in(self) -> None:
        async def enter() -> None:
            try:
                await self.sessions.sign_in(user.value, password.value)
            except AccessDeniedError:
                ui.notify("The broker refuses this user or password", type="negative")
            except ClientError as error:
                ui.notify(str(error), type="negative", multi_line=True)
            else:
                ui.navigate.to("/")

        with ui.card().classes("absolute-center min-w-80"):
            ui.label("halfmq").classes("text-2xl")
            ui.label("Sign in as a user of the broker")
            user = ui.input("User").classes("w-full").props("autofocus autocomplete=username")
            password = (
                ui.input("Password", password=True)
                .classes("w-full")
                .props("autocomplete=current-password")
                .on("keydown.enter", enter)
            )
            ui.button("Sign in", on_click=enter).classes("w-full")
