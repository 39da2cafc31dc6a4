"""Options of the Spark source: what is taken and what is refused, and how."""

from __future__ import annotations

import pytest

from halfmq.spark_jobs.errors import OptionError
from halfmq.spark_jobs.options import PARTITION_BYTES, ReadOptions


def test_names_of_options_do_not_depend_on_case() -> None:
    """Spark hands them over in lower case; people write them as the page does."""
    options = ReadOptions.parse({"PATH": "/log", "includevalue": "TRUE", "ValueTopics": "a, b,"})

    assert options.path == "/log"
    assert options.include_value
    assert options.value_topics == frozenset({"a", "b"})
    assert options.wanted.value_topics is None  # all bodies include those of some topics


def test_defaults_read_the_whole_log_without_bodies() -> None:
    """The cheap read is the one without options."""
    options = ReadOptions.parse({"path": "/log"})

    assert options == ReadOptions("/log")
    assert not options.has_value
    assert options.max_partition_bytes == PARTITION_BYTES


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("64m", 64 << 20), ("64MB", 64 << 20), ("2 g", 2 << 30)]
)
def test_sizes_have_units(text: str, size: int) -> None:
    """As in Spark's own options."""
    assert ReadOptions.parse({"path": "/", "maxPartitionBytes": text}).max_partition_bytes == size


def test_offsets_are_numbers_or_the_ends() -> None:
    """As in Spark's Kafka source."""
    options = ReadOptions.parse({"path": "/", "startingOffsets": "100", "endingOffsets": "latest"})

    assert (options.starting_offsets, options.ending_offsets) == (100, None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "no path"),
        ({"path": "/", "verifyCRCs": "true"}, "unknown option verifycrcs: did you mean verifyCrc"),
        ({"path": "/", "zzz": "1"}, "known are path, startingOffsets"),
        ({"path": "/", "verifyCrc": "yes"}, "verifyCrc=yes: expected false or true"),
        ({"path": "/", "mode": "DROPMALFORMED"}, "expected PERMISSIVE or FAILFAST"),
        ({"path": "/", "batchRows": "0"}, "batchRows=0: expected a positive number"),
        ({"path": "/", "batchRows": "many"}, "batchRows=many"),
        ({"path": "/", "startingOffsets": "latest"}, "expected earliest or a physical offset"),
        ({"path": "/", "endingOffsets": "-1"}, "expected latest or a physical offset"),
        ({"path": "s3://bucket/log"}, "only local paths can be read, not s3:"),
    ],
)
def test_what_is_wrong_is_named_with_what_was_expected(options: dict[str, str], said: str) -> None:
    """A misspelt option that does nothing would pass for a clean log."""
    with pytest.raises(OptionError, match=said):
        ReadOptions.parse(options)


def test_file_urls_are_local_paths() -> None:
    """Spark users write them."""
    assert ReadOptions.parse({"path": "file:///a%20b/log"}).path == "/a b/log"
