"""The parts of a broker that tests look into.

A broker hands its parts to nobody, and needs no door to them for users. Tests compare what lies in
its tables and store with what peers were told; they find both here, and use no private name of
the broker elsewhere.
"""

from __future__ import annotations

from halfmq.broker.access.build import AccessSetup
from halfmq.broker.delay.delivery import DelayService
from halfmq.broker.net.connection import ClientConnection
from halfmq.broker.net.reply_release import ReplyRelease
from halfmq.broker.net.router import Router
from halfmq.broker.service import Broker
from halfmq.broker.tables.all_tables import Tables
from halfmq.store.message_store import MessageStore


def store_of(broker: Broker) -> MessageStore:
    return broker._store


def tables_of(broker: Broker) -> Tables:
    return broker._tables


def delays_of(broker: Broker) -> DelayService:
    return broker._delay


def release_of(broker: Broker) -> ReplyRelease:
    return broker._release


def router_of(broker: Broker) -> Router:
    return broker._router


def access_of(broker: Broker) -> AccessSetup:
    return broker._access


def connections_of(broker: Broker) -> list[ClientConnection]:
    """The broker's ends of all connections."""
    return list(broker._server._shared.connections)
