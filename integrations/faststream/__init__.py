"""halfmq as a broker of FastStream; ``pip install 'halfmq[faststream]'``.

::

    broker = HalfmqBroker("127.0.0.1:9876")
    app = FastStream(broker)

    @broker.subscriber("orders")
    @broker.publisher("invoices")
    async def bill(order: Order) -> Invoice:
        return Invoice(order.id)

A handler that fails has its message retried; ``raise NackMessage(delay=…)`` chooses the delay, and
``raise RejectMessage`` makes it a dead letter. `HalfmqBroker.transaction` publishes with a database
transaction, both or neither.
"""

from .broker import HalfmqBroker, HalfmqRoute, HalfmqRoutePublisher, HalfmqRouter
from .endpoints import HalfmqPublisher, HalfmqSubscriber
from .messages import HalfmqResponse
from .messages import HandledMessage as HalfmqMessage
from .testing import TestHalfmqBroker

__all__ = [
    "HalfmqBroker",
    "HalfmqMessage",
    "HalfmqPublisher",
    "HalfmqResponse",
    "HalfmqRoute",
    "HalfmqRoutePublisher",
    "HalfmqRouter",
    "HalfmqSubscriber",
    "TestHalfmqBroker",
]
