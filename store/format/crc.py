"""The CRC-32 of records, digests and tables: that of ``java.util.zip.CRC32``.

It is computed for every message that is written and for all that a start scans. ISA-L's takes a
sixth of zlib's time for a kibibyte; zlib's is used if ISA-L is not installed.
"""

__all__ = ["crc32"]

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32
