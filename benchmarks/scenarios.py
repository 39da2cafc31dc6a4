"""What is measured: one row of every table."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

BATCH_UNITS: Final = 64
BODY_SIZE: Final = 1024  # bytes
PULL_COUNT: Final = 32
FILL_REQUESTS: Final = 3200  # batches put into a topic before it is pulled: 205 thousand messages


class FlushMode(StrEnum):
    """When a send is answered: after fdatasync, or at once. RocketMQ's names."""

    SYNC = "SYNC_FLUSH"
    ASYNC = "ASYNC_FLUSH"


class Kind(StrEnum):
    """What a request of the scenario is; the generator's word for it."""

    SEND = "send"
    BATCH = "batch"
    PULL = "pull"
    TRANSACTION = "transaction"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One kind of load in one flush mode."""

    kind: Kind
    connections: int
    window: int  # requests in flight per connection
    mode: FlushMode

    @property
    def shape(self) -> str:
        """The load without the flush mode, as in ``send c=64 w=1``."""
        return f"{self.kind} c={self.connections} w={self.window}"

    @property
    def name(self) -> str:
        """The load and the flush mode: unique, and what ``--scenario`` looks into."""
        return f"{self.shape} {self.mode}"

    def arguments(self, *, header: str, end: str) -> list[str]:
        """The generator's arguments for this load."""
        arguments = [
            *("--scenario", self.kind.value, "--connections", str(self.connections)),
            *("--window", str(self.window), "--body", str(BODY_SIZE), "--header", header),
        ]
        if self.kind is Kind.BATCH:
            arguments += ["--units", str(BATCH_UNITS)]
        if self.kind is Kind.PULL:
            arguments += ["--pull", str(PULL_COUNT)]
        if self.kind is Kind.TRANSACTION:
            arguments += ["--end", end]
        return arguments


_BOTH_MODES: Final = (
    (Kind.SEND, 1, 1),
    (Kind.SEND, 16, 1),
    (Kind.SEND, 64, 1),
    (Kind.SEND, 256, 1),
    (Kind.SEND, 4, 64),
    (Kind.BATCH, 8, 1),
    (Kind.TRANSACTION, 64, 1),
    (Kind.TRANSACTION, 4, 64),
)
_READING: Final = ((Kind.PULL, 4, 1), (Kind.PULL, 64, 1))  # the flush mode does not matter to it


def all_scenarios() -> list[Scenario]:
    """Every scenario, those of one flush mode together: a JVM peer is started once per mode."""
    sync = [_scenario(*row, FlushMode.SYNC) for row in _BOTH_MODES]
    return sync + [_scenario(*row, FlushMode.ASYNC) for row in (*_BOTH_MODES, *_READING)]


def _scenario(kind: Kind, connections: int, window: int, mode: FlushMode) -> Scenario:
    return Scenario(kind=kind, connections=connections, window=window, mode=mode)
