"""Compress and decompress the body of a message, in every way that RocketMQ's clients do.

zlib is what all of them do by default. Java clients since 5.0 may choose LZ4 (its frame format) or
ZSTD, whose libraries the extra ``halfmq[compression]`` installs.

Source: RocketMQ ``MessageSysFlag``, ``ZlibCompressor``, ``Lz4Compressor``, ``ZstdCompressor``.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Mapping
from typing import Final, Literal

from halfmq.store.format.flags import COMPRESSED, CompressionType, compression_type

Compression = Literal["zlib", "lz4", "zstd"]

COMPRESSIONS: Final[Mapping[str, str]] = {"zlib": "zlib", "lz4": "lz4", "zstd": "zstandard"}
"""Names of compressions, and the modules that they need."""

DECOMPRESSED_SIZE_MAX: Final = 64 << 20
"""Bytes a compressed body may grow to; 16 times the largest body a broker takes by default."""


ZLIB_LEVEL: Final = 5  # the official clients' rocketmq.message.compressLevel


def compress_body(body: bytes, over: int | None, kind: Compression) -> tuple[bytes, int]:
    """Return body and flags; compress a body that is long enough and gets shorter by it."""
    if over is None or len(body) < over:
        return body, 0
    compress, bits = _COMPRESS[kind]
    packed = compress(body)
    return (packed, COMPRESSED | bits) if len(packed) < len(body) else (body, 0)


def decompress_body(body: bytes, sys_flag: int, size_max: int = DECOMPRESSED_SIZE_MAX) -> bytes:
    """Return the body, decompressed if necessary.

    Raises:
        ValueError: The library is not installed, or the data is damaged or grows too large.
    """
    kind = compression_type(sys_flag)
    if kind is None:
        return body
    try:
        content, is_whole = _DECOMPRESS[kind](body, size_max)
    except ImportError as error:
        raise ValueError(
            f"compressed with {kind.name}: pip install 'halfmq[compression]' to read it"
        ) from error
    if len(content) > size_max:
        raise ValueError("compressed body grows beyond the limit")
    if not is_whole:
        raise ValueError("compressed body is cut short")
    return content


# Each returns the content, at most one byte beyond the limit, and whether the data was whole.


def _zlib(body: bytes, size_max: int) -> tuple[bytes, bool]:
    decompressor = zlib.decompressobj()
    try:
        content = decompressor.decompress(body, size_max + 1)
    except zlib.error as error:
        raise ValueError(f"damaged: {error}") from error
    return content, decompressor.eof


def _lz4(body: bytes, size_max: int) -> tuple[bytes, bool]:
    from lz4.frame import LZ4FrameDecompressor  # noqa: PLC0415 -- an extra

    decompressor = LZ4FrameDecompressor()
    try:
        content = decompressor.decompress(body, max_length=size_max + 1)
    except RuntimeError as error:
        raise ValueError(f"damaged: {error}") from error
    return content, decompressor.eof


def _zstd(body: bytes, size_max: int) -> tuple[bytes, bool]:
    from zstandard import ZstdDecompressor, ZstdError  # noqa: PLC0415 -- an extra

    decompressor = ZstdDecompressor().decompressobj()
    content = io.BytesIO()
    try:
        # It has no limit of its own. The format bounds what a slice grows to: a block of 128 KiB
        # takes at least four bytes.
        for begin in range(0, len(body), _ZSTD_SLICE):
            content.write(decompressor.decompress(body[begin : begin + _ZSTD_SLICE]))
            if content.tell() > size_max or decompressor.eof:
                break
    except ZstdError as error:
        raise ValueError(f"damaged: {error}") from error
    return content.getvalue(), decompressor.eof


_ZSTD_SLICE: Final = 256
"""Bytes decompressed at one time, at most 8 MiB of content."""

_DECOMPRESS: Final[Mapping[CompressionType, Callable[[bytes, int], tuple[bytes, bool]]]] = {
    CompressionType.UNSPECIFIED: _zlib,
    CompressionType.ZLIB: _zlib,
    CompressionType.LZ4: _lz4,
    CompressionType.ZSTD: _zstd,
}


def _pack_lz4(body: bytes) -> bytes:
    from lz4.frame import compress  # noqa: PLC0415 -- an extra

    return bytes(compress(body))


def _pack_zstd(body: bytes) -> bytes:
    from zstandard import ZstdCompressor  # noqa: PLC0415 -- an extra

    return ZstdCompressor().compress(body)


_COMPRESS: Final[Mapping[Compression, tuple[Callable[[bytes], bytes], int]]] = {
    # Every client reads compression bits 0 as zlib; older ones do not know the explicit 0x300.
    "zlib": (lambda body: zlib.compress(body, ZLIB_LEVEL), CompressionType.UNSPECIFIED),
    "lz4": (_pack_lz4, CompressionType.LZ4),
    "zstd": (_pack_zstd, CompressionType.ZSTD),
}
