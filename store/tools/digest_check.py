"""Compare log and index with their digests, which also cover bytes without a checksum."""

import sys
from collections.abc import Iterable
from pathlib import Path

from attrs import define, field

from ..files import disk
from ..files.mapped_file_queue import MappedFileQueue
from ..integrity.file_digest import Block, digest_of
from ..log.resync import Damage
from .findings import Findings


@define(eq=False, repr=False)
class DigestCheck:
    """Checks the files of a store that have a digest.

    ``files`` are those of the log; ``damaged_ranges`` of it are reported already.
    """

    _root: Path
    _files: MappedFileQueue
    _damaged_ranges: list[Damage]
    _findings: Findings
    bytes: int = field(init=False, default=0)  # of the log that have a digest
    index_bytes: int = field(init=False, default=0)

    def run(self, ends: dict[int, int]) -> None:
        """Check the log; ``ends`` maps each file to the end of its last record.

        Bytes after that do not count, except for the blank that ends a file.
        """
        for base, end in ends.items():
            self.bytes += self._check(self._files.path(base), end - base, base)

    def check_index(self, paths: Iterable[Path]) -> None:
        """Check index files, as far as halfmq has used them."""
        for path in paths:
            self.index_bytes += self._check(path, sys.maxsize, None)

    def _check(self, path: Path, end: int, base: int | None) -> int:
        """Compare a file up to ``end`` with its digest; return how many bytes that covers.

        ``base`` is the physical offset of a file of the log.
        """
        digest = digest_of(self._root, path)
        if digest is None:
            return 0
        try:
            with disk.opened(path) as fd:
                for block in digest.blocks(fd):
                    if block.position < end and not block.is_sound:
                        self._report(path, block, end, base)
        except FileNotFoundError:
            return 0  # deleted by age
        return min(digest.end, end)

    def _report(self, path: Path, block: Block, end: int, base: int | None) -> None:
        """Report a block that differs, unless its damage is reported already."""
        flipped = block.flipped_bit()
        if flipped is None:
            start, stop = block.position, block.end
            detail = f"some of the {min(stop, end) - start} bytes from here on have changed"
        else:
            start, bit = flipped
            stop = start + 1
            detail = f"bit {bit} of this byte is flipped"
        offset = None if base is None else base + start
        if offset is not None and any(
            damaged.offset < offset + stop - start and offset < damaged.end
            for damaged in self._damaged_ranges
        ):
            return  # further damage in the block cannot be detected
        if start < end:
            self._findings.add("bytes_changed", path, detail, position=start, offset=offset)
