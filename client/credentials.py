"""Credentials with which a client signs requests; no error and no ``repr`` shows the secret."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from .errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Credentials:
    """An access key and its secret; for users of RocketMQ 5.3, user name and password.

    Raises:
        ConfigurationError: One of them is empty or not text.
    """

    access_key: str
    secret_key: str = field(repr=False)

    def __post_init__(self) -> None:
        for name in ("access_key", "secret_key"):
            value: object = getattr(self, name)
            if not isinstance(value, str) or not value:
                shown = value if name == "access_key" else f"({type(value).__name__}, not shown)"
                raise ConfigurationError(name, shown, "a text that is not empty")


CredentialsSource: TypeAlias = Callable[[], Credentials | Awaitable[Credentials]]
"""Returns the current credentials. A plain function runs in a worker thread, so it may block."""
