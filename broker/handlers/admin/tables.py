"""Tables as other brokers and exports read them: offsets of consumers (43) and of delays (45).

Also whether groups pull or pop topics: one is set by SET_MESSAGE_REQUEST_MODE (401), and 402 reads
them all.

Source: RocketMQ 5.3.3 `AdminBrokerProcessor#getAllConsumerOffset`, `#getAllDelayOffset`,
`QueryAssignmentProcessor`.
"""

from collections.abc import Callable, Mapping
from typing import Final

from halfmq.remoting.admin_bodies import encode_member, encode_offset_members
from halfmq.remoting.codes import RequestCode, ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.pop import decode_request_mode
from halfmq.remoting.replies import encode_reply
from halfmq.store.format.topics import CONFIRMED_KEY, RETRY_PREFIX

from ...errors import RequestRefusedError
from ...limits.long_answers import collect
from ...pop.request_modes import RequestModes
from ...ports import Connection, Handlers, serves
from ...tables.consumer_offsets import ConsumerOffsetTable
from ...tables.group_table import GroupTable
from ...tables.topic_table import TopicTable
from .change_queue import ChangeQueue

ANSWER_BYTES_MAX: Final = 16_000_000
"""Bytes of an answer. Clients take no frame of more than 16 MiB."""

DelayOffsets = Callable[[], tuple[Mapping[str, int], Mapping[str, int]]]
"""Returns the offset of each delay level, and the version of that table."""


class TableHandlers(Handlers):
    """Serves whole tables."""

    def __init__(
        self,
        offsets: ConsumerOffsetTable,
        delay_offsets: DelayOffsets,
        confirmed: Callable[[], Mapping[str, int] | None] = lambda: None,
    ) -> None:
        """Wire it; ``confirmed`` returns what slaves get under ``CONFIRMED_KEY``."""
        self._offsets = offsets
        self._delay_offsets = delay_offsets
        self._confirmed = confirmed

    @serves(RequestCode.GET_ALL_CONSUMER_OFFSET)
    def consumer_offsets(self, request: RemotingCommand, connection: Connection) -> bytes:
        batches = collect(request, connection, self._offsets.key_batches, self._members)
        size = sum(map(len, batches))
        if size > ANSWER_BYTES_MAX:
            raise RequestRefusedError(
                f"the table of offsets has {size} bytes, and no answer more than "
                f"{ANSWER_BYTES_MAX}: read config/consumerOffset.json instead"
            )
        members = [batch for batch in batches if batch]
        if (confirmed := self._confirmed()) is not None:
            members.append(encode_member(CONFIRMED_KEY, confirmed))
        body = encode_offset_members(members, self._offsets.data_version)
        return encode_reply(request, body=body)

    def _members(self, keys: list[str]) -> bytes:
        found = ((key, self._offsets.queues_of_key(key)) for key in keys)
        return b",".join(
            encode_member(key, {str(queue): offset for queue, offset in queues.items()})
            for key, queues in found
            if queues
        )

    @serves(RequestCode.GET_ALL_DELAY_OFFSET)
    def delay_offsets(self, request: RemotingCommand, _connection: Connection) -> bytes:
        """Answer with the next message of each delay level."""
        offsets, version = self._delay_offsets()
        members = [encode_member(level, offset) for level, offset in offsets.items()]
        return encode_reply(request, body=encode_offset_members(members, version))


class RequestModeHandlers(Handlers):
    """Serves the modes of groups."""

    def __init__(
        self, modes: RequestModes, topics: TopicTable, groups: GroupTable, changes: ChangeQueue
    ) -> None:
        self._modes, self._topics, self._groups, self._changes = modes, topics, groups, changes

    @serves(RequestCode.SET_MESSAGE_REQUEST_MODE)
    def set_mode(self, request: RemotingCommand, connection: Connection) -> None:
        """Set whether a group pulls or pops a topic."""
        mode = decode_request_mode(request.body)
        if mode.topic.startswith(RETRY_PREFIX):
            raise RequestRefusedError(
                "retry topic is not allowed to set mode", ResponseCode.NO_PERMISSION
            )
        self._topics.existing(mode.topic)
        if self._groups.ensure(mode.consumer_group) is None:
            raise RequestRefusedError(
                "subscription group does not exist", ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
            )
        what = f"group {mode.consumer_group} gets {mode.topic} by {mode.mode}"
        self._changes.make(request, connection, what, self._modes.put, mode)

    @serves(RequestCode.GET_ALL_MESSAGE_REQUEST_MODE)
    def all_modes(self, request: RemotingCommand, _connection: Connection) -> bytes:
        return encode_reply(request, body=self._modes.encoded())
