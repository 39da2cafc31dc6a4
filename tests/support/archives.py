"""Archives for tests: a directory, and an S3 server in a process of its own."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import obstore
from obstore.store import from_url

from tests.support.patience import PATIENCE_S

BUCKET = "bucket"
S3_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
}
"""For ``obstore``, with ``AWS_ENDPOINT``; ``pyarrow`` reads the first three."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def s3_server() -> Iterator[str]:
    """Run ``moto``'s S3 server with one bucket; yield its endpoint."""
    endpoint = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "moto.server", "-p", endpoint.rpartition(":")[2]]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while True:
                try:
                    httpx.put(f"{endpoint}/{BUCKET}").raise_for_status()
                    break
                except httpx.TransportError:
                    assert server.poll() is None, "moto has ended"
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            yield endpoint
        finally:
            server.kill()


def content_of_archive(url: str) -> dict[str, bytes]:
    """Return all objects of an archive by name."""
    is_local = url.startswith("file:")
    store = from_url(url) if is_local else from_url(url, client_options={"allow_http": True})
    names = [one["path"] for chunk in obstore.list(store) for one in chunk]
    return {name: bytes(obstore.get(store, name).bytes()) for name in names}


def files_below(root: Path, folder: str) -> dict[str, bytes]:
    """Return the files in a folder of a store, by their names below the store."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in (root / folder).rglob("*")
        if path.is_file()
    }
