"""Objects below one URL, through ``obstore``: S3, GCS, Azure or a directory.

Import this only for an archive: ``obstore`` comes with the extra ``archive``. Its errors become one
of ours; ``FileNotFoundError`` is an object that is not there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import ObjectStore, from_url

from ..errors import ArchiveFailedError
from ..files import disk

PART_SIZE: Final = 5 << 20  # bytes of one request of an upload; S3 takes no smaller part
PARTS_MAX: Final = 2  # of an upload that are in memory
CONNECT: Final = timedelta(seconds=3)
REQUEST: Final = timedelta(seconds=10)  # a stop of the broker waits so long
RETRY: Final = timedelta(seconds=5)  # after that no request is tried again; the caller does it


class Objects:
    """The objects of one archive by their names; any thread, and every call may wait."""

    def __init__(self, url: str) -> None:
        self._url = url

    @property
    def is_directory(self) -> bool:
        """Whether the objects are files, which a power cut may take as long as nobody flushes."""
        return self._url.startswith("file:")

    def flush(self) -> None:
        """Flush the file system of a directory."""
        if self.is_directory and disk.sync_file_system is not None:
            with self._failing(), disk.opened(Path(unquote(urlsplit(self._url).path))) as fd:
                disk.sync_file_system(fd)

    @cached_property
    def _store(self) -> ObjectStore:
        if self.is_directory:
            return from_url(self._url, mkdir=True)
        return from_url(
            self._url,
            # Plain HTTP only if the endpoint says so.
            client_options={"connect_timeout": CONNECT, "timeout": REQUEST, "allow_http": True},
            retry_config={"max_retries": 1, "retry_timeout": RETRY},
        )

    def create(self, name: str, content: bytes) -> bool:
        """Create an object; return False if there is one of this name."""
        with self._failing():
            try:
                obstore.put(self._store, name, content, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
            return True

    def put(self, name: str, pieces: Iterator[bytes]) -> None:
        """Upload an object in parts; it is there when all are. An error in ``pieces`` ends it."""
        with self._failing():
            obstore.put(self._store, name, pieces, chunk_size=PART_SIZE, max_concurrency=PARTS_MAX)

    def get(self, name: str) -> bytes:
        """Return an object as a whole."""
        with self._failing():
            return bytes(obstore.get(self._store, name).bytes())

    def get_range(self, name: str, start: int, end: int) -> bytes:
        """Return a range of the bytes of an object."""
        with self._failing():
            return bytes(obstore.get_range(self._store, name, start=start, end=end))

    def names(self, folder: str) -> list[str]:
        """Return the names of the objects in a folder, without the folder, sorted."""
        with self._failing():
            found = [one["path"] for chunk in obstore.list(self._store, folder) for one in chunk]
        return sorted(name.removeprefix(f"{folder}/") for name in found)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except (BaseError, OSError) as error:
            raise ArchiveFailedError(self._url, str(error).partition("\n")[0]) from error
