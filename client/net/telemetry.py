"""Telemetry: spans and metrics of a client by OpenTelemetry, and the trace context in messages.

A client takes part if a provider is set when it starts; otherwise nothing is imported. The W3C
context of a send is in the message's properties, so that retries and dead letters keep it, and
every span about a received message links to it.

Source of the names: the OpenTelemetry semantic conventions for messaging and for RocketMQ, which
are not stable yet. All of them stand here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Final, NamedTuple, Self

from ..message import Message, ReceivedMessage

INSTRUMENTATION: Final = "halfmq.client"
SECONDS_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
"""The conventions' bounds of durations."""


class Operation(NamedTuple):
    """One kind of span."""

    name: str
    type: str
    kind: str


SEND: Final = Operation("send", "send", "PRODUCER")
PREPARE: Final = Operation("prepare", "send", "PRODUCER")
COMMIT: Final = Operation("commit", "settle", "CLIENT")
ROLLBACK: Final = Operation("rollback", "settle", "CLIENT")
CHECK: Final = Operation("check", "process", "CONSUMER")
PROCESS: Final = Operation("process", "process", "CONSUMER")
RETRY: Final = Operation("retry", "settle", "CLIENT")
REJECT: Final = Operation("reject", "settle", "CLIENT")


class Telemetry:
    """What one client reports."""

    def __init__(self, group: str, group_attribute: str) -> None:
        from opentelemetry import metrics, propagate, trace  # noqa: PLC0415 -- if a provider is set

        self._trace: Any = trace
        self._propagate: Any = propagate
        self._tracer: Any = trace.get_tracer(INSTRUMENTATION)
        meter = metrics.get_meter(INSTRUMENTATION)
        self._sent = meter.create_counter("messaging.client.sent.messages", "{message}")
        self._consumed = meter.create_counter("messaging.client.consumed.messages", "{message}")
        self._operations, self._processing = (
            meter.create_histogram(name, "s", explicit_bucket_boundaries_advisory=SECONDS_BUCKETS)
            for name in ("messaging.client.operation.duration", "messaging.process.duration")
        )
        self._common = {"messaging.system": "rocketmq", group_attribute: group}

    @classmethod
    def if_wanted(cls, group: str, group_attribute: str) -> Self | None:
        """Return the telemetry of a client; None if no provider is set."""
        trace: Any = sys.modules.get("opentelemetry.trace")
        metrics: Any = sys.modules.get("opentelemetry.metrics")
        providers = []
        if trace is not None:
            providers.append(trace.get_tracer_provider())
        if metrics is not None:
            providers.append(metrics.get_meter_provider())
        # Without a provider the interface returns proxies for one that may come.
        is_set = any("Proxy" not in type(one).__name__ for one in providers)
        return cls(group, group_attribute) if is_set else None

    @contextmanager
    def sending(self, operation: Operation, messages: Sequence[Message]) -> Iterator[list[Message]]:
        """Report a send; the block gets the messages with the context of its span."""
        if not messages:  # which the send will refuse
            yield []
            return
        first = messages[0]
        keys = [first.keys] if isinstance(first.keys, str) else first.keys
        about = {"messaging.message.body.size": sum(len(one.body) for one in messages)}
        details: dict[str, Any] = {
            "messaging.rocketmq.message.tag": first.tags,
            "messaging.rocketmq.message.keys": keys,
            "messaging.rocketmq.message.delay_time_level": first.delay_level or None,
        }
        if len(messages) > 1:
            about["messaging.batch.message_count"] = len(messages)
        details = {name: value for name, value in details.items() if value} | about
        with self._span(operation, first.topic, details):
            carrier: dict[str, str] = {}
            self._propagate.inject(carrier)
            yield [
                replace(one, properties={**(one.properties or {}), **carrier}) for one in messages
            ]
            self._sent.add(len(messages), self._of(operation, first.topic))

    @contextmanager
    def about(self, operation: Operation, message: ReceivedMessage) -> Iterator[None]:
        """Report what is done with a received message, or one under check."""
        context = self._propagate.extract(message.properties)
        origin = self._trace.get_current_span(context).get_span_context()
        links = [self._trace.Link(origin)] if origin.is_valid else []
        details = {
            "messaging.message.id": message.message_id,
            "halfmq.message.delivery_attempt": message.delivery_attempt,
            "messaging.destination.partition.id": str(message.queue.queue_id),
        }
        if operation is PROCESS:
            self._consumed.add(1, self._of(operation, message.topic))
        with self._span(operation, message.topic, details, links):
            yield

    @contextmanager
    def settling(self, operation: Operation, transaction_id: str, topic: str) -> Iterator[None]:
        """Report the decision of a transaction."""
        with self._span(operation, topic, {"messaging.message.id": transaction_id}):
            yield

    def _of(self, operation: Operation, topic: str) -> dict[str, Any]:
        return {
            **self._common,
            "messaging.destination.name": topic,
            "messaging.operation.name": operation.name,
            "messaging.operation.type": operation.type,
        }

    @contextmanager
    def _span(
        self,
        operation: Operation,
        topic: str,
        details: Mapping[str, Any],
        links: Sequence[Any] = (),
    ) -> Iterator[None]:
        attributes = self._of(operation, topic)
        duration = self._processing if operation.type == "process" else self._operations
        kind, began = self._trace.SpanKind[operation.kind], time.perf_counter()
        with self._tracer.start_as_current_span(
            f"{operation.name} {topic}",
            kind=kind,
            attributes={**attributes, **details},
            links=links,
        ) as span:
            try:
                yield
            except BaseException as error:
                attributes["error.type"] = type(error).__qualname__
                span.set_attribute("error.type", type(error).__qualname__)
                raise
            finally:
                duration.record(time.perf_counter() - began, attributes)


def sending(
    telemetry: Telemetry | None, operation: Operation, messages: Sequence[Message]
) -> AbstractContextManager[Sequence[Message]]:
    """Report a send, if there is telemetry; the block gets the messages to send."""
    return nullcontext(messages) if telemetry is None else telemetry.sending(operation, messages)


def about(
    telemetry: Telemetry | None, operation: Operation, message: ReceivedMessage
) -> AbstractContextManager[None]:
    """Report what is done with a received message, if there is telemetry."""
    return nullcontext() if telemetry is None else telemetry.about(operation, message)
