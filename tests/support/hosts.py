"""Hosts with a network between them that can lose all packets: network namespaces of this machine.

Each host is a namespace with one interface, whose other end is a port of a bridge in a namespace of
its own. A host vanishes when its port leaves the bridge: its packets, and those for it, are lost,
and neither side is told. It needs root and iproute2.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_CLONE_NEWNET: Final = 0x4000_0000
_PREFIX: Final = "10.213.7"
_libc = ctypes.CDLL(None, use_errno=True)


class NoNetworkError(Exception):
    """There can be no such hosts here; the message says why."""


class Network:
    """Some hosts; made by `network`."""

    def __init__(self, hosts: tuple[str, ...]) -> None:
        self._namespaces = {host: f"halfmq-{os.getpid()}-{host}" for host in (*hosts, "bridge")}
        self._addresses = {host: f"{_PREFIX}.{at}" for at, host in enumerate(hosts, 1)}
        for namespace in self._namespaces.values():
            _ip("netns", "add", namespace)
        bridge = self._namespaces["bridge"]
        _ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", bridge, "link", "set", "bridge", "up")
        for host, address in self._addresses.items():
            namespace = self._namespaces[host]
            peer = ("peer", "name", host, "netns", bridge)
            _ip("-n", namespace, "link", "add", "net", "type", "veth", *peer)
            _ip("-n", namespace, "address", "add", f"{address}/24", "dev", "net")
            for interface in ("lo", "net"):
                _ip("-n", namespace, "link", "set", interface, "up")
            _ip("-n", bridge, "link", "set", host, "up")
            self.rejoin(host)

    def address(self, host: str) -> str:
        """Return the address of a host."""
        return self._addresses[host]

    @contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """Let this thread, and what it starts, be on a host."""
        with Path("/proc/thread-self/ns/net").open() as before:
            with Path("/run/netns", self._namespaces[host]).open() as there:
                _enter(there.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    def vanish(self, host: str) -> None:
        """Lose all packets of a host, and all for it."""
        _ip("-n", self._namespaces["bridge"], "link", "set", host, "nomaster")

    def rejoin(self, host: str) -> None:
        """Deliver packets of a host, and those for it, again."""
        _ip("-n", self._namespaces["bridge"], "link", "set", host, "master", "bridge")

    def close(self) -> None:
        """Remove the hosts."""
        for namespace in self._namespaces.values():
            _ip("netns", "delete", namespace)


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNetworkError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextmanager
def network(*hosts: str) -> Iterator[Network]:
    """Hosts for the length of the block.

    Raises:
        NoNetworkError: Root or iproute2 is missing, or namespaces are forbidden.
    """
    if shutil.which("ip") is None or os.geteuid():
        raise NoNetworkError("needs root and iproute2")
    made = Network(hosts)
    try:
        yield made
    finally:
        made.close()
