"""The bits of sys_flag."""

import pytest

from halfmq.store.format.flags import (
    COMPRESSED,
    HOSTS_MASK,
    CompressionType,
    TransactionType,
    compression_type,
    has_queue_entry,
    is_indexed,
    transaction_type,
    with_host_bits,
    with_transaction_type,
)


@pytest.mark.parametrize("kind", TransactionType)
def test_the_transaction_bits_can_be_replaced_alone(kind: TransactionType) -> None:
    """All other bits survive, also those that nobody knows yet."""
    changed = with_transaction_type(0x7000_0F77, kind)

    assert transaction_type(changed) == kind
    assert changed & ~0xC == 0x7000_0F77 & ~0xC


def test_only_undecided_and_rolled_back_records_have_no_queue_entry() -> None:
    """Consumers read through the queue; they must see no gap and no half message."""
    with_entry = {kind for kind in TransactionType if has_queue_entry(kind | 0x701)}

    assert with_entry == {TransactionType.NONE, TransactionType.COMMIT}


def test_only_rolled_back_records_have_no_key() -> None:
    """As in RocketMQ."""
    indexed = {kind for kind in TransactionType if is_indexed(kind | 0x701)}

    assert indexed == set(TransactionType) - {TransactionType.ROLLBACK}


def test_host_bits_follow_the_hosts() -> None:
    """Whatever they were before."""
    assert with_host_bits(HOSTS_MASK | 0x8, bytes(8), bytes(8)) == 0x8
    assert with_host_bits(0x8, bytes(20), bytes(20)) == HOSTS_MASK | 0x8


def test_compression_is_told_by_the_flags() -> None:
    """Old clients set the one bit and mean ZLIB; an unknown type is an error, not a guess."""
    assert compression_type(CompressionType.ZLIB) is None
    assert compression_type(COMPRESSED) is CompressionType.UNSPECIFIED
    assert compression_type(COMPRESSED | 0x200 | 0x8) is CompressionType.ZSTD
    with pytest.raises(ValueError, match="1792"):
        compression_type(COMPRESSED | 0x700)
