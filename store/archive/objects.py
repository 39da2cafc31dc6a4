"""Objects below one URL, through ``obstore``: S3, GCS, Azure or a directory.

``obstore`` comes with the extra ``archive`` and is imported with the first archive. Its errors are
turned into one of ours; ``FileNotFoundError`` is an object that is not there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from ..errors import ArchiveFailedError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

PART_SIZE: Final = 5 << 20  # bytes of one request of an upload; S3 takes no smaller part
PARTS_MAX: Final = 2  # of an upload that are in memory
CONNECT_S: Final = 3  # seconds
REQUEST_S: Final = 10  # seconds for a request; a stop of the broker waits so long
RETRIES: Final = 1  # of a request; the caller tries again later
RETRY_S: Final = 5  # seconds after which no request is tried again


class Objects:
    """The objects of one archive by their names; any thread, and every call may wait."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._opened: ObjectStore | None = None

    @property
    def _store(self) -> "ObjectStore":
        if self._opened is None:
            from obstore.store import from_url  # noqa: PLC0415

            remote: dict[str, Any] = {
                "client_options": {
                    "allow_http": True,  # if the endpoint is such a one
                    "connect_timeout": timedelta(seconds=CONNECT_S),
                    "timeout": timedelta(seconds=REQUEST_S),
                },
                "retry_config": {
                    "max_retries": RETRIES,
                    "retry_timeout": timedelta(seconds=RETRY_S),
                },
            }
            is_local = self._url.startswith("file:")
            self._opened = from_url(self._url, **({"mkdir": True} if is_local else remote))
        return self._opened

    def create(self, name: str, content: bytes) -> bool:
        """Create an object; return False if there is one of this name."""
        import obstore  # noqa: PLC0415

        with self._failing():
            try:
                obstore.put(self._store, name, content, mode="create", use_multipart=False)
            except obstore.exceptions.AlreadyExistsError:
                return False
            return True

    def put(self, name: str, pieces: Iterator[bytes]) -> None:
        """Upload an object in parts; it is there when all are. An error in ``pieces`` ends it."""
        import obstore  # noqa: PLC0415

        with self._failing():
            obstore.put(self._store, name, pieces, chunk_size=PART_SIZE, max_concurrency=PARTS_MAX)

    def get(self, name: str) -> bytes:
        """Return an object as a whole.

        Raises:
            FileNotFoundError: There is none of this name.
        """
        import obstore  # noqa: PLC0415

        with self._failing():
            return bytes(obstore.get(self._store, name).bytes())

    def get_range(self, name: str, start: int, end: int) -> bytes:
        """Return bytes of an object.

        Raises:
            FileNotFoundError: There is none of this name.
        """
        import obstore  # noqa: PLC0415

        with self._failing():
            return bytes(obstore.get_range(self._store, name, start=start, end=end))

    def names(self, folder: str) -> list[str]:
        """Return the names of the objects in a folder, without the folder, sorted."""
        import obstore  # noqa: PLC0415

        with self._failing():
            found = [one["path"] for chunk in obstore.list(self._store, folder) for one in chunk]
        return sorted(name.removeprefix(f"{folder}/") for name in found)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except ImportError as error:
            raise ArchiveFailedError(self._url, "pip install 'halfmq[archive]'") from error
        except FileNotFoundError:
            raise
        except Exception as error:
            if type(error).__module__.startswith("obstore") or isinstance(error, OSError):
                reason = str(error).partition("\n")[0]
                raise ArchiveFailedError(self._url, reason) from error
            raise
