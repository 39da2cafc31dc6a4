"""Op messages: decisions in the form that Apache RocketMQ reads.

Its broker and tools know that a half is decided from a record in ``RMQ_SYS_TRANS_OP_HALF_TOPIC``
with tag ``d`` and a body of half queue offsets, ``12,15,``. halfmq reads decisions from the log
itself and needs no op messages. They are therefore written later, in batches; those lost in a
crash are written again after the next start; and a failed write fails no request.

Source: RocketMQ ``TransactionalMessageServiceImpl.java``, ``TransactionalOpBatchService.java``.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from attrs import define

from halfmq.store.errors import StoreError
from halfmq.store.format.properties import tags_code
from halfmq.store.format.topics import OP_TOPIC
from halfmq.store.log.append_request import AppendRequest, AppendResult

from ..config import TransactionConfig

logger = logging.getLogger(__name__)

RECORDS_PER_TICK: Final = 16
"""Op messages written at once, each of some hundred offsets: about a millisecond of the loop."""

RETRY_MS: Final = 1_000  # after a failed write

_PROPERTIES: Final = b"TAGS\x01d\x02WAIT\x01true\x02"
_TAGS_CODE: Final = tags_code(_PROPERTIES)


@define(eq=False, repr=False, slots=False)
class OpWriter:
    """Collects the half queue offsets of decided transactions, and writes them in batches."""

    _append: Callable[[Sequence[AppendRequest]], list[AppendResult]]
    _config: TransactionConfig
    _host: bytes
    _now_ms: Callable[[], int]  # for the records; `tick` has the monotonic clock

    def __attrs_post_init__(self) -> None:
        self._size_max = self._config.op_batch_size
        self._interval_ms = self._config.op_batch_interval_ms
        self._waiting: list[int] = []
        self._due_ms = 0  # when waiting offsets are written even if the batch is not full
        self.written = 0  # op messages
        self.add = self._waiting.append  # the hot path: one decided half's queue offset

    @property
    def waiting(self) -> Sequence[int]:
        """The half queue offsets without an op message yet."""
        return self._waiting

    def add_all(self, queue_offsets: Iterable[int]) -> None:
        """Collect several offsets, for example those that a crash left without an op message."""
        self._waiting.extend(queue_offsets)

    def tick(self, now_ms: int) -> int:
        """Write what is due; return the milliseconds until the next call."""
        if not self._waiting:
            self._due_ms = now_ms + self._interval_ms
            return self._interval_ms
        if now_ms < self._due_ms and self._size() < self._size_max:
            return self._due_ms - now_ms
        if not self._write(RECORDS_PER_TICK):
            return RETRY_MS
        if self._size() >= self._size_max:
            return 0
        self._due_ms = now_ms + self._interval_ms
        return self._interval_ms

    def drain(self) -> None:
        """Write everything that waits; for an orderly stop."""
        while self._waiting and self._write(RECORDS_PER_TICK):
            pass

    def _size(self) -> int:
        """Return about how many body bytes wait, estimated from the last offset."""
        waiting = self._waiting
        return len(waiting) * (len(str(waiting[-1])) + 1) if waiting else 0

    def _write(self, records_max: int) -> bool:
        """Write up to ``records_max`` op messages; return False if the store refuses."""
        requests: list[AppendRequest] = []
        count = 0
        while count < len(self._waiting) and len(requests) < records_max:
            body, joined = self._body(count)
            count += joined
            requests.append(self._request(body))
        try:
            self._append(requests)
        except StoreError as error:
            logger.warning("event=ops_not_written waiting=%d error=%r", len(self._waiting), error)
            return False
        del self._waiting[:count]
        self.written += len(requests)
        return True

    def _body(self, start: int) -> tuple[bytes, int]:
        """Join offsets from ``start`` on until the body is full; return it and their number."""
        parts: list[str] = []
        size = 0
        for queue_offset in self._waiting[start : start + self._size_max]:
            parts.append(f"{queue_offset},")
            size += len(parts[-1])
            if size >= self._size_max:
                break
        return "".join(parts).encode(), len(parts)

    def _request(self, body: bytes) -> AppendRequest:
        return AppendRequest(
            topic=OP_TOPIC,
            queue_id=0,
            body=body,
            properties=_PROPERTIES,
            tags_code=_TAGS_CODE,
            born_timestamp=self._now_ms(),
            born_host=self._host,
            store_host=self._host,
        )
