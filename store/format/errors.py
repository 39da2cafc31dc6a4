"""What can be wrong with stored bytes.

StoreError
└── CorruptRecordError    the bytes at an offset are not one whole, valid record

The engine in ``halfmq.store`` adds its own kinds below the same root.
"""


class StoreError(Exception):
    """Catch this to catch everything that the store and its formats raise on purpose."""


class CorruptRecordError(StoreError):
    """The bytes at ``offset`` are not one whole, valid record."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(offset, reason)
        self.offset = offset
        self.reason = reason

    def __str__(self) -> str:
        return f"record at {self.offset}: {self.reason}"
