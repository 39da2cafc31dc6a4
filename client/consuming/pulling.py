"""Pull messages of one queue by long polling, with at most one pull in flight.

The broker filters by a hash of the tag, which two tags may share, so the tag is compared here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from halfmq.remoting.bodies import SubscriptionData
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.headers import PullMessageRequestHeader, PullMessageResponseHeader
from halfmq.store.format.errors import CorruptRecordError
from halfmq.store.format.properties import get_property
from halfmq.store.format.record import Record

from ..config import ClientConfig
from ..errors import (
    AccessDeniedError,
    BrokerRefusedError,
    ClientError,
)
from ..net.response_errors import error_from_response, records_of
from ..net.session import Session, typed
from .delivery import DeliveryBuffer
from .in_flight import InFlightWindow
from .offsets import broker_address
from .refusals import UNREACHED, Refusals, is_topic_gone

logger = logging.getLogger(__name__)

SUSPEND_FLAG: Final = 2
"""The broker may hold the pull until there is a message. Source: RocketMQ PullSysFlag."""
PULL_BYTES_MAX: Final = 262_144
"""Requested size limit of a pull's answer, as brokers read from memory; official ones ignore it."""
ANSWER_GRACE: Final = 15.0
"""Seconds a held pull may be late: brokers check every 5 s, and the official client waits 15."""
RETRY_SECONDS: Final = 1.0
"""Pause after a failed pull, as in the official client."""
RECONNECT_SECONDS: Final = 0.1
FLOW_CONTROL_SECONDS: Final = 0.02
EMPTY_PULL_SECONDS: Final = 0.1
"""Pause after an immediate empty answer, from a broker that does not hold pulls."""

_WITH_OFFSETS: Final = frozenset(
    {
        ResponseCode.SUCCESS,
        ResponseCode.PULL_NOT_FOUND,
        ResponseCode.PULL_RETRY_IMMEDIATELY,
        ResponseCode.PULL_OFFSET_MOVED,
    }
)
_SUBSCRIPTION_UNKNOWN: Final = frozenset(
    {
        ResponseCode.SUBSCRIPTION_NOT_EXIST,
        ResponseCode.SUBSCRIPTION_NOT_LATEST,
        ResponseCode.FILTER_DATA_NOT_EXIST,
        ResponseCode.FILTER_DATA_NOT_LATEST,
    }
)


class QueuePuller:
    """Pulls one queue into the buffer until its task is cancelled."""

    def __init__(
        self,
        session: Session,
        group: str,
        subscription: SubscriptionData,
        window: InFlightWindow,
        buffer: DeliveryBuffer,
        refusals: Refusals,
        on_topic_gone: Callable[[], None],
    ) -> None:
        """Create a puller; ``run`` starts it."""
        self.window = window
        """Replaced by a new one if the offset is reset."""
        self._session = session
        self._config: ClientConfig = session.config
        self._group = group
        self._subscription = subscription
        self._buffer = buffer
        self._refusals = refusals
        self._on_topic_gone = on_topic_gone
        self._denied = False

    async def run(self) -> None:
        """Pull until cancelled; log failures and retry."""
        while True:
            try:
                await self._round()
            except ClientError as error:
                await self._after_failure(error)
            else:
                if self._denied:
                    self._denied = False
                    self._refusals.record_access(self.window.queue, None)

    async def _round(self) -> None:
        """Pull once, when there is capacity."""
        await self._buffer.wait_for_capacity(self.window)
        clock = asyncio.get_running_loop().time
        before, asked_at = self.window.next_offset, clock()
        await self._pull()
        if self.window.next_offset == before and clock() - asked_at < EMPTY_PULL_SECONDS:
            await asyncio.sleep(EMPTY_PULL_SECONDS)

    def seek(self, offset: int) -> None:
        """Continue at another offset; the messages pulled so far are delivered no more.

        Nothing counts as committed any more, or progress up to the offset committed before would
        never be committed again. A pull under way must be cancelled first.
        """
        self._buffer.drop(self.window)
        self.window = InFlightWindow(self.window.queue, offset, None)

    async def _pull(self) -> None:
        window = self.window
        window.pulled_at = time.time()
        queue = window.queue
        header = PullMessageRequestHeader(
            consumer_group=self._group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            queue_offset=window.next_offset,
            max_msg_nums=self._config.pull_batch,
            sys_flag=SUSPEND_FLAG,
            commit_offset=0,
            suspend_timeout_millis=int(self._config.pull_suspend * 1000),
            sub_version=self._subscription.sub_version,
            expression_type=self._subscription.expression_type,
            max_msg_bytes=PULL_BYTES_MAX,
            broker_name=queue.broker_name,
        )
        address = broker_address(self._session, queue)
        seconds = self._config.pull_suspend + ANSWER_GRACE
        answer = await self._session.call(
            address, RequestCode.PULL_MESSAGE, header, seconds=seconds
        )
        if answer.code not in _WITH_OFFSETS:
            raise error_from_response(answer)
        found = typed(answer, PullMessageResponseHeader, address)
        next_offset, window.end = found.next_begin_offset, found.max_offset
        if answer.code == ResponseCode.PULL_OFFSET_MOVED:
            logger.warning(
                "event=offset_moved queue=%s from=%d to=%d remark=%r",
                queue,
                window.next_offset,
                next_offset,
                answer.remark or "",
            )
            self.seek(next_offset)
        elif self._buffer_records(answer.body):
            window.skip_to(next_offset)

    def _buffer_records(self, body: bytes) -> bool:
        """Add the records of an answer to the buffer.

        Return False if the next pull must not skip to the offset in the answer, because a bad
        record was met and the records before it were added: it is pulled again, as the first one.
        """
        window, before = self.window, self.window.next_offset
        try:
            for record in records_of(body):
                if self._matches_filter(record):
                    self._buffer.add(window, record)
                else:
                    window.skip_to(record.queue_offset + 1)
        except CorruptRecordError as error:
            skipped = window.next_offset == before  # nothing before it was added: skip it
            logger.exception(
                "event=bad_record queue=%s skipped=%s at=%d", window.queue, skipped, error.offset
            )
            return skipped
        return True

    def _matches_filter(self, record: Record) -> bool:
        tags = self._subscription.tags_set
        if not tags:
            return True
        tag = get_property(record.properties, b"TAGS")
        return tag is not None and tag.decode(errors="replace") in tags

    async def _after_failure(self, error: ClientError) -> None:
        if isinstance(error, BrokerRefusedError) and error.code == ResponseCode.FLOW_CONTROL:
            await asyncio.sleep(FLOW_CONTROL_SECONDS)
            return
        queue = self.window.queue
        self._refusals.log_failure("pull_failed", queue.broker_name, queue, error)
        if isinstance(error, UNREACHED):
            await asyncio.sleep(RECONNECT_SECONDS)  # the connection pool waits longer
            return
        if is_topic_gone(error):
            self._on_topic_gone()
        if isinstance(error, AccessDeniedError):
            self._denied = True
            self._refusals.record_access(queue, error)
        if isinstance(error, BrokerRefusedError) and error.code in _SUBSCRIPTION_UNKNOWN:
            await self._send_heartbeat()
        await asyncio.sleep(RETRY_SECONDS)

    async def _send_heartbeat(self) -> None:
        try:
            await self._session.heartbeat(broker_address(self._session, self.window.queue))
        except ClientError as error:
            logger.debug("event=heartbeat_failed queue=%s reason=%r", self.window.queue, str(error))
