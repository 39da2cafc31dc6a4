"""What is measured: one row of every table."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

BATCH_UNITS: Final = 64
BODY_SIZE: Final = 1024  # bytes
PULL_COUNT: Final = 32
FILL_REQUESTS: Final = (
    3200  # batches put into a topic before it is pulled: 205 thousand messages of 1 KiB
)
TOPICS: Final = 32  # that usual and wide messages go to in turn
_TAG: Final = "TagC"  # one of the eight of usual and wide messages


class FlushDiskType(StrEnum):
    """When a send is answered: after fdatasync, or at once. RocketMQ's names."""

    SYNC = "SYNC_FLUSH"
    ASYNC = "ASYNC_FLUSH"


class LoadKind(StrEnum):
    """What a request of the scenario is; the generator's word for it."""

    SEND = "send"
    BATCH = "batch"
    PULL = "pull"
    TRANSACTION = "transaction"


class MessageShape(StrEnum):
    """What a message carries beside its body; the generator's word for it (``messages.h``)."""

    LEAN = "lean"
    USUAL = "usual"
    WIDE = "wide"

    @property
    def topics(self) -> int:
        return 1 if self is MessageShape.LEAN else TOPICS


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One kind of load in one flush mode."""

    kind: LoadKind
    connections: int
    window: int  # requests in flight per connection
    mode: FlushDiskType
    message: MessageShape = MessageShape.LEAN
    one_way: bool = False  # END_TRANSACTION wants no answer, as official clients send it
    by_tag: bool = False  # pulls are filtered by one of the tags
    body_size: int = BODY_SIZE  # bytes
    header: str = ""  # json, rocketmq or msgpack; empty: what the run asks for
    half_load: bool = False  # requests are due at half the rate that the server reaches

    @property
    def shape(self) -> str:
        """The load without message and flush mode, as in ``send c=64 w=1``."""
        words = [self.kind.value]
        words += ["one-way"] if self.one_way else []
        words += ["by tag"] if self.by_tag else []
        return " ".join((*words, f"c={self.connections}", f"w={self.window}"))

    @property
    def name(self) -> str:
        """All that tells it from other loads, and what ``--scenario`` looks into."""
        words = [self.shape, self.message.value]
        words += [f"{self.body_size} B"] if self.body_size != BODY_SIZE else []
        words += [self.header] if self.header else []
        words += ["half load"] if self.half_load else []
        return " ".join((*words, self.mode.value))

    def arguments(self, *, header: str) -> list[str]:
        """The generator's arguments for this load."""
        arguments = [
            *("--scenario", self.kind.value, "--connections", str(self.connections)),
            *("--window", str(self.window), "--body", str(self.body_size)),
            *("--header", self.header or header),
            *("--message", self.message.value, "--topics", str(self.message.topics)),
        ]
        if self.kind is LoadKind.BATCH:
            arguments += ["--units", str(BATCH_UNITS)]
        if self.kind is LoadKind.PULL:
            arguments += ["--pull", str(PULL_COUNT)]
        if self.by_tag:
            arguments += ["--tag", _TAG]
        if self.kind is LoadKind.TRANSACTION:
            arguments += ["--end", "one-way" if self.one_way else "two-way"]
        return arguments


_WRITING: Final = (
    (LoadKind.SEND, 1, 1),
    (LoadKind.SEND, 16, 1),
    (LoadKind.SEND, 64, 1),
    (LoadKind.SEND, 256, 1),
    (LoadKind.SEND, 4, 64),
    (LoadKind.BATCH, 8, 1),
    (LoadKind.TRANSACTION, 64, 1),
    (LoadKind.TRANSACTION, 4, 64),
)
_READING: Final = (
    (LoadKind.PULL, 4, 1),
    (LoadKind.PULL, 64, 1),
)  # the flush mode does not matter to it


def all_scenarios(messages: Sequence[MessageShape]) -> list[Scenario]:
    """Every load with each of the messages, those of one flush mode together.

    A JVM peer is started once per mode. The messages of a load come one after the other, so that
    their ratio is one of figures seconds apart.
    """
    return [
        replace(load, message=message)
        for load in _loads()
        for message in messages
        if not (load.by_tag and message is MessageShape.LEAN)  # it has one tag: nothing to choose
    ]


def _loads() -> Iterator[Scenario]:
    for mode in FlushDiskType:
        for row in _WRITING:
            yield _scenario(*row, mode)
        yield replace(_scenario(LoadKind.TRANSACTION, 4, 64, mode), one_way=True)
    for row in _READING:
        load = _scenario(*row, FlushDiskType.ASYNC)
        yield load
        yield replace(load, by_tag=True)


def shape_scenarios() -> list[Scenario]:
    """Usual messages, and what differs from them in one respect, under the loads that fill a core.

    These are single rounds of our broker alone.
    """
    loads = [
        load
        for load in _loads()
        if load.shape in {"send c=64 w=1", "send c=4 w=64", "batch c=8 w=1", "pull c=4 w=1"}
        or load.one_way
    ]
    return [shape for load in loads for shape in _shapes(replace(load, message=MessageShape.USUAL))]


def _shapes(usual: Scenario) -> Iterator[Scenario]:
    yield usual
    yield replace(usual, message=MessageShape.WIDE)
    yield replace(usual, body_size=128)
    yield replace(usual, body_size=16 * 1024)
    yield replace(usual, header="rocketmq")
    yield replace(usual, half_load=True)


def _scenario(kind: LoadKind, connections: int, window: int, mode: FlushDiskType) -> Scenario:
    return Scenario(kind=kind, connections=connections, window=window, mode=mode)
