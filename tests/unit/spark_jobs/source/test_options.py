"""Options of the Spark source: what is taken and what is refused, and how."""

from __future__ import annotations

import pytest

from halfmq.spark_jobs.errors import OptionError
from halfmq.spark_jobs.source.options import PARTITION_BYTES, QueueOptions, ReadOptions


def test_names_of_options_do_not_depend_on_case() -> None:
    """Spark hands them over in lower case; people write them as the page does."""
    options = ReadOptions.parse({"PATH": "/log", "includevalue": "TRUE", "ValueTopics": "a, b,"})

    assert options.path == "/log"
    assert options.include_value
    assert options.value_topics == frozenset({"a", "b"})
    assert options.bodies_of is None  # all bodies include those of some topics


def test_defaults_read_the_whole_log_without_bodies() -> None:
    """The cheap read is the one without options."""
    options = ReadOptions.parse_batch({"path": "/log"})

    assert options == ReadOptions(path="/log")
    assert not options.has_value
    assert options.max_partition_bytes == PARTITION_BYTES


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("64m", 64 << 20), ("64MB", 64 << 20), ("2 g", 2 << 30)]
)
def test_sizes_have_units(text: str, size: int) -> None:
    """As in Spark's own options."""
    assert (
        ReadOptions.parse_batch({"path": "/", "maxPartitionBytes": text}).max_partition_bytes
        == size
    )


def test_offsets_are_numbers_or_the_ends() -> None:
    """As in Spark's Kafka source."""
    options = ReadOptions.parse_batch(
        {"path": "/", "startingOffsets": "100", "endingOffsets": "latest"}
    )

    assert (options.starting_offsets, options.ending_offsets) == (100, None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "no path"),
        ({"path": "/", "verifyCRCs": "true"}, "unknown option verifycrcs: did you mean verifyCrc"),
        ({"path": "/", "zzz": "1"}, "known are path, paths, maxPartitionBytes"),
        ({"path": "/", "verifyCrc": "yes"}, "verifyCrc=yes: expected false or true"),
        ({"path": "/", "mode": "DROPMALFORMED"}, "expected PERMISSIVE or FAILFAST"),
        ({"path": "/", "batchRows": "0"}, "batchRows=0: expected a positive number"),
        ({"path": "/", "batchRows": "many"}, "batchRows=many"),
        ({"path": "/", "startingOffsets": "latest"}, "expected earliest or a physical offset"),
        ({"path": "/", "endingOffsets": "-1"}, "expected latest or a physical offset"),
        ({"path": "/", "endingTimestamp": "today"}, "endingTimestamp=today: expected milliseconds"),
        ({"path": "/", "memoryMap": "no"}, "memoryMap=no: expected true or false"),
        ({"path": "/", "maxBytesPerTrigger": "0"}, "maxBytesPerTrigger=0: expected a positive"),
    ],
)
def test_what_is_wrong_is_named_with_what_was_expected(options: dict[str, str], said: str) -> None:
    """A misspelt option that does nothing would pass for a clean log."""
    with pytest.raises(OptionError, match=said):
        ReadOptions.parse_batch(options)


def test_file_urls_are_local_paths() -> None:
    """Spark users write them; those of other file systems stay as they are."""
    assert ReadOptions.parse_batch({"path": "file:///a%20b/log"}).path == "/a b/log"
    assert ReadOptions.parse_batch({"path": "s3://bucket/a%20b"}).path == "s3://bucket/a%20b"


def test_a_stream_begins_at_the_end_unless_told_otherwise() -> None:
    """As Spark's Kafka source does; a read begins at the first record."""
    assert ReadOptions.parse_stream({"path": "/"}).from_latest
    assert ReadOptions.parse_stream({"path": "/", "startingOffsets": "LATEST"}).from_latest
    for start, offset in (("earliest", None), ("77", 77)):
        options = ReadOptions.parse_stream({"path": "/", "startingOffsets": start})
        assert (options.from_latest, options.starting_offsets) == (False, offset)
    with pytest.raises(OptionError, match="endingTimestamp: a stream ends at an offset"):
        ReadOptions.parse_stream({"path": "/", "endingTimestamp": "7"})


def test_queues_have_options_of_their_own() -> None:
    """Offsets there are those of the queues."""
    options = QueueOptions.parse({"path": "/", "startingOffsets": "3", "subscribe": "a"})

    assert options == QueueOptions(path="/", subscribe=frozenset({"a"}), starting_offsets=3)
    with pytest.raises(OptionError, match="expected latest or a queue offset"):
        QueueOptions.parse({"path": "/", "endingOffsets": "-1"})
    with pytest.raises(OptionError, match="no path"):
        QueueOptions.parse({})
