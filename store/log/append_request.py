"""The argument and the result of ``MessageStore.append``."""

import msgspec


class AppendRequest(msgspec.Struct, gc=False, kw_only=True):
    """A record to append.

    The store fills in queue offset, physical offset, store timestamp, the CRCs and the IPv6 bits
    of ``sys_flag``.
    """

    topic: str
    queue_id: int
    body: bytes
    properties: bytes
    tags_code: int = 0  # see properties.tags_code; the schedule topic's is computed by the store
    flag: int = 0
    sys_flag: int = 0
    born_timestamp: int
    born_host: bytes  # packed address and int32 port: 8 or 20 bytes
    store_host: bytes
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0


class AppendResult(msgspec.Struct, gc=False):
    """Where an appended record lies."""

    physical_offset: int
    size: int
    queue_offset: int  # 0 of a prepared or rollback record, which is in no queue
    store_timestamp: int  # ms

    @property
    def end(self) -> int:
        """The record is on disk once ``durable_offset`` has reached this."""
        return self.physical_offset + self.size
