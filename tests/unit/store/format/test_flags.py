"""The bits of sys_flag."""

import pytest

from halfmq.store.format.flags import (
    COMPRESSED,
    HOSTS_MASK,
    NO_QUEUE_ENTRY,
    CompressionType,
    TransactionType,
    compression_type,
    transaction_type,
    with_host_bits,
    with_transaction_type,
)


@pytest.mark.parametrize("kind", TransactionType)
def test_the_transaction_bits_can_be_replaced_alone(kind: TransactionType) -> None:
    """All other bits stay, also unknown ones."""
    changed = with_transaction_type(0x7000_0F77, kind)

    assert transaction_type(changed) == kind
    assert changed & ~0xC == 0x7000_0F77 & ~0xC


def test_only_undecided_and_rolled_back_records_have_no_queue_entry() -> None:
    """Consumers must see neither gaps in a queue nor half messages."""
    with_entry = {kind for kind in TransactionType if not kind & NO_QUEUE_ENTRY}

    assert with_entry == {TransactionType.NONE, TransactionType.COMMIT}


def test_host_bits_follow_the_hosts() -> None:
    """Bits that the flags had before do not matter."""
    assert with_host_bits(HOSTS_MASK | 0x8, bytes(8), bytes(8)) == 0x8
    assert with_host_bits(0x8, bytes(20), bytes(20)) == HOSTS_MASK | 0x8


def test_the_flags_say_how_a_body_is_compressed() -> None:
    """Old clients set only one bit, which means ZLIB; an unknown type is an error."""
    assert compression_type(CompressionType.ZLIB) is None
    assert compression_type(COMPRESSED) is CompressionType.UNSPECIFIED
    assert compression_type(COMPRESSED | 0x200 | 0x8) is CompressionType.ZSTD
    with pytest.raises(ValueError, match="1792"):
        compression_type(COMPRESSED | 0x700)
