"""What records tell about transactions, without Spark."""

from __future__ import annotations

from pathlib import Path

from halfmq.spark_jobs.log.checksums import sound_records
from halfmq.spark_jobs.log.log_end import survey
from halfmq.spark_jobs.log.rows import Rows
from halfmq.spark_jobs.log.segment_reader import SegmentReader
from halfmq.spark_jobs.log.transaction_parts import Part, all_parts
from halfmq.spark_jobs.source.events import read_events
from tests.support.log_writer import Apache, LogWriter


def test_a_damaged_op_marks_nothing_as_decided(tmp_path: Path) -> None:
    """Its body is a list of numbers, and one flipped bit makes another number of a number."""
    log = LogWriter(tmp_path)
    transactions = Apache(log, op_each=True)
    for _ in range(3):
        transactions.rollback(transactions.half())
    path = log.close() / f"{0:020}"
    content = bytearray(path.read_bytes())
    damaged = log.written[3]
    content[damaged.offset + 88] ^= 1  # the first byte of the body: "1" becomes "0"
    path.write_bytes(content)
    extent = survey(tmp_path)
    (segment,) = extent.segments
    (rows,) = SegmentReader(segment, extent.limit(segment)).scan(0, segment.size)
    assert isinstance(rows, Rows)

    events = read_events(rows, all_parts(rows), sound_records(rows)).events

    assert events["halfQueueOffset"][events["part"] == Part.OP].tolist() == [0, 2]
