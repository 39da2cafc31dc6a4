"""What recovery needs of records that follow each other: which queue entries they make.

A few long pieces of queues instead of thousands of records: of a run of like records, which is
taken apart at once (``log_run``).
"""

from typing import NamedTuple, TypeAlias

Share: TypeAlias = tuple[tuple[bytes, int], int, bytes, int]
"""What a portion has of one queue: its topic and id, the queue offset of the first record, their
queue entries and the physical offset behind the last one. Queue offsets follow each other."""


class Portion(NamedTuple):
    """Whole records that follow each other, and their places in queues.

    A record begins behind the last one, and no sector under the properties of any looks as if it
    was never written (``log_scan.is_torn``).
    """

    start: int  # physical offset of the first
    end: int  # and behind the last
    last_record: int  # physical offset of that
    length: int  # records
    sys_flags: int  # bits that any of them has
    store_timestamp: int  # of the last one, in ms
    shares: list[Share]
