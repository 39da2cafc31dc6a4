"""What the broker keeps for its peers, and how much of it at most."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple, Protocol, TypeAlias, runtime_checkable

from halfmq.remoting.codes import ResponseCode

LIMITS: Final[dict[str, Limit]] = {}
"""All limits, by name, in the order of the document."""


RESERVE: Final = 10
"""Part of topics and of groups that clients must not use up by naming new ones: operators still get
theirs, and topics also those of the broker."""


class Limit(NamedTuple):
    """How much is kept of one thing."""

    name: str
    """In the metrics: ``halfmq.limits.NAME.used`` and ``.most``."""
    what: str
    most: int
    beyond: str
    """What happens to whom when there is no more room."""
    code: ResponseCode | None = None
    """Of the refusal; None if nothing is refused with a code."""
    in_bytes: bool = False
    of_connection: int = 0
    """How much of it is for one connection; 0: all. Beyond it, its requests are refused."""
    setting: str = ""
    """The setting whose default ``most`` is."""


Kept: TypeAlias = Mapping[Limit, int]
"""How much of each limit is used. Whatever keeps something for peers returns it from ``kept()``."""


@runtime_checkable
class Keeps(Protocol):
    """A part that keeps something for peers."""

    def kept(self) -> Kept:
        """Return how much of what it keeps for peers is used."""
        ...


def usage(parts: Iterable[Keeps]) -> dict[str, dict[str, int]]:
    """Return use and limit of everything that is kept, by name, for the metrics."""
    return {
        limit.name: {"used": used, "most": limit.most}
        for part in parts
        for limit, used in part.kept().items()
    }


def _limit(name: str, what: str, most: int, beyond: str, **more: object) -> Limit:
    limit = LIMITS[name] = Limit(name, what, most, beyond, **more)  # type: ignore[arg-type]
    return limit


CONNECTIONS: Final = _limit(
    "connections",
    "connections, 5 KiB each",
    20_000,  # each takes a file descriptor too
    "a new one is closed, or one of the address that has most, if that is an eighth of all",
)
SLAVE_CONNECTIONS: Final = _limit(
    "slave_connections",
    "connections on `haListenPort`, 320 KiB each",
    4,  # one slave copies the log; the others are about to be refused
    "new ones are closed",
)
HTTP_CONNECTIONS: Final = _limit(
    "http_connections",
    "connections for metrics and probes, 100 KiB each",
    64,  # a few scrapers and probes; each is closed after two minutes at the latest
    "the oldest one without an answer under way is closed",
)
UNFINISHED_BYTES: Final = _limit(
    "unfinished_bytes",
    "requests that are incomplete, or large and not served yet",
    96 << 20,  # six of the largest; with two copies while one is decoded
    "the address that has most loses its largest connection",
    in_bytes=True,
)
UNSENT_BYTES: Final = _limit(
    "unsent_bytes",
    "answers that peers do not read, 256 KiB of each before its requests are no longer read",
    64 << 20,  # what the kernel keeps for each connection, several MiB, comes first
    "the address that has most loses its largest connection",
    in_bytes=True,
)
LONG_ANSWERS: Final = _limit(
    "long_answers",
    "lists that are collected in several turns, with up to 16 MiB",
    4,  # they share the time of one
    "further ones wait for their turn",
)
HELD_PULL_BYTES: Final = _limit(
    "held_pull_bytes",
    "pulls that wait for messages, 500 bytes each and their filters",
    32 << 20,
    "one connection, or a group with half of all, gets SYSTEM_BUSY; then the address that has "
    "most loses its largest connection",
    code=ResponseCode.SYSTEM_BUSY,
    in_bytes=True,
    of_connection=4 << 20,  # a client has one for each of its queues
)
HELD_POP_BYTES: Final = _limit(
    "held_pop_bytes",
    "pops that wait for messages, 500 bytes each and their filters",
    16 << 20,
    "one connection, or a group with half of all, gets POLLING_FULL; then the address that has "
    "most loses its largest connection",
    code=ResponseCode.POLLING_FULL,
    in_bytes=True,
    of_connection=4 << 20,  # a client has some for each topic
)
REPLAYED_PULL_BYTES: Final = _limit(
    "replayed_pull_bytes",
    "pulls of consumers that replay and wait for their turn, 1 KiB each and their filters",
    20 << 20,
    "they are answered at once",
    in_bytes=True,
)
UNFLUSHED_BYTES: Final = _limit(
    "unflushed_bytes",
    "log that waits for the disk, with its answers",
    64 << 20,  # bounds the data at risk too; usual disks write it in a fraction of a second
    "requests are not read; after a second messages are refused",
    code=ResponseCode.SYSTEM_BUSY,
    in_bytes=True,
)
PEER_REQUESTS: Final = _limit(
    "peer_requests",
    "requests of the broker that wait for answers of clients, 300 bytes each",
    CONNECTIONS.most * 256,
    "the client is asked later",
    of_connection=256,  # a client that takes 2 ms for so many answers 100,000 per second
)
FILTER_BYTES: Final = _limit(
    "filter_bytes",
    "compiled SQL92 filters",
    32 << 20,  # as estimated
    "the least recently used one is compiled again when it is needed",
    in_bytes=True,
)
FILTER_REQUEST_BYTES: Final = _limit(
    "filter_request_bytes",
    "requests that wait until their filter is compiled, 1,024 of them and 64 of one connection",
    16 << 20,
    "the latest one of the connection with most of them is refused",
    code=ResponseCode.SYSTEM_BUSY,
    in_bytes=True,
)
RELAYS: Final = _limit(
    "relays",
    "requests of operators that wait for consumers, with answers of up to 4 MiB",
    64,  # operators ask by hand; each waits for some seconds at most
    "refused",
    code=ResponseCode.SYSTEM_BUSY,
)
CHANGES_BYTES: Final = _limit(
    "changes_bytes",
    "changes by operators that wait for the disk, 64 of them",
    32 << 20,
    "refused",
    code=ResponseCode.SYSTEM_BUSY,
    in_bytes=True,
)
NEW_TOPIC_BYTES: Final = _limit(
    "new_topic_bytes",
    "requests that wait until new topics are saved, 256 of them",
    16 << 20,
    "the connection of a further one is not read",
    in_bytes=True,
)
MEMBERS: Final = _limit(
    "members",
    "memberships of clients in groups, 500 bytes each",
    200_000,
    "the heartbeat is refused",
    code=ResponseCode.SYSTEM_BUSY,
)
QUEUE_LOCKS: Final = _limit(
    "queue_locks",
    "queue locks, 250 bytes each",
    200_000,
    "refused",
    code=ResponseCode.SYSTEM_BUSY,
)
OFFSET_BYTES: Final = _limit(
    "offset_bytes",
    "offsets of groups: 340 bytes and both names for a group in a topic, 80 for each queue, 240 "
    "and both names for each that was reset",
    64 << 20,  # 70,000 groups in topics of eight queues; the file then has 15 MB
    "refused",
    code=ResponseCode.NO_PERMISSION,
    in_bytes=True,
)
TOPICS: Final = _limit(
    "topics",
    "topics, without the two that each group may have",
    20_000,  # the file, rewritten for new ones, then has 5 MB
    "refused; those that messages create at nine tenths. Unused ones end after a day",
    code=ResponseCode.NO_PERMISSION,
)
GROUPS: Final = _limit(
    "groups",
    "groups",
    10_000,  # as of topics, of which each group may get two
    "refused; those that consumers create at nine tenths. Unused ones end after a day",
    code=ResponseCode.NO_PERMISSION,
)
REGISTERED_BROKERS: Final = _limit(
    "registered_brokers",
    "other brokers that have registered, replicas included",
    256,
    "refused",
    code=ResponseCode.SYSTEM_ERROR,
)
REGISTERED_TOPICS: Final = _limit(
    "registered_topics",
    "topics of other brokers, 400 bytes each",
    100_000,
    "refused",
    code=ResponseCode.SYSTEM_ERROR,
)
KV_CHARACTERS: Final = _limit(
    "kv_characters",
    "characters of key-value configuration",
    1 << 20,  # the file is rewritten for each change
    "refused",
    code=ResponseCode.NO_PERMISSION,
)
DELAYED: Final = _limit(
    "delayed",
    "messages that wait for their delay or time of delivery, 57 bytes each",
    1_000_000,
    "refused, and retries are kept by their consumer; commits never are",
    code=ResponseCode.SYSTEM_BUSY,
)
POP_IN_FLIGHT: Final = _limit(
    "pop_in_flight",
    "messages popped and not acknowledged, 200 bytes each; a fifth of them of one group",
    500_000,  # they take 100 MB
    "further pops get POLLING_FULL",
    code=ResponseCode.POLLING_FULL,
)
POP_LOCKS: Final = _limit(
    "pop_locks",
    "queues that groups pop in order, with up to 32 messages each, 4 KiB at most",
    10_000,
    "the oldest ones that have ended are forgotten; further pops get POLLING_FULL",
    code=ResponseCode.POLLING_FULL,
)
POP_PAIRS: Final = _limit(
    "pop_pairs",
    "topics that groups have popped, 300 bytes each",
    50_000,
    "further pops get POLLING_FULL",
    code=ResponseCode.POLLING_FULL,
)
REQUEST_MODES: Final = _limit(
    "request_modes",
    "groups and topics with a mode, pull or pop, 500 bytes each",
    10_000,  # the file is rewritten for each change
    "refused",
    code=ResponseCode.NO_PERMISSION,
)
FINAL_MESSAGE_BYTES: Final = _limit(
    "final_message_bytes",
    "final messages of the latest halves",
    16 << 20,
    "they are read from the log",
    in_bytes=True,
)
PENDING: Final = _limit(
    "pending",
    "undecided halves, 300 bytes each",
    1_000_000,
    "refused",
    code=ResponseCode.SYSTEM_BUSY,
    setting="transactionPendingMax",
)
