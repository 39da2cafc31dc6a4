"""The log of a broker that ran, with bytes altered afterwards, and what an audit must find then."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from zlib import crc32

from halfmq.client import ClientConfig, Decision, Message, MessageView, TransactionProducer
from halfmq.client.testing import BrokerProcess, broker_process

from .oracle.records import HALF, OP, TIMER, Raw, read
from .oracle.words import Found, Kind

SEGMENT = 1 << 20
TRANSACTIONS = 240
AT_ONCE = 24
_SYS_FLAG_LOW, _QUEUE, _CRC, _LINK, _BODY = 39, 12, 8, 76, 88  # bytes from a record's start


async def _unknown(_message: MessageView) -> Decision:
    return Decision.UNKNOWN


def write(directory: Path) -> Path:
    """Run a broker for some seconds, with all that transactions can do; return its store."""
    with broker_process(
        directory,
        mappedFileSizeCommitLog=SEGMENT,
        transactionTimeOut="500ms",
        transactionCheckInterval="500ms",
        transactionCheckMax=1,
        transactionOpBatchInterval="100ms",
    ) as broker:
        asyncio.run(_produce(broker))
    return directory / "store"


async def _produce(broker: BrokerProcess) -> None:
    config = ClientConfig(namesrv=broker.address)
    async with TransactionProducer("pg", checker=_unknown, config=config) as producer:
        for first in range(0, TRANSACTIONS, AT_ONCE):
            numbers = range(first, first + AT_ONCE)
            await asyncio.gather(*(_transact(producer, number) for number in numbers))
        await asyncio.sleep(6.5)  # the delays are over, and the grace for overdue ones
        for number in range(AT_ONCE):
            await _transact(producer, number * 12 + 3)


async def _transact(producer: TransactionProducer, number: int) -> None:
    commit, rollback, unknown = Decision.COMMIT, Decision.ROLLBACK, Decision.UNKNOWN
    decision = [commit, commit, rollback, unknown][number % 4]
    body = b"order %d" % number
    message = Message("orders", body, tags="created", keys=[f"k{number}"])
    prepared: Message | list[Message] = message
    if number % 3 == 1:
        prepared = [message, Message("beside", body)]
    elif number % 3 == 2:
        prepared = Message("orders", body, deliver_after=timedelta(seconds=1))
    async with producer.transaction(prepared) as transaction:
        transaction.decide(decision)


class Altered:
    """Alters records of a store in place, each transaction once."""

    def __init__(self, store: Path, seed: int) -> None:
        self._folder = store / "commitlog"
        self._random = random.Random(seed)
        self.expected: list[Found] = []
        self._log = list(read(self._folder, []))
        self._by_key: dict[str, list[Raw]] = defaultdict(list)
        for record in self._log:
            group = record.properties.get("TRANSACTION_GROUP", "")
            key = group.partition(",")[0] or record.properties.get("UNIQ_KEY", "")
            self._by_key[key].append(record)
        self._single = [one for one in self._by_key.values() if self._is(one, HALF, "orders")]
        self._several = [one for one in self._by_key.values() if sum(r.bits == 8 for r in one) > 1]
        self._delayed = [one for one in self._by_key.values() if self._is(one, HALF, TIMER)]
        for some in (self._single, self._several, self._delayed):
            self._random.shuffle(some)

    @staticmethod
    def _is(records: list[Raw], *topics: str) -> bool:
        """Tell whether these are the half, and the final in this topic, of a single message."""
        kept = [one for one in records if one.bits in (0, 8)]
        return (
            [one.topic for one in kept[:2]] == list(topics)
            and kept[0].offset > 0
            and "TRANSACTION_GROUP" not in kept[0].properties
        )

    def alter(self, count: int) -> None:
        """Plant each fault some times."""
        for _ in range(count):
            for fault in _FAULTS:
                fault(self)

    # --- faults

    def bits_lost(self) -> None:
        half, final = self._single.pop()[:2]
        self._set(final, _SYS_FLAG_LOW, b"\0")
        self._expect(Kind.UNMARKED_FINAL, half, final)

    def link_lost(self) -> None:
        _, final = self._single.pop()[:2]
        self._set(final, _LINK, (final.link + 1).to_bytes(8, "big"))
        self._expect(Kind.DECISION_WITHOUT_HALF, final)

    def link_and_bits_lost(self) -> None:
        half, final = self._single.pop()[:2]
        self._set(final, _LINK, bytes(8))
        self._set(final, _SYS_FLAG_LOW, b"\0")
        self._expect(Kind.UNLINKED_DELIVERY, half, final)

    def body_altered(self) -> None:
        half, final = self._single.pop()[:2]
        body = b"O" + final.body[1:]
        self._set(final, _BODY, body)
        self._set(final, _CRC, (crc32(body) & 0x7FFFFFFF).to_bytes(4, "big"))
        self._expect(Kind.ALTERED_FINAL, half, final)

    def tags_altered(self) -> None:
        half, final = self._single.pop()[:2]
        self._replace(final, b"TAGS\x01created", b"TAGS\x01creates")
        self._expect(Kind.ALTERED_FINAL, half, final)

    def keys_altered(self) -> None:
        half, final = self._single.pop()[:2]
        self._replace(final, b"KEYS\x01k", b"KEYS\x01K")
        self._expect(Kind.ALTERED_FINAL, half, final)

    def queue_altered(self) -> None:
        half, final = self._single.pop()[:2]
        self._set(final, _QUEUE, (final.queue + 1).to_bytes(4, "big"))
        self._expect(Kind.ALTERED_FINAL, half, final)

    def topic_altered(self) -> None:
        half, final = self._single.pop()[:2]
        self._set(final, _BODY + len(final.body) + 1, b"beside")
        self._expect(Kind.ALTERED_FINAL, half, final)

    def final_gone(self) -> None:
        """It becomes a message that has nothing to do with a transaction."""
        half, final = self._single.pop()[:2]
        self._hide(final)
        self._expect(Kind.MISSING_DECISION, half, self._op_of(half))

    def follower_gone(self) -> None:
        records = self._several.pop()
        finals = [one for one in records if one.bits == 8]
        half = next(one for one in records if one.offset == finals[1].link)
        self._hide(finals[1])
        self._expect(Kind.MISSING_FINAL, half, finals[0])

    def leader_gone(self) -> None:
        records = self._several.pop()
        finals = [one for one in records if one.bits == 8]
        self._hide(finals[0])
        self._expect(Kind.MISSING_FINAL, records[0], finals[1])

    def arrival_gone(self) -> None:
        half, final, *arrival = self._delayed.pop()
        self._hide(arrival[-1])
        self._expect(Kind.OVERDUE_DELIVERY, half, final)

    def crc_wrong(self) -> None:
        final = self._single.pop()[1]
        self._set(final, _BODY, b"O")
        self._expect(Kind.CRC, final)

    # --- bytes

    def _expect(self, kind: Kind, *records: Raw) -> None:
        self.expected.append((kind, tuple(sorted(one.offset for one in records))))

    def _op_of(self, half: Raw) -> Raw:
        place = str(half.place).encode()
        return next(one for one in self._log if one.topic == OP and place in one.body.split(b","))

    def _hide(self, record: Raw) -> None:
        self._set(record, _SYS_FLAG_LOW, b"\0")
        self._set(record, _LINK, bytes(8))
        for name in (
            b"UNIQ_KEY\x01",
            b"TRAN_MSG\x01",
            b"TRANSACTION_HALF_ID\x01",
            b"REAL_TOPIC\x01",
        ):
            self._replace(record, name, b"x" + name[1:])

    def _replace(self, record: Raw, old: bytes, new: bytes) -> None:
        path, at = self._place(record)
        content = path.read_bytes()[at : at + record.size]
        if old in content:
            self._set(record, content.index(old), new)

    def _set(self, record: Raw, position: int, content: bytes) -> None:
        path, at = self._place(record)
        with path.open("r+b") as file:
            file.seek(at + position)
            file.write(content)

    def _place(self, record: Raw) -> tuple[Path, int]:
        base = record.offset - record.offset % SEGMENT
        return self._folder / f"{base:020}", record.offset - base


_FAULTS: list[Callable[[Altered], None]] = [
    Altered.bits_lost,
    Altered.link_lost,
    Altered.link_and_bits_lost,
    Altered.body_altered,
    Altered.tags_altered,
    Altered.keys_altered,
    Altered.queue_altered,
    Altered.topic_altered,
    Altered.final_gone,
    Altered.follower_gone,
    Altered.leader_gone,
    Altered.arrival_gone,
    Altered.crc_wrong,
]
