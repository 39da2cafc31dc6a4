"""A router for FastAPI: handlers with FastAPI's dependencies, started with the application."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fastapi  # noqa: F401 -- without it this line says what is missing

from .broker import HalfmqBroker
from .endpoints import HalfmqPublisher
from .internals import ContextRepo, StreamRouter
from .messages import RawMessage


class HalfmqFastAPIRouter(StreamRouter[RawMessage]):
    """``app.include_router(HalfmqFastAPIRouter("127.0.0.1:9876"))``.

    The arguments are those of `HalfmqBroker` and of FastAPI's ``APIRouter``; ``/asyncapi``
    documents the messages.
    """

    broker_class = HalfmqBroker
    broker: HalfmqBroker

    def __init__(
        self, namesrv: str | None = None, *, context: ContextRepo | None = None, **settings: Any
    ) -> None:
        super().__init__(namesrv, context=context, **settings)

    def subscriber(  # type: ignore[override]
        self, topic: str, *, dependencies: Any = (), **settings: Any
    ) -> Callable[[Callable[..., Any]], Any]:
        """As `HalfmqBroker.subscriber`, also with FastAPI's ``response_model``."""
        for name in ("", "_include", "_exclude"):
            settings.setdefault(f"response_model{name}", None)
        for name in ("unset", "defaults", "none"):
            settings.setdefault(f"response_model_exclude_{name}", False)
        settings.setdefault("response_model_by_alias", True)
        made: Any = super().subscriber(topic, dependencies=dependencies, **settings)
        return made  # type: ignore[no-any-return]

    def publisher(  # type: ignore[override]
        self, topic: str, **settings: Any
    ) -> HalfmqPublisher:
        """As `HalfmqBroker.publisher`."""
        return self.broker.publisher(topic, **settings)
