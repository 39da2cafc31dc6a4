"""Spans and metrics of clients by OpenTelemetry."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from halfmq.client import (
    ClientConfig,
    Consumer,
    Decision,
    Message,
    MessageView,
    Producer,
    RouteNotFoundError,
    TransactionProducer,
)
from tests.support.client_loops import on_both_loops
from tests.support.fake_broker import fake_broker

CONFIG = ClientConfig(pull_suspend=0.2, retry_delay=0.02)


class Reported:
    """What was reported so far."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._spans, self._reader = InMemorySpanExporter(), InMemoryMetricReader()
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        meters = MeterProvider([self._reader])
        # Only one provider can be set in a process.
        monkeypatch.setattr(trace, "get_tracer_provider", lambda: tracers)
        for module in ("opentelemetry.metrics", "opentelemetry.metrics._internal"):
            monkeypatch.setattr(f"{module}.get_meter_provider", lambda: meters)

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._spans.get_finished_spans() if span.name == name]

    def points(self, name: str) -> dict[str, Any]:
        """The points of a metric, by operation."""
        data = self._reader.get_metrics_data()
        assert data is not None
        found = (
            metric
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        )
        (metric,) = (metric for metric in found if metric.name == name)
        return {
            str((point.attributes or {})["messaging.operation.name"]): point
            for point in metric.data.data_points
        }


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> Reported:
    return Reported(monkeypatch)


@on_both_loops
async def test_a_message_is_followed_from_send_over_retry_to_its_processing(
    reported: Reported,
) -> None:
    """Each consumer span links to the producer's, whose context is in the properties."""
    async with fake_broker() as broker:
        async with Producer("shop", namesrv=broker.address) as producer:
            await producer.send(Message("orders", b"o-1", tags="new", keys="o-1"))

        async with Consumer(
            "billing", {"orders": "*"}, start_from="first", namesrv=broker.address, config=CONFIG
        ) as consumer:

            async def handle(message: MessageView) -> None:
                if message.delivery_attempt == 1:
                    await message.retry(timedelta(seconds=1), reason="away")
                    return
                await consumer.stop()

            await consumer.run(handle, signals=False)

    (send,) = reported.spans("send orders")
    attributes = send.attributes or {}
    assert send.kind is SpanKind.PRODUCER
    assert attributes["messaging.system"] == "rocketmq"
    assert attributes["messaging.destination.name"] == "orders"
    assert attributes["messaging.rocketmq.producer.group"] == "shop"
    assert attributes["messaging.rocketmq.message.tag"] == "new"
    (retry,) = reported.spans("retry orders")
    first, second = reported.spans("process orders")
    assert send.context is not None
    for span in (retry, first, second):
        (link,) = span.links
        assert link.context.span_id == send.context.span_id
    assert (second.attributes or {})["messaging.consumer.group.name"] == "billing"
    assert retry.parent is not None
    assert reported.points("messaging.client.sent.messages")["send"].value == 1
    assert reported.points("messaging.client.consumed.messages")["process"].value == 2
    assert reported.points("messaging.process.duration")["process"].count == 2


@on_both_loops
async def test_a_transaction_is_followed_from_its_half_to_check_and_commit(
    reported: Reported,
) -> None:
    """The check links to the half message, so that its trace shows who asked."""

    async def checker(_message: MessageView) -> Decision:
        return Decision.COMMIT

    async with (
        fake_broker() as broker,
        TransactionProducer("shop", checker, namesrv=broker.address) as producer,
    ):
        async with producer.transaction(Message("orders", b"o-1")):
            pass
        with pytest.raises(ValueError, match="no"):
            async with producer.transaction(Message("orders", b"o-2")):
                raise ValueError("no")

    prepared = [span.context.span_id for span in reported.spans("prepare orders") if span.context]
    assert len(prepared) == 2
    assert len(reported.spans("commit orders")) == 2
    (check,) = reported.spans("check orders")
    (link,) = check.links
    assert link.context.span_id == prepared[1]


@on_both_loops
async def test_what_fails_has_the_error(reported: Reported) -> None:
    """In the span and in the metric."""
    async with (
        fake_broker(auto_create=False) as broker,
        Producer("shop", namesrv=broker.address) as producer,
    ):
        with pytest.raises(RouteNotFoundError):
            await producer.send(Message("nowhere", b"x"))
    (span,) = reported.spans("send nowhere")
    assert (span.attributes or {})["error.type"] == "RouteNotFoundError"
    duration = reported.points("messaging.client.operation.duration")["send"]
    assert duration.attributes["error.type"] == "RouteNotFoundError"


def test_without_a_provider_nothing_is_imported() -> None:
    """Not even if the package is installed."""
    program = (
        "import sys; from halfmq.client.net.telemetry import Telemetry\n"
        "assert Telemetry.if_wanted('g', 'a') is None\n"
        "print(*(name for name in sys.modules if name.startswith('opentelemetry')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == []
