"""What recovery needs of records that follow each other: which queue entries they make.

A few long pieces of queues instead of thousands of records: of a run of like records, which is
taken apart at once (``log_run``), or of any others, gathered one by one (``gathering``).
"""

from typing import Final, NamedTuple, TypeAlias

from .format.flags import TRANSACTION_MASK
from .quiet import TRANSACTION_TOPICS

_TRANSACTION_TOPICS: Final = frozenset(topic.encode() for topic in TRANSACTION_TOPICS)

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

    @property
    def is_about_transactions(self) -> bool:
        """Whether a record in it may say something about a transaction."""
        return bool(self.sys_flags & TRANSACTION_MASK) or any(
            key[0] in _TRANSACTION_TOPICS for key, *_ in self.shares
        )
