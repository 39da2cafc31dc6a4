"""``manage.py ship``: write a parcel for each order, once, until SIGTERM."""

from django.conf import settings
from django.core.management.base import BaseCommand
from django.db import connection, transaction

from halfmq.client import Inbox
from halfmq.client.blocking import Consumer, MessageView
from orders.models import Parcel

inbox = Inbox("shipping")


def ship(message: MessageView) -> None:
    """Write the parcel; AlreadyProcessedError, of a message that comes again, ends it well."""
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            inbox.record(cursor, message)
            Parcel.objects.create(order_id=message.body.decode())
    finally:
        connection.close()  # each handler has a thread, and so a connection of Django, of its own


class Command(BaseCommand):
    """The command."""

    help = "Ship orders until SIGTERM."

    def handle(self, **_options: object) -> None:
        """Consume."""
        namesrv = settings.HALFMQ["NAMESRV"]
        with Consumer("shipping", {"orders": "*"}, start_from="first", namesrv=namesrv) as consumer:
            summary = consumer.run(ship, concurrency=4)
        self.stdout.write(f"{summary.handled} handled, {summary.retried} retried")
