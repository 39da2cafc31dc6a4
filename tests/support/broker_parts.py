"""Access for tests to the private parts of a broker.

Users need no access to them, so a broker has none. Tests compare its tables and its store with the
answers that clients got. They get the parts here, and use no private name of the broker elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

from halfmq.broker.access.build import AccessSetup
from halfmq.broker.delay.delivery import DelayService
from halfmq.broker.delay.waiting import PENDING
from halfmq.broker.net.connection import ClientConnection
from halfmq.broker.net.reply_release import ReplyRelease
from halfmq.broker.net.router import Router
from halfmq.broker.service import Broker
from halfmq.broker.tables.all_tables import Tables
from halfmq.broker.transaction.state.pending import PendingTable
from halfmq.store.message_store import MessageStore


def store_of(broker: Broker) -> MessageStore:
    return broker._store


def tables_of(broker: Broker) -> Tables:
    return broker._tables


def pending_of(broker: Broker) -> PendingTable:
    """Return the whole table of undecided transactions; clients only get pages of it."""
    return broker.transactions._table


def delays_of(broker: Broker) -> DelayService:
    return broker._delays


def waits_of(broker: Broker) -> Callable[[int], bool]:
    """Return whether the message at a place waits."""
    return lambda place: broker._delays._state(place) == PENDING


def release_of(broker: Broker) -> ReplyRelease:
    return broker._release


def router_of(broker: Broker) -> Router:
    return broker._router


def access_of(broker: Broker) -> AccessSetup:
    return broker._access


def connections_of(broker: Broker) -> list[ClientConnection]:
    """The broker's ends of all connections."""
    return list(broker._server._shared.connections)
