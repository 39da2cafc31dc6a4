"""The bits of a record's ``sys_flag``.

Source: RocketMQ ``MessageSysFlag.java``. Bits without a name here are stored unchanged.
"""

from enum import IntEnum
from typing import Final

from .ids import HOST_V4_SIZE

COMPRESSED: Final = 0x0001  # the body is compressed, and the CRC covers the compressed bytes
TRANSACTION_MASK: Final = 0x000C
BORN_HOST_V6: Final = 0x0010
STORE_HOST_V6: Final = 0x0020
HOSTS_MASK: Final = BORN_HOST_V6 | STORE_HOST_V6
INNER_BATCH: Final = 0x0080
COMPRESSION_MASK: Final = 0x0700


class TransactionType(IntEnum):
    """The role of a record in a transaction; the value is the masked ``sys_flag``."""

    NONE = 0x0
    PREPARED = 0x4  # never stored by RocketMQ: halves are rewritten to the half topic as NONE
    COMMIT = 0x8
    ROLLBACK = 0xC


NO_QUEUE_ENTRY: Final = TransactionType.PREPARED & TransactionType.ROLLBACK
"""The bit of ``sys_flag`` that prepared and rollback records have and others have not. They take no
queue offset, or consumers would see a gap. Source: RocketMQ
``CommitLogDispatcherBuildConsumeQueue``."""


class CompressionType(IntEnum):
    """How a compressed body is packed; the value is the masked ``sys_flag``."""

    UNSPECIFIED = 0x000  # written by old clients, and means ZLIB
    LZ4 = 0x100  # LZ4 frame format
    ZSTD = 0x200
    ZLIB = 0x300


def transaction_type(sys_flag: int) -> TransactionType:
    """Return the transaction type of a record with these flags."""
    return TransactionType(sys_flag & TRANSACTION_MASK)


def with_transaction_type(sys_flag: int, kind: TransactionType) -> int:
    """Return the flags with the transaction bits replaced by ``kind``."""
    return (sys_flag & ~TRANSACTION_MASK) | kind


def with_host_bits(sys_flag: int, born_host: bytes, store_host: bytes) -> int:
    """Return the flags with the IPv6 bits set as the two packed hosts need them."""
    sys_flag &= ~HOSTS_MASK
    if len(born_host) != HOST_V4_SIZE:
        sys_flag |= BORN_HOST_V6
    if len(store_host) != HOST_V4_SIZE:
        sys_flag |= STORE_HOST_V6
    return sys_flag


def compression_type(sys_flag: int) -> CompressionType | None:
    """Return the compression of the body; None if it is not compressed.

    Raises:
        ValueError: The bits name no compression that RocketMQ knows.
    """
    if not sys_flag & COMPRESSED:
        return None
    return CompressionType(sys_flag & COMPRESSION_MASK)
