"""Bind a client to the process and the event loop that it was started on.

A fork copies everything but threads. A copied client would wait for a loop that nobody runs, over
sockets that belong to the parent. So a client refuses calls from another process or loop with an
error that says how to fix it.

A forked child must not disturb its parent either: whatever it does with a copied socket, even a
garbage collection that closes a transport, reaches the parent's connection or the epoll instance
that both share. So every forked child replaces the sockets by ``/dev/null`` before it runs anything
else. The broker then also notices the end of the parent while the child lives.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final

from ..errors import ForkedError, WrongLoopError

_sockets: Final[dict[int, tuple[int, int]]] = {}
"""Open sockets of all clients: descriptor, and by which device and inode to know it again."""


class LoopBinding:
    """The process and the event loop that a client was started on."""

    __slots__ = ("_loop", "_pid", "_what")

    def __init__(self, what: str) -> None:
        """Take the running loop; ``what`` names the client in errors."""
        self._what = what
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this is a forked child of the client's process."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Return if the caller runs in the client's process and loop.

        Raises:
            ForkedError: This is a forked child of the client's process.
            WrongLoopError: This is another loop, or the thread of another one.
        """
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:  # also in a coroutine whose loop was forked away under it
            here = None
        if here is self._loop:
            return
        if self.forked:
            raise ForkedError(self._what, self._pid)
        raise WrongLoopError(self._what)


def note_socket(fd: int) -> None:
    """A client has opened a socket."""
    status = os.fstat(fd)
    _sockets[fd] = status.st_dev, status.st_ino


def forget_socket(fd: int) -> None:
    """It is closed."""
    _sockets.pop(fd, None)


def _let_go() -> None:
    """In a forked child: the sockets are the parent's."""
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
    os.register_at_fork(after_in_child=_let_go)
