"""Digests of single files, for tests."""

from pathlib import Path
from zlib import crc32

from halfmq.store.files import disk
from halfmq.store.format.digest import BLOCK
from halfmq.store.integrity.file_digest import Digest

RECORDS = 120
FILE_SIZE = 4 * BLOCK


def differing(digest: Digest, path: Path) -> list[int]:
    """Return the positions of the blocks that have changed."""
    with disk.opened(path) as fd:
        return [at for at, content, crc in digest.blocks(fd) if crc32(content) != crc]


def digest_of(path: Path, *ends: int) -> Digest:
    """Return the digest of a file, extended to each of ``ends`` in turn."""
    digest = Digest()
    with disk.opened(path) as fd:
        for end in ends:
            digest.extend(fd, end)
    return digest
