"""Test code that uses halfmq, without a server: the real broker in the event loop of the test.

::

    async def test_an_order_is_published() -> None:
        async with InMemoryBroker() as broker:
            await place_order("4711", namesrv=broker.address)
            [message] = await broker.messages("orders")
            assert message.body == b"4711"

With pytest, the fixture ``halfmq_broker`` is such a broker; it starts at its first use, in the loop
that runs then. Broker and clients are the ones of production, on files and a network in memory.
``await broker.advance(seconds=60)`` lets a minute pass at once, for checks, delays, retries and
everything else that waits in the loop. A broker can be killed, lose requests and answers, get
requests twice, and have a full disk.

Blocking clients have threads and loops of their own: they need a broker in a process, which the
fixture ``halfmq_process`` and `broker_process` start.
"""

from halfmq.client.testing import BrokerProcess, broker_process

from .broker import InMemoryBroker

__all__ = ["BrokerProcess", "InMemoryBroker", "broker_process"]
