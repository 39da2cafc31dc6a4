"""Comparing the log with its digests: what no checksum of a record covers."""

from pathlib import Path

from .. import disk
from ..digest import digest_path, find_flipped_bit, load_digest
from ..format.crc import crc32
from ..mapped_file_queue import MappedFileQueue
from .findings import Findings
from .log_walk import Hole


class DigestCheck:
    """Checks the files of a log; ``used`` is where the records of each file end."""

    def __init__(
        self, root: Path, files: MappedFileQueue, holes: list[Hole], findings: Findings
    ) -> None:
        """``holes`` are the damaged parts of the log that were told already."""
        self._root = root
        self._files = files
        self._holes = holes
        self._findings = findings
        self.bytes = 0  # that have a digest

    def run(self, ends: dict[int, int]) -> None:
        """Check every file; ``ends`` says of each where its last record ends, by physical offset.

        Behind that nothing means anything, but for the blank that ends a file.
        """
        for base, end in ends.items():
            path = self._files.path(base)
            digest = load_digest(digest_path(self._root, path))
            if digest is None:
                continue
            try:
                fd = disk.open_file(path, disk.READ)
            except FileNotFoundError:
                continue  # deleted by age
            try:
                self.bytes += min(digest.end, end - base)
                for position, content, crc in digest.blocks(fd):
                    if base + position < end and crc32(content) != crc:
                        self._tell(path, base, position, content, crc, end)
            finally:
                disk.close(fd)

    def _tell(
        self, path: Path, base: int, position: int, content: bytes, crc: int, end: int
    ) -> None:
        flipped = find_flipped_bit(content, crc)
        if flipped is not None:
            at = base + position + flipped[0]
            if at >= end or any(hole.start <= at < hole.end for hole in self._holes):
                return
            self._findings.add(
                "bytes_changed",
                path,
                f"bit {flipped[1]} of this byte is flipped",
                position=position + flipped[0],
                offset=at,
            )
            return
        start, stop = base + position, base + position + len(content)
        if any(hole.start < stop and start < hole.end for hole in self._holes):
            return  # whether there is more than what was told cannot be said
        self._findings.add(
            "bytes_changed",
            path,
            f"some of the {min(stop, end) - start} bytes from here on are not as they were",
            position=position,
            offset=start,
        )
