"""Access for tests to the private parts of clients.

A client shows its user messages and results. It has no door to its connections and background
tasks, which tests end at moments that no user can hit. They get them here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from halfmq.client import Consumer, Producer, TransactionProducer
from halfmq.client.net.session import Session


def session_of(client: Producer | Consumer) -> Session:
    """Return the connections, routes and heartbeats of a client."""
    return client._session


def tasks_of(client: TransactionProducer | Consumer) -> Collection[asyncio.Task[None]]:
    """Return the background tasks that a client has now."""
    return list(client._assigned._tasks if isinstance(client, Consumer) else client._tasks)
