"""Celery: a transport of kombu, and tasks that are sent with a database transaction.

::

    import halfmq.integrations.celery  # adds halfmq:// to kombu's transports

    app = Celery("shop", broker="halfmq://127.0.0.1:9876", task_cls=halfmq.integrations.celery.Task)

    with producer.transaction(session=session):
        session.add(order)
        session.flush()
        send_receipt.delay_on_commit(order.id)

Queues are topics, each with a group of the same name that shares its messages. Every task is
acknowledged by itself; unless a worker is dead, its tasks stay its own. A task whose ETA is farther
than a minute away waits in the broker. ``broker_transport_options`` takes ``visibility_timeout``,
the seconds after which the tasks of a dead worker come again (60), and ``client``, a mapping of
further arguments of ``Consumer`` and ``Producer``. ``broker_use_ssl`` encrypts connections.

Source: kombu 5.7, ``kombu/transport/virtual/base.py`` and ``kombu/pidbox.py``.
"""

from __future__ import annotations

import contextlib
import ssl
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from queue import Empty
from typing import Any, Final
from urllib.parse import quote

from celery import Task as CeleryTask
from kombu.transport import TRANSPORT_ALIASES, virtual
from kombu.utils.json import dumps, loads

from halfmq.client.blocking import (
    Admin,
    Consumer,
    MessageView,
    Producer,
    Transaction,
    receive_any,
)
from halfmq.client.errors import (
    BrokerRefusedError,
    ClientClosedError,
    ClientError,
    ConfigurationError,
    ConnectError,
    ConnectionLostError,
    ForkedError,
    RequestTimeoutError,
    RouteNotFoundError,
)
from halfmq.client.message import Message
from halfmq.client.transactional.owned_transaction import OPEN

__all__ = ["Channel", "Task", "Transport"]

VISIBILITY_SECONDS: Final = 60.0
"""Until the tasks of a dead worker come again; a living one asks for more time in thirds of it."""
HELD_SECONDS_MAX: Final = 60.0
"""A task that is due sooner waits in the worker, as Celery does it; other ones in the broker."""
TURN_SECONDS: Final = 1.0
"""A wait looks this often whether queues were added."""
REPLIES: Final = "reply."
"""Exchanges of answers to ``celery inspect``. Only the process that waits knows their queues, so
all who wait get all answers, of which each takes its own."""
FULL_SECONDS: Final = 0.05
"""While a channel is full, its acknowledgements end a wait; other channels are read this often."""


class QoS(virtual.QoS):  # type: ignore[misc] # kombu has no types
    """The messages of a channel that are not acknowledged; the broker learns of each at once."""

    restore_at_shutdown = False  # kombu would send copies, and the broker redelivers

    def __init__(self, channel: Channel, prefetch_count: int = 0) -> None:
        super().__init__(channel, prefetch_count)
        self.views: dict[str, MessageView] = {}

    def ack(self, delivery_tag: str) -> None:
        view = self.views.pop(delivery_tag, None)
        if view is not None:
            view.ack()
        self._forget(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        view = self.views.pop(delivery_tag, None)
        if view is not None and requeue:
            view.retry(timedelta(0), reason="requeued by Celery")
        elif view is not None:
            view.reject("rejected by Celery")
        self._forget(delivery_tag)

    def restore_unacked(self) -> None:
        """Give all messages back to their queues."""
        for delivery_tag in list(self.views):
            with contextlib.suppress(ClientError):  # then it comes again after its time
                self.reject(delivery_tag, requeue=True)

    def _forget(self, delivery_tag: str) -> None:
        super().ack(delivery_tag)
        self.channel.connection.has_room.set()


class Channel(virtual.Channel):  # type: ignore[misc] # kombu has no types
    """Queues are topics; those of a fanout exchange are read from the exchange's topic."""

    QoS = QoS
    do_restore = False
    supports_fanout = True
    body_encoding = "utf-8"

    def __init__(self, connection: Transport, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self._receivers: dict[str, Consumer[Any]] = {}
        self._without_ack: set[str] = set()
        self._ended = threading.Event()
        options = connection.client.transport_options
        self.visibility_timeout = float(options.get("visibility_timeout", VISIBILITY_SECONDS))

    @property
    def is_full(self) -> bool:
        """Whether as many messages are unacknowledged as Celery allows."""
        return bool(self._active_queues) and not self.qos.can_consume()

    def receivers(self) -> dict[Consumer[Any], tuple[Channel, str]]:
        """Return the consumer of each queue."""
        return {self._receiver(queue): (self, queue) for queue in self._active_queues}

    def deliver(self, queue: str, view: MessageView) -> None:
        """Hand a message to the callback of its queue."""
        raw = self._raw(queue, view)
        if raw is not None:
            self.connection._deliver(raw, queue)  # noqa: SLF001 -- as kombu's transports do

    def basic_consume(self, queue: str, no_ack: bool, *args: Any, **kwargs: Any) -> None:
        if no_ack:
            self._without_ack.add(queue)
        super().basic_consume(queue, no_ack, *args, **kwargs)

    def basic_cancel(self, consumer_tag: str) -> None:
        queue = self._tag_to_queue.get(consumer_tag)
        super().basic_cancel(consumer_tag)
        self._without_ack.discard(queue)

    def close(self) -> None:
        self._ended.set()
        if self._qos is not None:
            self._qos.restore_unacked()
        for receiver in self._receivers.values():
            receiver.close()
        self._receivers.clear()
        super().close()

    # --- what kombu asks of a transport

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:
        view = self._receiver(queue).receive(timeout or TURN_SECONDS)
        raw = None if view is None else self._raw(queue, view)
        if raw is None:
            raise Empty
        return raw

    def _put(self, queue: str, message: dict[str, Any], **_kwargs: Any) -> None:
        self.connection.connect().send(_encoded(queue, message))

    def _put_fanout(
        self, exchange: str, message: dict[str, Any], *_args: Any, **_kwargs: Any
    ) -> None:
        self._put(exchange, message)

    def _queue_bind(self, exchange: str, _routing_key: str, _pattern: str, queue: str) -> None:
        if self.typeof(exchange).type == "fanout" or exchange.startswith(REPLIES):
            self.connection.fanout[queue] = exchange
            self._receiver(queue)  # it gets what is sent from now on

    def _lookup(self, exchange: str, routing_key: str, default: str | None = None) -> list[str]:
        if exchange.startswith(REPLIES):
            return [exchange]
        found: list[str] = super()._lookup(exchange, routing_key, default)
        return found

    def _size(self, queue: str) -> int:
        return 0  # kombu asks with each declaration, and nobody uses the answer

    def _purge(self, queue: str) -> int:
        topic = _topic(queue)
        with Admin(**self.connection.options) as admin:
            if topic not in {one.name for one in admin.topics()}:
                return 0
            admin.create_group(topic)
            purged = sum(one.lag for one in admin.offsets(topic, topic))
            admin.reset_offsets(topic, topic, "last")
        return purged

    def _delete(self, queue: str, *_args: Any, **_kwargs: Any) -> None:
        self.connection.fanout.pop(queue, None)
        for receivers in (self._receivers, self.connection.fanout_receivers):
            if queue in receivers:
                receivers.pop(queue).close()

    # --- messages

    def _receiver(self, queue: str) -> Consumer[Any]:
        exchange = self.connection.fanout.get(queue)
        receivers = self.connection.fanout_receivers if exchange else self._receivers
        found = receivers.get(queue)
        if found is None:
            topic = _topic(exchange or queue)
            found = Consumer(
                topic,
                {topic: "*"},
                start_from="last" if exchange else "first",
                ack_timeout=self.visibility_timeout,
                share="queues" if exchange else "messages",
                broadcasting=exchange is not None,
                **self.connection.options,
            )
            found.start()
            if not self._receivers and not exchange:
                threading.Thread(target=self._ask_for_time, daemon=True).start()
            receivers[queue] = found
        return found

    def _raw(self, queue: str, view: MessageView) -> dict[str, Any] | None:
        """Return a message as kombu has it; None if it is not one of Celery's, and rejected."""
        try:
            raw: dict[str, Any] = loads(view.body)
            tag = raw["properties"]["delivery_tag"] = self._next_delivery_tag()
        except (ValueError, LookupError, TypeError) as error:
            view.reject(f"not a message of Celery: {error!r:.200}")
            return None
        if queue in self._without_ack:
            view.ack()
        else:
            self.qos.views[tag] = view
        return raw

    def _ask_for_time(self) -> None:
        """Keep the messages in hand from coming again, until the channel is closed."""
        while not self._ended.wait(self.visibility_timeout / 3):
            for view in list(self.qos.views.values()):
                with contextlib.suppress(ClientError):  # the next round asks again
                    view.extend(self.visibility_timeout)


class Transport(virtual.Transport):  # type: ignore[misc] # kombu has no types
    """A connection of kombu; its clients connect when they are first used."""

    Channel = Channel
    default_port = 9876
    driver_type = driver_name = "halfmq"
    connection_errors = (
        *virtual.Transport.connection_errors,
        *(ConnectError, ConnectionLostError, RequestTimeoutError, RouteNotFoundError),
        *(ClientClosedError, ForkedError),  # a forked child opens a new one
    )
    channel_errors = (*virtual.Transport.channel_errors, BrokerRefusedError)
    implements = virtual.Transport.implements.extend(
        exchange_type=frozenset(["direct", "topic", "fanout"])
    )

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        host, port = client.hostname or "127.0.0.1", client.port or self.default_port
        self.options: dict[str, Any] = {
            "namesrv": f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
            "access_key": client.userid or None,
            "secret_key": client.password or None,
            "tls": _tls(client.ssl),
            **client.transport_options.get("client", {}),
        }
        self._producer: Producer[Any] | None = None
        self.fanout: dict[str, str] = {}  # queue to exchange; kombu binds once for all channels
        self.fanout_receivers: dict[str, Consumer[Any]] = {}
        self.has_room = threading.Event()  # set by acknowledgements, of any thread

    def connect(self) -> Producer[Any]:
        """Return the producer of all channels, connected."""
        if self._producer is None:
            producer: Producer[Any] = Producer("celery", **self.options)
            producer.wait_until_available(TURN_SECONDS)  # kombu itself tries again
            producer.start()
            self._producer = producer
        return self._producer

    def establish_connection(self) -> Any:
        self.connect()
        return super().establish_connection()

    def close_connection(self, connection: Any) -> None:
        super().close_connection(connection)
        while self.fanout_receivers:
            self.fanout_receivers.popitem()[1].close()
        if self._producer is not None:
            self._producer.close()
            self._producer = None

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Deliver the next message of any queue."""
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (left := deadline - time.monotonic()) > 0:
            self.has_room.clear()
            full = [channel for channel in self.channels if channel.is_full]
            receivers: dict[Consumer[Any], tuple[Channel, str]] = {}
            for channel in self.channels:
                if channel not in full:
                    receivers |= channel.receivers()
            if receivers:
                found = receive_any([*receivers], 0 if full else min(left, TURN_SECONDS))
                if found is not None:
                    channel, queue = receivers[found[0]]
                    channel.deliver(queue, found[1])
                    return
            if full or not receivers:
                self.has_room.wait(min(left, FULL_SECONDS))
        raise TimeoutError


def _tls(given: Any) -> bool | ssl.SSLContext:
    """Return what Celery's ``broker_use_ssl`` says: True, or the files' names for other brokers."""
    if not isinstance(given, Mapping):
        return bool(given)
    context = ssl.create_default_context(cafile=given.get("ca_certs"))
    if "certfile" in given:
        context.load_cert_chain(given["certfile"], given.get("keyfile"))
    return context


TRANSPORT_ALIASES["halfmq"] = f"{__name__}:Transport"


class Task(CeleryTask):  # type: ignore[misc] # Celery has no types
    """A task that can be sent with a database transaction; for ``Celery(task_cls=…)``."""

    abstract = True

    def delay_on_commit(self, *args: Any, **kwargs: Any) -> Any:
        """Send the task if, and only if, the open transaction commits; see the module's text."""
        return self.apply_async_on_commit(args, kwargs)

    def apply_async_on_commit(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Do the same with options of ``apply_async``; a countdown counts from this call.

        The id, the headers and the ETA are fixed now, and prepared before the commit, so that a
        crash after it does not lose the task. Several tasks count as messages of one transaction:
        at most 64, 16 MiB together.

        Raises:
            ConfigurationError: No transaction without messages is open here.
        """
        transaction = OPEN.get()
        if transaction is None:
            expected = (
                "a call inside producer.transaction(session=…), or inside "
                "halfmq.integrations.django.transaction(), without messages"
            )
            raise ConfigurationError("delay_on_commit", self.name, expected)
        channel = _Collecting(Transport(self.app.connection_for_write()))
        channel.transaction = transaction
        producer = self.app.amqp.Producer(channel)
        return self.apply_async(args, kwargs, producer=producer, **options)


class _Collecting(Channel):
    """A channel whose messages are added to a transaction."""

    transaction: Transaction

    def _put(self, queue: str, message: dict[str, Any], **_kwargs: Any) -> None:
        self.transaction.add(_encoded(queue, message))


def _topic(queue: str) -> str:
    """Return the topic of a queue: characters that topics must not have are written as %XX."""
    return quote(queue, safe="").replace(".", "%2E").replace("~", "%7E")


def _encoded(queue: str, message: dict[str, Any]) -> Message:
    headers = message.get("headers") or {}
    eta = headers.get("eta")
    due = None if eta is None else datetime.fromisoformat(eta)
    if due is not None and due - datetime.now(UTC) <= timedelta(seconds=HELD_SECONDS_MAX):
        due = None
    return Message(
        _topic(queue),
        dumps(message).encode(),
        keys=headers.get("id"),
        properties={"task": headers["task"]} if headers.get("task") else None,
        deliver_at=due,
    )
