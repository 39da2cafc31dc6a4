"""Sign-in: the Admin of each browser, with the credentials of its user."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Final

from nicegui import app, ui

from halfmq.client.admin import Admin
from halfmq.client.config import ClientConfig
from halfmq.client.errors import AccessDeniedError, ClientError

SESSIONS_MAX: Final = 64
"""Browsers that are signed in; the one that was idle longest is signed out for the next."""
IDLE_S_MAX: Final = 8 * 3600.0
"""Seconds after which an idle browser is signed out."""


@dataclass
class _Session:
    admin: Admin
    user: str
    used: float = field(default_factory=time.monotonic)


class Sessions:
    """The signed-in browsers."""

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self._by_browser: OrderedDict[str, _Session] = OrderedDict()

    async def sign_in(self, user: str, password: str) -> None:
        """Sign this browser in; an empty user for a broker without access control.

        Raises:
            ClientError: The broker refuses the user, or cannot be reached.
        """
        config = replace(self._config, access_key=user or None, secret_key=password or None)
        admin = Admin(config=config)
        await admin.start()
        try:
            await admin.metrics()
        except BaseException:
            await admin.close()
            raise
        await self.sign_out()
        while len(self._by_browser) >= SESSIONS_MAX:
            _, oldest = self._by_browser.popitem(last=False)
            await oldest.admin.close()
        self._by_browser[_browser()] = _Session(admin, user)

    async def sign_out(self) -> None:
        """Forget this browser's credentials."""
        session = self._by_browser.pop(_browser(), None)
        if session is not None:
            await session.admin.close()

    async def admin(self) -> Admin | None:
        """Return this browser's client; None if it must sign in."""
        session = self._by_browser.get(_browser())
        if session is not None and time.monotonic() - session.used > IDLE_S_MAX:
            await self.sign_out()
            session = None
        if session is None:
            try:
                await self.sign_in("", "")
            except AccessDeniedError:
                return None
            session = self._by_browser[_browser()]
        session.used = time.monotonic()
        self._by_browser.move_to_end(_browser())
        return session.admin

    @property
    def user(self) -> str:
        """The user of this browser; empty without access control."""
        session = self._by_browser.get(_browser())
        return "" if session is None else session.user

    @property
    def latest(self) -> Admin | None:
        """The client of the browser that was used last; None if nobody is signed in."""
        return next((one.admin for one in reversed(self._by_browser.values())), None)

    async def close(self) -> None:
        """Close all clients."""
        while self._by_browser:
            await self._by_browser.popitem()[1].admin.close()


def _browser() -> str:
    return str(app.storage.browser["id"])


def reported(action: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return the action with a refusal or a lost broker shown as a notification."""

    @wraps(action)
    async def run(*arguments: Any, **more: Any) -> Any:
        try:
            return await action(*arguments, **more)
        except ClientError as error:
            ui.notify(str(error), type="negative", multi_line=True, close_button="Close")
            return None

    return run
