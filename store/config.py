"""The settings of the store, with RocketMQ's defaults except for durability."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from .format.queue_entry import ENTRY_SIZE
from .format.record import BLANK_SIZE

_SECOND: Final = 1000
_MINUTE: Final = 60 * _SECOND
_HOUR: Final = 60 * _MINUTE
# RocketMQ's messageDelayLevel: 1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h
DELAY_LEVELS_MS: Final = (
    *(seconds * _SECOND for seconds in (1, 5, 10, 30)),
    *(minutes * _MINUTE for minutes in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30)),
    *(hours * _HOUR for hours in (1, 2)),
)
COMMIT_LOG_FILE_SIZE_MIN: Final = 4096  # bytes; a page
_INT32_MAX: Final = 0x7FFF_FFFF  # RocketMQ keeps positions inside a file in a Java int


class FlushMode(StrEnum):
    """When an appended record counts as readable, and is acknowledged."""

    SYNC_FLUSH = "SYNC_FLUSH"  # once it is on disk
    ASYNC_FLUSH = "ASYNC_FLUSH"  # at once; the disk follows within flush_interval_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Where and how messages are kept. File sizes are part of the format of a directory."""

    root: Path
    commit_log_path: Path | None = None  # None: ``commitlog`` below root
    commit_log_file_size: int = 1 << 30  # bytes
    consume_queue_file_size: int = 300_000 * ENTRY_SIZE  # bytes; rounded up to whole entries
    flush_mode: FlushMode = FlushMode.SYNC_FLUSH
    flush_interval_ms: int = 500  # of ASYNC_FLUSH, and of records that nobody waits for
    flush_interval_consume_queue_ms: int = 1000  # also for the checkpoint
    index_enabled: bool = True
    max_hash_slots: int = 5_000_000
    max_index_items: int = 20_000_000
    append_property_crc: bool = False  # end each record with a CRC of the whole record
    check_crc_on_recover: bool = True
    archive_url: str = ""  # of an object store for full files; see ``archive/``
    delay_levels_ms: tuple[int, ...] = DELAY_LEVELS_MS  # due times in the schedule topic's queues

    def __post_init__(self) -> None:
        if not COMMIT_LOG_FILE_SIZE_MIN <= self.commit_log_file_size <= _INT32_MAX:
            raise ValueError(
                f"commit_log_file_size must be {COMMIT_LOG_FILE_SIZE_MIN} to {_INT32_MAX} bytes, "
                f"not {self.commit_log_file_size}"
            )
        whole_entries = -(-self.consume_queue_file_size // ENTRY_SIZE) * ENTRY_SIZE
        if not ENTRY_SIZE <= whole_entries <= _INT32_MAX:
            raise ValueError(
                f"consume_queue_file_size must be {ENTRY_SIZE} to {_INT32_MAX} bytes, "
                f"not {self.consume_queue_file_size}"
            )
        object.__setattr__(self, "consume_queue_file_size", whole_entries)
        for name in ("flush_interval_ms", "flush_interval_consume_queue_ms"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")

    @property
    def record_size_max(self) -> int:
        """Bytes of the largest record: it fills a file of the log except for the blank after it.

        The store has no other limit, because it may have to store an accepted message again after
        the broker's limit was lowered.
        """
        return self.commit_log_file_size - BLANK_SIZE

    @property
    def commit_log_directory(self) -> Path:
        return self.commit_log_path or self.root / "commitlog"
