"""Answers to pulls; codes and offsets are those of RocketMQ's `PullMessageProcessor`."""

from typing import Final

from halfmq.remoting.codes import ResponseCode
from halfmq.remoting.command import RemotingCommand
from halfmq.remoting.headers import PullMessageRequestHeader
from halfmq.remoting.replies import encode_pull_reply
from halfmq.store.message_store import GetResult, GetStatus

MESSAGES_MAX: Final = 32
"""Messages of one answer, RocketMQ's `maxTransferCountOnMessageInMemory` and the default of its
clients. A client that asks for more gets the rest with its next pulls."""

BYTES_MAX: Final = 262_144
"""Bytes of one answer unless one message alone is larger, `maxTransferBytesOnMessageInMemory`."""

_CODES: Final = {
    GetStatus.FOUND: ResponseCode.SUCCESS,
    GetStatus.NO_MATCHED_MESSAGE: ResponseCode.PULL_RETRY_IMMEDIATELY,
    GetStatus.MESSAGE_WAS_REMOVING: ResponseCode.PULL_RETRY_IMMEDIATELY,
    GetStatus.OFFSET_FOUND_NULL: ResponseCode.PULL_NOT_FOUND,
    GetStatus.OFFSET_OVERFLOW_ONE: ResponseCode.PULL_NOT_FOUND,
    GetStatus.OFFSET_OVERFLOW_BADLY: ResponseCode.PULL_OFFSET_MOVED,
    GetStatus.OFFSET_TOO_SMALL: ResponseCode.PULL_OFFSET_MOVED,
}
_SUCCESS: Final = ResponseCode.SUCCESS  # looking up an enum member takes 70 ns, and a pull 30 us

# RocketMQ creates a queue when it is pulled, so its clients expect an unknown one to be empty.
_REMARKS: Final = {GetStatus.NO_MATCHED_LOGIC_QUEUE: GetStatus.NO_MESSAGE_IN_QUEUE.name}


def count_max(header: PullMessageRequestHeader) -> int:
    """Return how many messages a pull gets at most."""
    return min(max(header.max_msg_nums, 1), MESSAGES_MAX)


def code_and_offset(result: GetResult, requested_offset: int) -> tuple[ResponseCode, int]:
    """Return code and next offset of an answer without messages. Source: `PullMessageProcessor`."""
    code = _CODES.get(result.status)
    if code is not None:
        return code, result.next_offset
    if requested_offset == 0:  # an empty or unknown queue: wait for its first message
        return ResponseCode.PULL_NOT_FOUND, 0
    return ResponseCode.PULL_OFFSET_MOVED, 0


def found_head(request: RemotingCommand, result: GetResult) -> bytes:
    """Return the start of an answer with messages, which follow it."""
    return encode_pull_reply(
        request,
        _SUCCESS,
        next_begin_offset=result.next_offset,
        min_offset=result.min_offset,
        max_offset=result.max_offset,
        remark="FOUND",
        body_size=result.size,
    )


def empty(
    request: RemotingCommand, code: ResponseCode, result: GetResult, next_offset: int
) -> bytes:
    """Return an answer without messages."""
    return encode_pull_reply(
        request,
        code,
        next_begin_offset=next_offset,
        min_offset=result.min_offset,
        max_offset=result.max_offset,
        remark=_REMARKS.get(result.status) or result.status.name,
        body_size=0,
    )


def retry(request: RemotingCommand, result: GetResult, next_offset: int) -> bytes:
    """Return the answer on which the client pulls again from `next_offset` at once."""
    return encode_pull_reply(
        request,
        ResponseCode.PULL_RETRY_IMMEDIATELY,
        next_begin_offset=next_offset,
        min_offset=result.min_offset,
        max_offset=result.max_offset,
        remark=GetStatus.NO_MATCHED_MESSAGE.name,
        body_size=0,
    )
