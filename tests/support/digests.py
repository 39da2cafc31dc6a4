"""Digests of single files, for tests."""

from pathlib import Path
from zlib import crc32

from halfmq.store.files import disk
from halfmq.store.format.digest import BLOCK, pack_digests, unpack_digests
from halfmq.store.integrity.file_digest import Digest, digest_path, read_if_there

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


def stored_digest(root: Path, path: Path) -> bytes | None:
    """Return the digest of a file of a store as it lies on disk; None if it has none."""
    own = read_if_there(digest_path(root, path))
    return own if own is not None else _of_queue_ends(root).get(_name(path))


def store_digest(root: Path, path: Path, digest: Digest) -> None:
    """Replace the digest of a file of a store."""
    if "consumequeue" not in path.parts:
        digest.save(digest_path(root, path))
        return
    packed = _of_queue_ends(root) | {_name(path): digest.pack()}
    (root / "digests" / "consumequeue.ends").write_bytes(pack_digests(packed))


def _of_queue_ends(root: Path) -> dict[str, bytes]:
    return unpack_digests(read_if_there(root / "digests" / "consumequeue.ends") or b"")


def _name(path: Path) -> str:
    topic, queue_id, base = path.parts[-3:]
    return f"{topic}/{queue_id}/{int(base)}" if base.isdecimal() else ""
