"""The console: all its pages, and the process that serves them."""

from __future__ import annotations

import secrets

from nicegui import ui

from halfmq.client.config import ClientConfig

from . import cluster, incident, objects
from .app import Console


def run(config: ClientConfig, *, host: str, port: int) -> None:
    """Serve the console until a signal ends it."""
    _register(Console(config))
    ui.run(
        host=host,
        port=port,
        title="halfmq",
        reload=False,
        show=False,
        favicon="📨",
        storage_secret=secrets.token_hex(16),
        uvicorn_logging_level="warning",
        show_welcome_message=False,
    )


def _register(console: Console) -> None:
    console.page("/", incident.now)
    console.page("/transactions", incident.transactions)
    console.page("/message", incident.message)
    console.page("/topics", objects.topics)
    console.page("/groups", objects.groups)
    console.page("/dead-letters", objects.dead_letters)
    console.page("/delayed", objects.delayed)
    console.page("/connections", cluster.connections)
    console.page("/brokers", cluster.brokers)
    console.page("/settings", cluster.settings)
    console.page("/access", cluster.access)
