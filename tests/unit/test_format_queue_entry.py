"""Consume-queue entries, byte for byte."""

from halfmq.store.format.queue_entry import PRE_BLANK, QueueEntry, unpack_entries, unpack_entry


def test_an_entry_is_byte_for_byte_what_rocketmq_writes() -> None:
    """A consume queue of ours must open in RocketMQ, and theirs in ours."""
    on_disk = bytes.fromhex("0000000000001000 00000065 0000000000000041")

    assert QueueEntry(physical_offset=4096, size=101, tags_code=65).pack() == on_disk
    assert unpack_entry(on_disk) == QueueEntry(4096, 101, 65)


def test_a_tags_code_keeps_its_sign() -> None:
    """Java extends the hash to 64 bits with its sign."""
    on_disk = bytes.fromhex("0000000000001000 00000065 ffffffffe897bb69")

    assert QueueEntry(4096, 101, -392709271).pack() == on_disk
    assert unpack_entry(b"\0" + on_disk, 1).tags_code == -392709271


def test_a_delayed_entry_holds_its_due_time() -> None:
    """The field is 64 bits wide for that."""
    on_disk = bytes.fromhex("0000000000001000 00000065 0000018bcfe58f8b")

    assert QueueEntry(4096, 101, 1_700_000_010_123).pack() == on_disk


def test_a_pre_blank_is_byte_for_byte_what_rocketmq_writes() -> None:
    """It fills a queue whose first message has not offset 0."""
    assert PRE_BLANK.pack() == bytes.fromhex("0000000000000000 7fffffff 0000000000000000")
    assert PRE_BLANK.is_valid


def test_unwritten_space_is_no_valid_entry() -> None:
    """Scans end there."""
    entries = list(unpack_entries(QueueEntry(0, 91, 0).pack() + bytes(40)))

    assert [entry.is_valid for entry in entries] == [True, False, False]
    assert not QueueEntry(-1, 91, 0).is_valid
    assert not QueueEntry(0, -91, 0).is_valid
