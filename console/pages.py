"""All pages of the console."""

from __future__ import annotations

from . import cluster, incident, objects
from .app import Console


def register(console: Console) -> None:
    """Register every page."""
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
