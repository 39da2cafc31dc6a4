"""The footer of the broker's snapshot of undecided transactions.

Only the broker knows the format of the rows before it. The footer identifies the log that the file
belongs to and has a checksum of everything, so that tools can verify the file without reading rows.
"""

from struct import Struct
from typing import Final, NamedTuple

FILE_NAME: Final = "halfmqTransactions"  # below config/
FOOTER: Final = Struct(">qqIqI")
CRC_SIZE: Final = 4  # bytes; the last field of the footer


class SnapshotFooter(NamedTuple):
    """The last fields of the file."""

    log_end: int  # the log must reach this far for the file to count
    anchor_offset: int  # of a record that must be in the log; -1 for none
    anchor_crc: int  # CRC-32 of its bytes
    rows: int
    crc: int  # CRC-32 of everything before it
