"""Watch how full the disk of the log is: warn at one limit, refuse messages at the next.

| | Begins at | What happens |
|---|---|---|
| scarce | `diskMaxUsedSpaceRatio` | a warning; expired files are deleted at any hour |
| full | `diskSpaceWarningLevelRatio` | messages, halves and retries are refused as well |

The space left when messages are refused is a reserve for consumption, decisions, checks and delayed
deliveries. Each state ends when one more percent of the disk is free than when it began. Messages
within their retention time are never deleted for space; RocketMQ deletes them from 85 % on.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from attrs import define

from halfmq.remoting.codes import ResponseCode
from halfmq.store.files import disk

from ..config import DiskConfig
from ..loop.services import Service
from .send_refusal import SendRefusal

logger = logging.getLogger(__name__)

TEST_BYTES: Final = 4 << 20
"""Bytes of log after which the disk is tested although its ticker is not due: a busy loop may be
late for that, and must not fill the room that is kept for decisions."""

TEST_INTERVAL_S: Final = 0.1
"""Seconds between two tests. A fast disk writes a hundred megabytes meanwhile; a test takes 3
us."""

HYSTERESIS: Final = 1
"""Percent of the disk that must be free beyond a limit before its state ends."""

CAUSE: Final = "disk_full"


class Space(NamedTuple):
    """Space of a file system, as `df` counts it: without the part reserved for root."""

    free: int  # bytes
    size: int  # bytes: free ones and those in use


def space_of(path: Path) -> Space:
    """Return the space of the file system of a path.

    Raises:
        OSError: The file system does not answer.
    """
    found = disk.statvfs(path)
    in_use = found.f_blocks - found.f_bfree
    return Space(found.f_bavail * found.f_frsize, (in_use + found.f_bavail) * found.f_frsize)


@define(eq=False, repr=False, slots=False)
class DiskLimits(Service):
    """Tests the disk and applies the limits; call `tick` after the seconds that it returns."""

    _config: DiskConfig
    _refusal: SendRefusal
    _path: Path  # the directory of the log
    # Bytes that are allocated for the log but not written. They count as free, so that the
    # allocation of a new file changes nothing.
    _reserved_ahead: Callable[[], int]
    _space_of: Callable[[Path], Space] = space_of

    def __attrs_post_init__(self) -> None:
        self._space = Space(0, 0)
        self.test_due = TEST_BYTES  # end of the log at the next test that is not the ticker's
        self._left = 0  # bytes free, including those allocated for the log
        self.is_scarce = False
        """Whether expired files are deleted at any hour."""
        self.is_full = False
        """Whether messages are refused."""

    def configure(self, config: DiskConfig) -> None:
        """Apply new limits at the next test."""
        self._config = config

    def tick(self) -> float:
        """Test the disk and apply the limits; return the seconds until the next call."""
        try:
            self._space = self._space_of(self._path)
        except OSError as error:
            logger.warning("event=disk_unknown path=%s error=%r", self._path, str(error))
            return 10 * TEST_INTERVAL_S
        self._left = self._space.free + self._reserved_ahead()
        was_scarce, was_full = self.is_scarce, self.is_full
        self.is_full = self._is_beyond(self._config.refuse_ratio, was_full)
        self.is_scarce = self.is_full or self._is_beyond(self._config.warn_ratio, was_scarce)
        if self.is_full and not was_full:
            self._refusal.begin(CAUSE, ResponseCode.SERVICE_NOT_AVAILABLE, self._reason())
            self._log(logging.ERROR, "disk_full")
        elif was_full and not self.is_full:
            self._refusal.end(CAUSE)
            self._log(logging.WARNING, "disk_full_over")
        if self.is_scarce and not was_scarce:
            self._log(logging.WARNING, "disk_scarce")
        elif was_scarce and not self.is_scarce:
            self._log(logging.INFO, "disk_scarce_over")
        return TEST_INTERVAL_S

    def written_to(self, log_end: int) -> None:
        """Test the disk because the log has reached ``test_due``."""
        self.test_due = log_end + TEST_BYTES
        self.tick()

    def _is_beyond(self, ratio: int, was: bool) -> bool:
        """Return whether more than ``ratio`` percent of the disk are in use; never at 100."""
        if ratio == 100:
            return False
        wanted = 100 - ratio + (HYSTERESIS if was else 0)
        return self._left * 100 < self._space.size * wanted

    @property
    def bytes_left(self) -> int:
        """How many bytes may be written until messages are refused; below 0 if they are."""
        refused = self._space.size * (100 - self._config.refuse_ratio) // 100
        return self._left - refused

    @property
    def used_percent(self) -> int:
        """The part of the disk that is in use, rounded up."""
        return 100 - self._left * 100 // max(self._space.size, 1)

    def _reason(self) -> str:
        return (
            f"[DISK]the disk of {self._path} is {self.used_percent} % full, and above "
            f"diskSpaceWarningLevelRatio={self._config.refuse_ratio} no messages are taken: "
            "try another broker, or make room"
        )

    def _log(self, level: int, event: str) -> None:
        logger.log(
            level,
            "event=%s path=%s used_percent=%d left_bytes=%d size_bytes=%d diskMaxUsedSpaceRatio=%d "
            "diskSpaceWarningLevelRatio=%d",
            event,
            self._path,
            self.used_percent,
            self._left,
            self._space.size,
            self._config.warn_ratio,
            self._config.refuse_ratio,
        )

    async def start(self) -> None:
        """Test the disk before the first message arrives."""
        self.tick()

    def metrics(self) -> dict[str, int]:
        """Return gauges and counters by name."""
        return {
            "is_scarce": int(self.is_scarce),
            "is_full": int(self.is_full),
            "used_percent": self.used_percent,
            "free_bytes": self._space.free,
            "size_bytes": self._space.size,
            "messages_refused": self._refusal.count,
        }
