"""What goes into ``MessageStore.append`` and ``append_batch``, and what comes back."""

from array import array
from collections.abc import Sequence

import msgspec


class Draft(msgspec.Struct, gc=False, kw_only=True):
    """A record to append.

    The store fills in queue offset, physical offset, store timestamp, the CRCs and the IPv6 bits
    of ``sys_flag``. A draft must not change until the index has taken its keys from it
    (``MessageStore.tick``): do not reuse one.
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
    unique_key: str | None = None
    """If that is all there is to index, and usual: of 32 ASCII characters. It spares the index to
    look for it. Empty: there is nothing to index. None: nobody has looked."""


class Appended(msgspec.Struct, gc=False):
    """Where a draft lies now."""

    physical_offset: int
    size: int
    queue_offset: int  # 0 of a prepared or rollback record, which is in no queue
    store_timestamp: int  # ms

    @property
    def end(self) -> int:
        """The record is on disk once ``durable_offset`` has reached this."""
        return self.physical_offset + self.size


class Units(msgspec.Struct, gc=False):
    """The messages of a batch, in columns of one length."""

    flags: Sequence[int]
    bodies: Sequence[bytes]
    properties: Sequence[bytes]
    tags_codes: Sequence[int]
    unique_keys: bytes | None = None
    """Of each message, if that is all there is to index, as ``format.index.joined_if_usual`` has
    them; spares the index to look for them."""

    def longest_properties(self) -> tuple[int, int]:
        """Return which message has the longest properties, and their size in bytes."""
        sizes = [*map(len, self.properties)]
        return sizes.index(max(sizes)), max(sizes)

    def in_columns(self) -> "Units":
        """Return itself."""
        return self


class AlikeUnits(msgspec.Struct, gc=False):
    """The messages of a batch if bodies and properties are of one size, and little differs.

    As of nearly all batches: what all have in common need not be made for each.
    """

    flag: int
    bodies: Sequence[bytes]
    head: bytes  # of the properties; each message's middle follows, and then the tail
    middles: Sequence[bytes]
    tail: bytes
    tags_code: int
    unique_keys: bytes | None = None  # as above

    @property
    def properties_size(self) -> int:
        """Bytes of the properties of each."""
        return len(self.head) + len(self.middles[0]) + len(self.tail)

    def longest_properties(self) -> tuple[int, int]:
        """Return a message and the size of its properties, as ``Units`` does."""
        return 0, self.properties_size

    def in_columns(self) -> Units:
        """Return the messages as if they had nothing in common."""
        count, head, tail = len(self.bodies), self.head, self.tail
        return Units(
            [self.flag] * count,
            self.bodies,
            [head + middle + tail for middle in self.middles],
            [self.tags_code] * count,
            self.unique_keys,
        )


class Batch(msgspec.Struct, gc=False, kw_only=True):
    """Messages for one queue that have everything in common but their content.

    What holds for a draft holds for it; there is at least one message.
    """

    topic: str
    queue_id: int
    units: Units | AlikeUnits
    sys_flag: int
    born_timestamp: int
    born_host: bytes
    store_host: bytes
    reconsume_times: int = 0

    def drafts(self) -> list[Draft]:
        """Return the messages one by one."""
        units = self.units.in_columns()
        columns = zip(units.flags, units.bodies, units.properties, units.tags_codes, strict=True)
        return [
            Draft(
                topic=self.topic,
                queue_id=self.queue_id,
                body=body,
                properties=properties,
                tags_code=tags_code,
                flag=flag,
                sys_flag=self.sys_flag,
                born_timestamp=self.born_timestamp,
                born_host=self.born_host,
                store_host=self.store_host,
                reconsume_times=self.reconsume_times,
            )
            for flag, body, properties, tags_code in columns
        ]


class AppendedBatch(msgspec.Struct, gc=False):
    """Where a batch lies now."""

    physical_offsets: "array[int]"  # int64
    end: int  # it is on disk once ``durable_offset`` has reached this
    queue_offset: int  # of its first message; the others follow
    store_timestamp: int  # ms
