"""The CRC-32 of records, digests and tables: that of ``java.util.zip.CRC32``.

ISA-L's takes a sixth of zlib's time for a kibibyte. Every message pays it when it is written, every
start for all that it scans. Where there is no wheel of ISA-L, zlib's is used.
"""

__all__ = ["crc32"]

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32
