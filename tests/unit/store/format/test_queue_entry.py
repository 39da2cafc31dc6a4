"""Consume-queue entries, byte for byte."""

import numpy as np

from halfmq.store.format.queue_entry import (
    DTYPE,
    ENTRY_SIZE,
    FILTERED,
    FILTERED_DTYPE,
    PHYSICAL_OFFSET,
    PRE_BLANK,
    QueueEntry,
    offsets_of,
    sizes_of,
    tags_codes_of,
    unpack_entries,
    unpack_entry,
)


def test_an_entry_is_byte_for_byte_what_rocketmq_writes() -> None:
    """RocketMQ must be able to read halfmq's consume queues, and halfmq RocketMQ's."""
    on_disk = bytes.fromhex("0000000000001000 00000065 0000000000000041")

    assert QueueEntry(physical_offset=4096, size=101, tags_code=65).pack() == on_disk
    assert unpack_entry(on_disk) == QueueEntry(4096, 101, 65)


def test_a_tags_code_keeps_its_sign() -> None:
    """Java extends the hash to 64 bits with its sign."""
    on_disk = bytes.fromhex("0000000000001000 00000065 ffffffffe897bb69")

    assert QueueEntry(4096, 101, -392709271).pack() == on_disk
    assert unpack_entry(b"\0" + on_disk, 1).tags_code == -392709271


def test_a_delayed_entry_holds_its_due_time() -> None:
    """A time in ms needs all 64 bits of the field."""
    on_disk = bytes.fromhex("0000000000001000 00000065 0000018bcfe58f8b")

    assert QueueEntry(4096, 101, 1_700_000_010_123).pack() == on_disk


def test_a_pre_blank_is_byte_for_byte_what_rocketmq_writes() -> None:
    """It fills a queue whose first message has not offset 0."""
    assert PRE_BLANK.pack() == bytes.fromhex("0000000000000000 7fffffff 0000000000000000")
    assert PRE_BLANK.is_valid


def test_unwritten_space_is_no_valid_entry() -> None:
    """Scans of a queue end at the first invalid entry."""
    entries = list(unpack_entries(QueueEntry(0, 91, 0).pack() + bytes(40)))

    assert [entry.is_valid for entry in entries] == [True, False, False]
    assert not QueueEntry(-1, 91, 0).is_valid
    assert not QueueEntry(0, -91, 0).is_valid


def test_all_ways_to_read_a_field_agree_with_the_whole_entry() -> None:
    """One field of many entries, one field of one entry, or an array of numpy."""
    entries = [QueueEntry(1 << 40, 101, -392709271), QueueEntry(4096, 0x7FFF_FFFF, 1 << 31)]
    offsets, sizes, _ = zip(*entries, strict=True)
    content = b"".join(entry.pack() for entry in entries)
    low_codes = (-392709271, -(1 << 31))  # the low 32 bits, with Java's sign

    assert offsets_of(2).unpack(content) == offsets
    assert sizes_of(2).unpack(content) == sizes
    assert tuple(np.frombuffer(content, [*FILTERED_DTYPE])["tags_code"]) == low_codes
    assert tags_codes_of(2).unpack(content) == low_codes
    assert [*FILTERED.iter_unpack(content)] == [*zip(offsets, sizes, low_codes, strict=True)]
    assert PHYSICAL_OFFSET.unpack_from(content, ENTRY_SIZE) == (4096,)
    assert np.frombuffer(content, list(DTYPE)).tolist() == entries
