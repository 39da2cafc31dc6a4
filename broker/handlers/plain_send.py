"""The short path of sending: single messages without anything special about them.

Nearly every message is one: its topic exists, and its properties ask for no delay and no
transaction. Such a message is staged by one look at the topic table and one at the *shape* of its
properties, which is all of them but the unique key: a producer sends the same few shapes over and
over, so what they mean is worked out once. Everything else is left to `send`, which knows every
rule; nothing is refused here.

What one pass of the event loop stages, from all connections, is appended as one group at its end:
most of what an append costs, it costs however many records it takes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from halfmq.remoting.codes import FLAG_ONE_WAY
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import SendMessageRequestHeader
from halfmq.remoting.replies import encode_send_reply
from halfmq.store.draft import Appended, Draft
from halfmq.store.errors import StoreError
from halfmq.store.format.flags import HOSTS_MASK, TRANSACTION_MASK
from halfmq.store.format.ids import offset_message_id
from halfmq.store.format.properties import tags_code
from halfmq.store.format.topics import CLIENTS_MAY_NOT_SEND

from ..connection import Connection, Handler
from ..topics import TopicConfig

logger = logging.getLogger(__name__)

PROPERTIES_SIZE_MAX: Final = 32_767
"""Bytes of all properties of a record, whose length field is an int16."""

GROUP_MAX: Final = 1_024
"""Messages staged before they are appended at once: about a millisecond of work."""

SHAPES_MAX: Final = 4_096
"""Shapes remembered, about 500 bytes each; with that many of them, producers put something of their
own into every message, and remembering serves nobody."""

_UNIQUE_KEY: Final = "UNIQ_KEY\x01"
_NOT_PLAIN: Final = (b"TRAN_MSG\x01", b"DELAY\x01", b"TIMER_", _UNIQUE_KEY.encode())


class Shape(NamedTuple):
    """What the properties around a unique key mean."""

    plain: bool  # False: whoever knows every rule has to look at the message
    suffix: bytes  # what the broker adds
    tags_code: int
    waits: bool  # for the disk, unless the broker flushes by itself


class Staged(NamedTuple):
    """A message that can be appended as it is, and where its answer goes."""

    request: RemotingCommand
    draft: Draft
    unique_key: str
    waits: bool
    connection: Connection


class Topics(Protocol):
    """What sending needs of the topic table."""

    def get(self, name: str) -> TopicConfig | None: ...


class Log(Protocol):
    """What sending needs of the store."""

    def append(self, group: Sequence[Draft], *, contiguous: bool = False) -> list[Appended]: ...


class PlainSends:
    """Stages plain messages, and appends and answers them in groups."""

    def __init__(
        self,
        log: Log,
        topics: Topics,
        *,
        broker_properties: bytes,
        max_message_size: int,
        sync_flush: bool,
        send_alone: Handler,
    ) -> None:
        """`send_alone` serves one message by every rule, when its group could not be appended."""
        self._append = log.append
        self._get_topic = topics.get
        self._broker_properties = broker_properties
        self._max_message_size = max_message_size
        self._sync_flush = sync_flush
        self._send_alone = send_alone
        self._shapes: dict[tuple[str, str], Shape] = {}
        self._staged: list[Staged] = []

    def take(self, request: RemotingCommand, connection: Connection) -> bool:
        """Stage the message if it is a plain one; it is answered when it has been appended."""
        staged = self._stage(request, connection)
        if staged is None:
            return False
        waiting = self._staged
        waiting.append(staged)
        if len(waiting) == 1:
            asyncio.get_running_loop().call_soon(self.append_staged)
        elif len(waiting) >= GROUP_MAX:
            self.append_staged()
        return True

    def append_staged(self) -> None:
        """Append what is staged, as one group, and answer it; nothing happens if nothing is."""
        group, self._staged = self._staged, []
        if not group:
            return
        try:
            appended = self._append([staged.draft for staged in group])
        except Exception as error:  # whatever it is, each of them is owed an answer
            if not isinstance(error, StoreError):
                logger.exception("event=group_failed messages=%d", len(group))
            # One message may be at fault: each for itself gets what it deserves.
            for staged in group:
                reply = self._send_alone(staged.request, staged.connection)
                if reply is not None and not staged.request.flag & FLAG_ONE_WAY:
                    staged.connection.write(reply)
            return
        for staged, one in zip(group, appended, strict=True):
            request, connection = staged.request, staged.connection
            if request.flag & FLAG_ONE_WAY:
                continue
            draft = staged.draft
            reply = encode_send_reply(
                request,
                offset_message_id(draft.store_host, one.physical_offset),
                draft.queue_id,
                one.queue_offset,
                staged.unique_key,
            )
            if staged.waits and self._sync_flush:
                connection.reply_when_durable(one.physical_offset + one.size, reply)
            else:
                connection.write(reply)

    def _stage(self, request: RemotingCommand, connection: Connection) -> Staged | None:
        """Return what is to be appended; None when the message is not a plain one."""
        header = request.header
        # The header is the plain dict when it did not fit its class.
        if not isinstance(header, SendMessageRequestHeader):
            return None
        name = header.topic
        topic = self._get_topic(name)
        body = request.body
        text = header.properties
        if (
            topic is None
            or name in CLIENTS_MAY_NOT_SEND
            or name[0] == "%"
            or not 0 <= header.queue_id < topic.write_queue_nums
            or header.batch
            or header.sys_flag & TRANSACTION_MASK
            or not body
            or len(body) > self._max_message_size
            or not text
        ):
            return None
        head, _, behind = text.partition(_UNIQUE_KEY)
        unique_key, ended, tail = behind.partition("\x02")
        if not ended or not unique_key or (head and head[-1] != "\x02"):
            return None
        shape = self._shapes.get((head, tail)) or self._learn(head, tail)
        raw = text.encode() + shape.suffix
        if not shape.plain or len(raw) > PROPERTIES_SIZE_MAX:
            return None
        draft = Draft(
            topic=name,
            queue_id=header.queue_id,
            body=body,
            properties=raw,
            tags_code=shape.tags_code,
            flag=header.flag,
            sys_flag=header.sys_flag & ~HOSTS_MASK,
            born_timestamp=header.born_timestamp,
            born_host=connection.remote_host,
            store_host=connection.store_host,
            reconsume_times=header.reconsume_times or 0,
        )
        return Staged(request, draft, unique_key, shape.waits, connection)

    def _learn(self, head: str, tail: str) -> Shape:
        """Work out what a shape means, and remember it."""
        if len(self._shapes) >= SHAPES_MAX:
            self._shapes.clear()
        around = (head + tail).encode()
        closing = b"" if not tail or tail[-1] == "\x02" else b"\x02"
        known = b"" if b"CLUSTER\x01" in around else self._broker_properties
        shape = self._shapes[head, tail] = Shape(
            plain=not any(name in around for name in _NOT_PLAIN),
            suffix=closing + known,
            tags_code=tags_code(around),
            waits=b"WAIT\x01false\x02" not in around + b"\x02",
        )
        return shape
