"""Tests of the shop: ``python manage.py test``. Only a TransactionTestCase commits."""

from typing import Any

from django.conf import settings
from django.test import TransactionTestCase, override_settings

from halfmq.client.blocking import Consumer
from halfmq.testing import broker_process


class OrderTest(TransactionTestCase):
    """Orders, with a broker of their own."""

    @classmethod
    def setUpClass(cls) -> None:
        """Start the broker, and have the shop reach it."""
        super().setUpClass()
        broker = cls.enterClassContext(broker_process())
        own: dict[str, Any] = {**settings.HALFMQ, "NAMESRV": broker.address}
        cls.enterClassContext(override_settings(HALFMQ=own))

    def test_an_order_is_published(self) -> None:
        """Once, also if it is ordered twice."""
        for status in (201, 409):
            assert self.client.post("/orders/o-1").status_code == status
        namesrv = settings.HALFMQ["NAMESRV"]
        with Consumer("tests", {"orders": "*"}, start_from="first", namesrv=namesrv) as consumer:
            assert consumer.receive().body == b"o-1"
            assert consumer.receive(timeout=0.1) is None
