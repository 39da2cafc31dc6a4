"""Fork safety: bind a client to the process and the event loop on which it was started.

A fork copies everything but threads. In the child, a client would wait for an event loop that does
not run, over sockets that belong to the parent. So a client rejects calls from another process or
loop with an error that says how to fix it.

A forked child must not disturb its parent either: any operation on an inherited socket, even a
garbage collection that closes a transport, affects the parent's connection or the epoll instance
that both share. So every forked child replaces the sockets by ``/dev/null`` before it runs anything
else. This also lets the broker notice the end of the parent while the child lives.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final

from ..errors import ForkedError, WrongLoopError

_sockets: Final[dict[int, tuple[int, int]]] = {}
"""Open sockets of all clients: descriptor to device and inode, which identify the socket."""


class LoopBinding:
    """The process and the event loop on which a client was started."""

    __slots__ = ("_loop", "_pid", "_what")

    def __init__(self, what: str) -> None:
        """Bind to this process and the running loop; ``what`` names the client in errors."""
        self._what = what
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this is a forked child of the client's process."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Check that the caller runs in the client's process and on its loop.

        Raises:
            ForkedError: This is a forked child of the client's process.
            WrongLoopError: The caller runs on another loop, or on none.
        """
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:  # also in a coroutine whose loop is not running after a fork
            here = None
        if here is self._loop:
            return
        if self.forked:
            raise ForkedError(self._what, self._pid)
        raise WrongLoopError(self._what)


def track_socket(fd: int) -> None:
    """Register an open socket of a client, to be detached in forked children."""
    status = os.fstat(fd)
    _sockets[fd] = status.st_dev, status.st_ino


def untrack_socket(fd: int) -> None:
    """Remove a closed socket."""
    _sockets.pop(fd, None)


def _detach_sockets() -> None:
    """Replace the parent's sockets by ``/dev/null``; runs in a forked child."""
    if not _sockets:
        return
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd, identity in _sockets.items():
        try:
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) == identity:  # else closed, and its number reused
                os.dup2(nothing, fd, inheritable=False)
        except OSError:  # closed
            continue
    os.close(nothing)
    _sockets.clear()


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_detach_sockets)
