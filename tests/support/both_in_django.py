"""The shop of `both_programs` with Django."""

from __future__ import annotations

import os

import django
from django.conf import settings
from django.db import close_old_connections, connection
from django.db.transaction import atomic

from halfmq.client import Inbox, blocking
from halfmq.client.transactional.databases import run_blocking
from halfmq.integrations.django import transaction
from tests.support.both_programs import AGAIN, AT_ONCE, MESSAGE, Shop, sell_in_threads
from tests.support.ending_producer import GROUP, TOPIC
from tests.support.ledger_drivers import django_entry
from tests.support.ledger_endings import Work


def run(role: str, shop: Shop) -> None:
    """Sell or ship."""
    books = shop.books
    settings.configure(
        DATABASES={"default": django_entry(books.driver.database, books.place)},
        HALFMQ={"GROUP": GROUP, "CONFIG": shop.config, "TABLE": books.table},
        INSTALLED_APPS=["halfmq.integrations.django"],
    )
    django.setup()
    {"sell": sell, "ship": ship}[role](shop)
    os._exit(0)  # the integration's producer is one for the life of the process


def sell(shop: Shop) -> None:
    async def one() -> None:
        close_old_connections()  # as Django does before a request
        with transaction(MESSAGE) as half:
            shop.note()
            await shop.order(Work(shop.books, connection, half.id))

    sell_in_threads(shop, one)


def ship(shop: Shop) -> None:
    inbox = Inbox("shipping", shop.inbox)

    def handle(message: blocking.MessageView) -> None:
        if message.transaction_id is None:
            return
        try:
            with atomic(durable=True), connection.cursor() as cursor:
                inbox.record(cursor, message)
                run_blocking(shop.parcel(connection, message, may_swallow=False))
        finally:
            connection.close()

    with blocking.Consumer(
        "shipping", {TOPIC: "*"}, start_from="first", config=shop.config
    ) as consumer:
        consumer.run(handle, concurrency=AT_ONCE, policy=AGAIN)
