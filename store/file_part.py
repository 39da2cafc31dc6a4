"""A part of an open file that the system sends from the page cache to a socket, without a copy.

What ``sendfile(2)`` does not find in memory it reads from the disk, and whoever calls it waits. So
nobody gets a part of which ``LogReader.part`` has not seen that it is there, just now or a moment
ago (``warm_blocks``).

Until the peer has taken it, what was sent is the page of the file itself: nothing may be written
over it, not even when the file is deleted (``leaving``).
"""

import msgspec

from . import disk


class FilePart(msgspec.Struct, frozen=True, gc=False):
    """Where it lies; of use until the store is called again, which may close the file."""

    fd: int
    position: int
    length: int

    def send(self, connected: int, sent: int = 0) -> int:
        """Send what follows the first ``sent`` bytes; return how many the socket has taken.

        Raises:
            BlockingIOError: It takes none now.
            OSError: The connection is gone, or the file system sends nothing in this way.
        """
        assert disk.sendfile is not None  # or there would be no part
        return disk.sendfile(connected, self.fd, self.position + sent, self.length - sent)

    def rest(self, sent: int = 0) -> bytes:
        """Return what follows the first ``sent`` bytes; less if the file ends before it.

        Raises:
            OSError: It cannot be read.
        """
        return read_fully(self.fd, self.length - sent, self.position + sent)


def read_fully(fd: int, length: int, position: int) -> bytes:
    """Return so many bytes of a file, fewer at its end."""
    piece = disk.pread(fd, length, position)
    while len(piece) < length:  # the kernel returns at most 2 GiB, and less when interrupted
        more = disk.pread(fd, length - len(piece), position + len(piece))
        if not more:
            break
        piece += more
    return piece
