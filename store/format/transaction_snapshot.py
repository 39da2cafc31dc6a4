"""The end of the file in which the broker keeps its undecided transactions.

What stands before it is the broker's own business. The end says of which log the file is, and holds
a checksum of everything, so that it can be judged without being understood.
"""

from struct import Struct
from typing import Final, NamedTuple

FILE_NAME: Final = "halfmqTransactions"  # below config/
FOOTER: Final = Struct(">qqIqI")
CRC_SIZE: Final = 4  # bytes; the last of the file, not covered by themselves


class SnapshotFooter(NamedTuple):
    """The last fields of the file."""

    log_end: int  # the log must reach this far for the file to count
    anchor_offset: int  # of a record that must be in the log; -1 for none
    anchor_crc: int  # CRC-32 of its bytes
    rows: int
    crc: int  # CRC-32 of everything before it
