"""Dead letters: messages that a consumer group has given up, to be read and sent again.

A broker stores them in the topic ``%DLQ%group``. They are read by their place in its queues, so
that no consumer group takes part and nothing is consumed. All brokers of RocketMQ serve this.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.store.format import properties as names
from halfmq.store.format.flags import COMPRESSED, COMPRESSION_MASK
from halfmq.store.format.properties import encode_properties
from halfmq.store.format.record import Record
from halfmq.store.format.topics import DEAD_LETTER_PREFIX, dead_letter_topic

from ..arguments import RESERVED_NAMES, check_optional_text, check_seconds, check_text
from ..errors import (
    BrokerRefusedError,
    ClientError,
    ConfigurationError,
    InvalidMessageError,
    RouteNotFoundError,
)
from ..message import Message, ReceivedMessage
from ..net.message_encoding import EncodedMessage
from ..producer import Producer
from .browsing import BrowseCalls

CAUSES_MAX: Final = 1_000
"""Causes that are counted; reasons are free text, and could all be different."""
OTHER_CAUSES: Final = "(other causes)"
FAILURES_MAX: Final = 100
"""Failures after which a redrive ends: more of them say nothing new."""

_GROUP: Final = "halfmq-redrive"
_KEPT: Final = {names.PROPERTY_KEYS, names.PROPERTY_TAGS}


class DeadLetter(ReceivedMessage):
    """A message that a consumer group has given up. ``topic`` is the one it was sent to."""

    __slots__ = ("group",)

    group: str
    """The consumer group."""

    def __init__(self, record: Record, broker_name: str, group: str) -> None:
        super().__init__(record, broker_name)
        self.group = group
        sent_to = self.properties.get(names.PROPERTY_RETRY_TOPIC)
        self.topic = sent_to or self.properties.get(names.PROPERTY_DLQ_ORIGIN_TOPIC) or record.topic

    @property
    def attempts(self) -> int:
        """How many deliveries failed."""
        return self._record.reconsume_times

    @property
    def died_at(self) -> datetime:
        """When it became a dead letter, by the broker's clock (UTC)."""
        return self.store_timestamp

    @property
    def cause(self) -> str:
        """The reason that the consumer gave, or how many attempts failed."""
        attempts = f"{self.attempts} failed attempt{'s' * (self.attempts != 1)}"
        return self.failure_reason or attempts


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterCause:
    """The dead letters of a group that have one cause."""

    cause: str
    count: int
    first: datetime
    """When the first of them died."""
    last: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Redriven:
    """What became of dead letters that were sent again."""

    topics: Mapping[str, int]
    """How many were sent to each topic; in a dry run, how many would be sent."""
    failures: tuple[tuple[DeadLetter, ClientError], ...]
    """Those that were not sent, with the error."""
    begun: datetime
    """When it began: ``since`` for the next redrive of this kind, to skip what this one sent."""
    complete: bool
    """False: it ended early, and letters after the last failure were not tried."""

    @property
    def sent(self) -> int:
        """How many were sent, or would be sent."""
        return sum(self.topics.values())


class DeadLetterCalls(BrowseCalls):
    """Reads dead letters, and sends them again."""

    async def dead_letter_groups(self) -> dict[str, int]:
        """Return the groups that have dead letters, by name, and how many are stored of each.

        Under access control it lists topics, which takes a right on the cluster.
        """
        found: Counter[str] = Counter()
        for topic in sorted({one.name for one in await self.topics()}):
            if topic.startswith(DEAD_LETTER_PREFIX):
                stored = sum(one.end - one.first for one in await self.queues(topic))
                found[topic.removeprefix(DEAD_LETTER_PREFIX)] = stored
        return dict(+found)

    async def dead_letters(
        self,
        group: str,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        cause: str | None = None,
    ) -> AsyncGenerator[DeadLetter, None]:
        """Iterate over the dead letters of a group, queue by queue, the oldest first.

        Ends with the last one that is stored when it begins. Under access control, the right GET on
        the topic ``%DLQ%group`` suffices.

        Args:
            group: The consumer group; without dead letters, or unknown, it yields nothing.
            since: Only those that died at this time, with its time zone, or later.
            until: Only those that died before this time.
            cause: Only those with exactly this ``cause``.

        Raises:
            ConfigurationError: An argument cannot be used.
        """
        check_text("group", group)
        check_optional_text("cause", cause)
        try:
            async for found in self.browse(dead_letter_topic(group), since=since, until=until):
                letter = DeadLetter(found.record, found.queue.broker_name, group)
                if cause in (None, letter.cause):
                    yield letter
        except BrokerRefusedError as error:
            if error.code != ResponseCode.TOPIC_NOT_EXIST:
                raise

    async def dead_letter(self, group: str, message_id: str) -> DeadLetter | None:
        """Return the newest dead letter of a group with this id; None if there is none.

        ``message_id`` is a letter's ``message_id`` or its ``offset_message_id``.
        """
        check_text("group", group)
        topic = dead_letter_topic(group)
        found = await self.message(message_id, topic)
        if found is None or found.record.topic != topic:
            return None
        return DeadLetter(found.record, found.queue.broker_name, group)

    async def dead_letter_causes(
        self, group: str, *, since: datetime | None = None, until: datetime | None = None
    ) -> list[DeadLetterCause]:
        """Count the dead letters of a group by cause, the most frequent first.

        It reads all of them, or those that died ``since`` and before ``until``.

        Raises:
            ClientError: As :meth:`dead_letters`.
        """
        found: dict[str, DeadLetterCause] = {}
        async for letter in self.dead_letters(group, since=since, until=until):
            known = letter.cause in found or len(found) < CAUSES_MAX
            cause, died_at = letter.cause if known else OTHER_CAUSES, letter.died_at
            seen = found.get(cause)
            found[cause] = DeadLetterCause(
                cause=cause,
                count=1 if seen is None else seen.count + 1,
                first=died_at if seen is None else min(seen.first, died_at),
                last=died_at if seen is None else max(seen.last, died_at),
            )
        return sorted(found.values(), key=lambda one: -one.count)

    async def redrive(
        self,
        group: str,
        message_id: str | None = None,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        cause: str | None = None,
        rate: float | None = None,
        dry_run: bool = False,
        on_progress: Callable[[DeadLetter], object] | None = None,
    ) -> Redriven:
        """Send dead letters of a group to their topics again; the right PUB on them is needed.

        A copy has the keys, tags, properties, body and ``inbox_id`` of the message, and begins with
        the first attempt. Every group that consumes the topic gets it; those with an inbox process
        it once. Nothing is deleted, as brokers cannot: to send only later letters the next time,
        pass ``since=result.begun``. Brokers' clocks count, so a broker's must not be slow.

        Args:
            group: The consumer group that gave the messages up.
            message_id: Only the letter with this id; then ``since``, ``until`` and ``cause`` do not
                apply. None: all of them.
            since: As of :meth:`dead_letters`, like the next two.
            until: Only those that died before this time.
            cause: Only those with exactly this cause.
            rate: Letters per second at most; None: as fast as the brokers take them.
            dry_run: Send nothing, but check that each letter could be sent and its topic exists.
            on_progress: Called with each letter that was sent or failed; by the blocking client, on
                its background thread.

        Returns:
            What was sent. A letter that cannot be sent is in ``failures``, and the next one
            follows; the redrive ends if a broker cannot be reached, or after 100 failures.

        Raises:
            ConfigurationError: An argument cannot be used, or the group has no letter of this id.
            ClientError: The letters cannot be read.
        """
        if rate is not None:
            check_seconds("rate", rate)
        letters = self.dead_letters(group, since=since, until=until, cause=cause)
        if message_id is not None:
            letters = self._only(group, message_id)
        begun = datetime.now(UTC)
        topics: Counter[str] = Counter()
        failures: list[tuple[DeadLetter, ClientError]] = []
        complete, clock = True, self._session.clock
        due = clock()
        producer = None if dry_run else _Redriver(_GROUP, config=self.config)
        async with aclosing(letters), producer or nullcontext():
            async for letter in letters:
                if producer is not None and rate is not None:
                    await asyncio.sleep(max(0.0, due - clock()))
                    due = max(due, clock()) + 1 / rate
                try:
                    await self._redrive(letter, producer, is_new=letter.topic not in topics)
                except ClientError as error:
                    failures.append((letter, error))
                    complete = not error.retriable and len(failures) < FAILURES_MAX
                else:
                    topics[letter.topic] += 1
                if on_progress is not None:
                    on_progress(letter)
                if not complete:
                    break
        return Redriven(
            topics=dict(topics), failures=tuple(failures), begun=begun, complete=complete
        )

    async def _redrive(
        self, letter: DeadLetter, producer: _Redriver | None, *, is_new: bool
    ) -> None:
        copy = _copy(letter)
        # A route that is known from before may be the one of a deleted topic.
        if is_new and await self._session.routes.fetch(letter.topic) is None:
            raise RouteNotFoundError(letter.topic)
        if producer is not None:
            await producer.send_copy(copy)

    async def _only(self, group: str, message_id: str) -> AsyncGenerator[DeadLetter, None]:
        letter = await self.dead_letter(group, message_id)
        if letter is None:
            raise ConfigurationError("message_id", message_id, f"a dead letter of group {group}")
        yield letter


class _Redriver(Producer):
    """Sends dead letters again, as they are."""

    async def send_copy(self, copy: EncodedMessage) -> None:
        await self._transmit(self._session, RequestCode.SEND_MESSAGE_V2, copy, None, [])


def _copy(letter: DeadLetter) -> EncodedMessage:
    """Return the message of a letter as its producer had sent it, with the same id.

    Raises:
        InvalidMessageError: It cannot be sent.
    """
    record = letter.record
    if letter.topic == record.topic:
        raise InvalidMessageError("no property says to which topic the message was sent")
    properties = {names.PROPERTY_UNIQ_KEY: letter.message_id} | {
        name: value
        for name, value in letter.properties.items()
        if name in _KEPT or name not in RESERVED_NAMES
    }
    return EncodedMessage(
        Message(letter.topic, record.body, flag=record.flag),
        letter.message_id,
        encode_properties(properties).decode(),
        record.sys_flag & (COMPRESSED | COMPRESSION_MASK),  # the body is sent as it is stored
        record.body,
    )
