"""Why a transaction request is refused.

`TransactionError`
├── `HalfNotFoundError`: no message begins at the offset in the request
├── `HalfMismatchError`: the record there is not the half message of the request
├── `DecidedOtherwiseError`: the first decision was the opposite one, and it stands
└── `DecisionForgottenError`: decided long ago, and the decision is no longer known
"""

from datetime import UTC, datetime


class TransactionError(Exception):
    """Root of the refusals; the client gets the text as remark."""


class HalfNotFoundError(TransactionError):
    """There is no record at this physical offset."""

    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset

    def __str__(self) -> str:
        # The first words are RocketMQ's. Source: EndTransactionProcessor.java
        return (
            "Find prepared transaction message failed: no message begins at commitLogOffset "
            f"{self.offset}; expected is the offset in the msgId that answered the prepare"
        )


class HalfMismatchError(TransactionError):
    """The record at this physical offset is not the half that the request means."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(offset, reason)
        self.offset, self.reason = offset, reason

    def __str__(self) -> str:
        return self.reason


class DecidedOtherwiseError(TransactionError):
    """The transaction has been decided the other way; the first decision stands."""

    def __init__(self, offset: int, decision: str, decided_ms: int, position: int = 0) -> None:
        """Create it; the decision is final once the log is durable up to `position`."""
        super().__init__(offset, decision, decided_ms, position)
        self.offset, self.decision, self.decided_ms = offset, decision, decided_ms
        self.position = position

    def __str__(self) -> str:
        when = ""
        if self.decided_ms:
            moment = datetime.fromtimestamp(self.decided_ms / 1000, UTC)
            when = f" at {moment.isoformat(timespec='milliseconds')}"
        return (
            f"the transaction of commitLogOffset {self.offset} was {self.decision}{when}; "
            "the first decision stands"
        )


class DecisionForgottenError(TransactionError):
    """The transaction was decided so long ago that its decision can no longer be found."""

    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset

    def __str__(self) -> str:
        return (
            f"the transaction of commitLogOffset {self.offset} was decided before; "
            "whether it was committed is no longer known"
        )
