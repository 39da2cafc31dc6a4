"""FastStream's middlewares for OpenTelemetry and Prometheus, with what they say of halfmq.

Each needs its library: ``faststream[otel]`` or ``faststream[prometheus]``. The names are those of
FastStream. The spans of the client (``halfmq[otel]``) would come in addition: use one of the two.
"""

from __future__ import annotations

from typing import Any

from faststream.message import StreamMessage

from .messages import HalfmqPublishCommand

try:
    from faststream.opentelemetry import TelemetrySettingsProvider
    from faststream.opentelemetry.middleware import TelemetryMiddleware
except ImportError:  # without OpenTelemetry
    pass
else:

    class _Spans(TelemetrySettingsProvider[Any, HalfmqPublishCommand]):
        messaging_system = "rocketmq"  # registered by OpenTelemetry; halfmq speaks its protocol

        def get_consume_attrs_from_message(self, msg: StreamMessage[Any]) -> dict[str, Any]:
            return {
                "messaging.system": self.messaging_system,
                "messaging.message.id": msg.message_id,
                "messaging.message.conversation_id": msg.correlation_id,
                "messaging.message.payload_size_bytes": len(msg.body),
                "messaging.destination_publish.name": msg.raw_message.topic,
            }

        def get_consume_destination_name(self, msg: StreamMessage[Any]) -> str:
            return str(msg.raw_message.topic)

        def get_publish_attrs_from_cmd(self, cmd: HalfmqPublishCommand) -> dict[str, Any]:
            return {
                "messaging.system": self.messaging_system,
                "messaging.destination.name": cmd.destination,
                "messaging.message.conversation_id": cmd.correlation_id,
            }

        def get_publish_destination_name(self, cmd: HalfmqPublishCommand) -> str:
            return cmd.destination

    class HalfmqTelemetryMiddleware(TelemetryMiddleware[HalfmqPublishCommand]):
        """Spans and metrics of messages; the arguments are FastStream's."""

        def __init__(self, **settings: Any) -> None:
            super().__init__(settings_provider_factory=lambda _message: _Spans(), **settings)


try:
    from faststream.prometheus import MetricsSettingsProvider
    from faststream.prometheus.middleware import PrometheusMiddleware
except ImportError:  # without prometheus-client
    pass
else:

    class _Metrics(MetricsSettingsProvider[Any, HalfmqPublishCommand]):
        messaging_system = "rocketmq"

        def get_consume_attrs_from_message(self, msg: StreamMessage[Any]) -> Any:
            return {
                "destination_name": msg.raw_message.topic,
                "message_size": len(msg.body),
                "messages_count": 1,
            }

        def get_publish_destination_name_from_cmd(self, cmd: HalfmqPublishCommand) -> str:
            return cmd.destination

    class HalfmqPrometheusMiddleware(PrometheusMiddleware[Any, HalfmqPublishCommand]):
        """Counters and histograms of messages; the arguments are FastStream's."""

        def __init__(self, **settings: Any) -> None:
            super().__init__(settings_provider_factory=lambda _message: _Metrics(), **settings)
