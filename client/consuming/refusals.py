"""What brokers refuse a consumer: access to topics and queues, unequal subscriptions, and the rest.

A refusal is raised to the user's loop while it lasts. Brokers report members of the group that
subscribe differently in their answers to heartbeats; most only report them, and then it is an
event. All other failures are logged: a line for each broker and kind, not for each queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

from halfmq.remoting.bodies import SubscriptionData
from halfmq.remoting.codes import ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import HeartbeatResponseHeader

from ..errors import (
    AccessDeniedError,
    BadAnswerError,
    BrokerRefusedError,
    ConnectError,
    ConnectionLostError,
    RequestTimeoutError,
    UnequalSubscriptionsError,
)
from ..events import ConsumerEvent, DeliveryRefused, UnequalSubscriptions
from ..message import MessageQueue
from ..net.response_errors import error_from_response
from ..net.session import typed

logger = logging.getLogger(__name__)

REMINDER_INTERVAL: Final = 55.0
"""Minimum seconds between two warnings about unequal subscriptions, which come with every second
heartbeat, once a minute."""

REPEAT_SECONDS: Final = 60.0
"""How long a failure is not logged again, with the same code from the same broker."""
UNREACHED: Final = (ConnectError, ConnectionLostError, RequestTimeoutError)
"""Errors of a broker that does not answer. The session reports it, once for all queues."""


def is_topic_gone(error: Exception) -> bool:
    """Return whether the broker has no such topic any more."""
    return isinstance(error, BrokerRefusedError) and error.code == ResponseCode.TOPIC_NOT_EXIST


class Refusals:
    """The refusals that last, of one consumer."""

    def __init__(
        self,
        group: str,
        subscriptions: Mapping[str, SubscriptionData],
        emit: Callable[[ConsumerEvent], None],
        on_change: Callable[[BrokerRefusedError | None], None],
    ) -> None:
        """Wire it; ``on_change`` gets the refusal to raise, None: there is none."""
        self._group = group
        self._subscriptions = subscriptions
        self._emit = emit
        self._on_change = on_change
        self._unequal: dict[str, UnequalSubscriptions] = {}  # by broker
        self._refused: dict[str | MessageQueue, BrokerRefusedError] = {}  # by address, topic, queue
        self._is_reported = False
        self._logged: dict[tuple[str, type[Exception], int], float] = {}  # when, by kind
        self.reminder_due = 0.0
        """When unequal subscriptions are reported again, on the loop's clock."""

    @property
    def first(self) -> BrokerRefusedError | None:
        """The refusal to raise; None if there is none."""
        return next(iter(self._refused.values()), None)

    def record_access(self, what: MessageQueue | str, error: AccessDeniedError | None) -> None:
        """Record that access to a queue or topic is denied, or with None that it is allowed."""
        if self._refused.pop(what, None) is None and error is None:
            return
        if error is not None:
            self._refused[what] = error
        self._changed()

    def log_failure(self, event: str, broker: str, what: object, error: Exception) -> None:
        """Log a failed request about a topic or queue, unless an event tells of it."""
        now = asyncio.get_running_loop().time()
        kind = broker, type(error), getattr(error, "code", 0)
        told = isinstance(error, (*UNREACHED, AccessDeniedError)) or is_topic_gone(error)
        is_new = now >= self._logged.get(kind, 0.0) + REPEAT_SECONDS
        if is_new and not told:
            self._logged[kind] = now
        level = logging.WARNING if is_new and not told else logging.DEBUG
        logger.log(level, "event=%s group=%s of=%s reason=%r", event, self._group, what, str(error))

    def heartbeat_answered(self, client_id: str, address: str, answer: RemotingCommand) -> bool:
        """Process the answer to a heartbeat; return whether it is a refusal that is reported."""
        self._refused.pop(address, None)
        was_unequal = self._unequal.pop(address, None) is not None
        event = self._subscription_difference(client_id, address, answer)
        if answer.code != ResponseCode.SUCCESS and event is None:
            error = error_from_response(answer)
            if isinstance(error, AccessDeniedError):
                self._refused[address] = error
        elif event is None:
            if was_unequal and not self._unequal:
                logger.info("event=subscriptions_equal group=%s", self._group)
        elif answer.code == ResponseCode.SUCCESS:
            self._unequal[address] = event
            now = asyncio.get_running_loop().time()
            if now >= self.reminder_due:
                self.reminder_due = now + REMINDER_INTERVAL
                self._emit(event)
        else:
            filters = event.topic, event.filter, event.other_client_id, event.other_filter
            remark = answer.remark or str(event)
            self._refused[address] = UnequalSubscriptionsError(answer.code, remark, *filters)
        self._changed()
        return address in self._refused

    def _changed(self) -> None:
        refusal = self.first
        if refusal is not None and not self._is_reported:
            self._emit(DeliveryRefused(self._group, str(refusal)))
        self._is_reported = refusal is not None
        self._on_change(refusal)

    def _subscription_difference(
        self, client_id: str, address: str, answer: RemotingCommand
    ) -> UnequalSubscriptions | None:
        try:
            header = typed(answer, HeartbeatResponseHeader, address)
        except BadAnswerError as error:
            logger.debug("event=heartbeat_answer_unreadable reason=%r", str(error))
            return None
        topic, other = header.unequal_topic, header.unequal_client_id
        if topic is None or other is None:
            return None
        own = self._subscriptions.get(topic)
        return UnequalSubscriptions(
            group=self._group,
            topic=topic,
            client_id=client_id,
            filter=None if own is None else own.sub_string,
            other_client_id=other,
            other_filter=header.unequal_filter,
        )
