"""Interfaces between ``MessageStore`` and the folders below it."""

from typing import Protocol


class LogOffsets(Protocol):
    """How far the log reaches, as physical offsets; see ``MessageStore``."""

    @property
    def min_offset(self) -> int: ...

    @property
    def write_offset(self) -> int: ...

    @property
    def readable_offset(self) -> int: ...
