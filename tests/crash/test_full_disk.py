"""A small disk is filled under load: nothing acknowledged is lost, and decisions continue.

The broker is a process, and the disk a file system that is mounted for the test (by root on Linux;
elsewhere the test is skipped). The campaign repeats it, with kills and starts on the full disk, for
`HALFMQ_CAMPAIGN_SECONDS` (60). The seed is printed and can be set by `HALFMQ_SEED`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from halfmq.client import (
    Admin,
    BrokerRefusedError,
    ClientConfig,
    ClientError,
    Consumer,
    Decision,
    Message,
    MessageView,
    Producer,
    Transaction,
    TransactionProducer,
)
from halfmq.client.testing import BrokerProcess, BrokerStartError, broker_process
from halfmq.remoting.codes import ResponseCode
from tests.support.patience import PATIENCE_S
from tests.support.seeds import campaign_seconds, printed_seed
from tests.support.small_disk import KINDS, fill, small_disk

MIB = 1 << 20
DISK = 80 * MIB
FOREIGN = 24 * MIB  # a file of another program, whose removal makes room
SENDERS = 4
OPEN = 60  # transactions undecided while the disk fills
HALF = 200_000  # bytes of each: together more than the log has reserved ahead
SETTINGS = {
    "mappedFileSizeCommitLog": MIB,
    "mappedFileSizeConsumeQueue": 20_000,
    "maxHashSlotNum": 1_000,
    "maxIndexNum": 4_000,
    "diskMaxUsedSpaceRatio": 60,
    "diskSpaceWarningLevelRatio": 80,
    "transactionTimeOut": 1_000,
    "transactionCheckInterval": 500,
    "transactionCheckMax": 10_000,
    "flushIntervalConsumeQueue": 100,
}


class Load:
    """Clients of one broker, and the answers that they got."""

    def __init__(self, broker: BrokerProcess, chance: random.Random) -> None:
        self.broker = broker
        self.chance = chance
        self.acknowledged: set[bytes] = set()
        self.sent: set[bytes] = set()
        self.decisions: dict[bytes, Decision] = {}  # of the application
        self.committed: set[bytes] = set()
        self.rolled_back: set[bytes] = set()
        self.refusals: Counter[int] = Counter()
        self.consumed: Counter[bytes] = Counter()
        self.open: list[tuple[Transaction, bytes]] = []
        self._numbers = iter(range(1 << 60))

    @property
    def config(self) -> ClientConfig:
        return ClientConfig(
            namesrv=self.broker.address,
            send_attempts_max=1,  # the test counts refusals
            reconnect_delay_min=0.02,
            reconnect_delay_max=0.1,
        )

    def body(self, kind: str, size: int) -> bytes:
        """Return a unique body that compression does not make shorter."""
        name = f"{kind}-{next(self._numbers)}-".encode()
        return name + self.chance.randbytes(size - len(name))

    async def send_until(self, stop: asyncio.Event) -> None:
        """Send messages one after the other, as fast as the broker accepts them."""
        async with Producer("full-producer", config=self.config) as producer:
            while not stop.is_set():
                body = self.body("plain", self.chance.choice((100, 2_000, 20_000)))
                self.sent.add(body)
                try:
                    await producer.send(Message("full", body, keys=["key"]))
                except BrokerRefusedError as refusal:
                    self.refusals[refusal.code] += 1
                    await asyncio.sleep(0.02)
                except ClientError:
                    await asyncio.sleep(0.02)
                else:
                    self.acknowledged.add(body)

    async def consume_until(self, stop: asyncio.Event) -> None:
        """Consume all messages."""
        async with Consumer(
            "full-consumer", {"full": "*"}, start_from="first", config=self.config
        ) as consumer:
            while not stop.is_set():
                with contextlib.suppress(ClientError):
                    message = await consumer.receive(timeout=0.2)
                    if message is not None:
                        self.consumed[message.body] += 1
                        await message.ack()

    async def prepare(self, producer: TransactionProducer, count: int) -> None:
        """Open transactions and leave them undecided."""
        for _ in range(count):
            body = self.body("half", HALF)
            transaction = producer.transaction(Message("full", body))
            await transaction.__aenter__()
            self.open.append((transaction, body))

    def decide(self, count: int) -> asyncio.Future[None]:
        """Commit two in three of some open transactions, roll the rest back; await all answers."""
        chosen, self.open = self.open[:count], self.open[count:]
        for number, (transaction, body) in enumerate(chosen):
            decision = Decision.ROLLBACK if number % 3 == 2 else Decision.COMMIT
            transaction.decide(decision)
            self.decisions[body] = decision
        return asyncio.ensure_future(self._end(chosen))

    async def _end(self, chosen: list[tuple[Transaction, bytes]]) -> None:
        ends = [transaction.__aexit__(None, None, None) for transaction, _ in chosen]
        await asyncio.wait_for(asyncio.gather(*ends), 2 * PATIENCE_S)
        for transaction, body in chosen:
            if transaction.decided:
                self.note_decided(body)

    def note_decided(self, body: bytes) -> None:
        """Note that the broker has accepted the decision."""
        committed = self.decisions[body] is Decision.COMMIT
        (self.committed if committed else self.rolled_back).add(body)

    async def checked(self, message: MessageView) -> Decision:
        """Answer a check with the application's decision, which may have found no space."""
        return self.decisions.get(message.body, Decision.UNKNOWN)

    async def metrics(self) -> dict[str, int]:
        """Return the broker's metrics of its disk."""
        async with Admin(config=self.config) as admin:
            (found,) = (await admin.metrics()).values()
        return {
            name.removeprefix("halfmq.disk."): int(value)
            for name, value in found.items()
            if name.startswith("halfmq.disk.")
        }

    async def until_full(self, full: bool) -> None:
        """Wait until the broker refuses messages, or accepts them again."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := await self.metrics())["is_full"] != full:
            assert time.monotonic() < deadline, f"it stays {found}"
            await asyncio.sleep(0.05)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "nothing happened"
            await asyncio.sleep(0.02)

    async def until_consumed(self) -> None:
        """Wait until the consumer has all messages acknowledged or committed by now."""
        wanted = self.acknowledged | self.committed
        await self.until(lambda: wanted <= self.consumed.keys())

    async def until_all_decided(self) -> None:
        """Wait until decisions that found no space have succeeded."""
        for body in self.decisions:
            self.note_decided(body)
        await self.until_consumed()

    async def restart(self, rest: Path) -> None:
        """Kill the broker and start it on a full disk: it serves, or logs how much to free."""
        await asyncio.to_thread(self.broker.kill)
        if not await asyncio.to_thread(self._starts):
            await asyncio.to_thread(rest.unlink)
            await asyncio.to_thread(self.broker.start)

    def _starts(self) -> bool:
        try:
            self.broker.start()
        except BrokerStartError as error:
            code, log = error.exit_code, error.log
        else:
            return True
        assert code == 4, log
        assert "free 64 MiB on that disk, then start again" in log
        return False


async def _fill_and_recover(load: Load, disk: Path, *, kills: bool) -> None:
    """Fill the disk twice, and empty it again, under load."""
    stop = asyncio.Event()
    foreign, rest = disk / "foreign", disk / "rest"
    fill(foreign, FOREIGN)
    async with (
        TransactionProducer("full-tx", load.checked, config=load.config) as producer,
        asyncio.TaskGroup() as group,
    ):
        await load.prepare(producer, OPEN)
        for _ in range(SENDERS):
            group.create_task(load.send_until(stop))
        group.create_task(load.consume_until(stop))

        # Messages fill it: further ones are refused, everything else continues.
        await load.until_full(True)
        await asyncio.sleep(0.3)
        before = len(load.acknowledged)
        with pytest.raises(BrokerRefusedError) as refused:
            await load.prepare(producer, 1)
        assert refused.value.code == ResponseCode.SERVICE_NOT_AVAILABLE
        await load.decide(OPEN // 3)
        assert len(load.committed) + len(load.rolled_back) == OPEN // 3
        assert len(load.acknowledged) == before
        assert load.refusals[ResponseCode.SERVICE_NOT_AVAILABLE] > 0
        await load.until_consumed()

        # Another program takes the rest: decisions wait for space, consumption continues.
        fill(rest)
        if kills:
            await load.restart(rest)
        waiting = load.decide(OPEN // 3)
        await load.until_consumed()
        assert kills or not waiting.done()
        assert load.broker.running

        # There is room again: the broker continues without a restart.
        rest.unlink(missing_ok=True)
        foreign.unlink()
        pid = load.broker.pid
        await load.until_full(False)
        before = len(load.acknowledged)
        await load.prepare(producer, 3)
        await load.decide(len(load.open))
        await waiting
        await load.until_all_decided()
        await load.until(lambda: len(load.acknowledged) >= before + 20)
        assert load.broker.pid == pid
        stop.set()


async def _fill_at_once(load: Load, disk: Path) -> None:
    """Have another program fill the whole disk at once, at a random moment."""
    stop = asyncio.Event()
    rest = disk / "rest"
    async with (
        TransactionProducer("full-tx", load.checked, config=load.config) as producer,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(SENDERS):
            group.create_task(load.send_until(stop))
        group.create_task(load.consume_until(stop))
        await load.prepare(producer, 9)
        await asyncio.sleep(load.chance.random())
        await asyncio.to_thread(fill, rest)
        await asyncio.sleep(load.chance.random())
        if load.chance.random() < 0.5:
            await load.restart(rest)
        await load.until_consumed()
        rest.unlink(missing_ok=True)
        await load.decide(len(load.open))
        before = len(load.acknowledged)
        await load.until(lambda: len(load.acknowledged) >= before + 20)
        await load.until_all_decided()
        stop.set()


async def _check(load: Load) -> None:
    """Check that a new consumer gets everything acknowledged, once, and nothing rolled back."""
    wanted = load.acknowledged | load.committed
    seen: set[bytes] = set()
    async with Consumer(
        f"full-auditor-{load.chance.getrandbits(40)}",
        {"full": "*"},
        start_from="first",
        config=load.config,
    ) as consumer:
        while not wanted <= seen:
            message = await consumer.receive(timeout=PATIENCE_S)
            assert message is not None, f"{len(wanted - seen)} of {len(wanted)} are lost"
            assert message.body not in seen, "delivered twice"
            seen.add(message.body)
            await message.ack()
    assert seen <= load.sent | load.committed
    assert not load.rolled_back & seen


@contextlib.contextmanager
def _broker(tmp_path: Path, disk: Path) -> Iterator[BrokerProcess]:
    store = disk / "store"
    with broker_process(tmp_path / "logs", storePathRootDir=store, **SETTINGS) as broker:
        yield broker


def _run(tmp_path: Path, kind: str, seed: int, *, kills: bool, at_once: bool = False) -> None:
    chance = random.Random(seed)
    with small_disk(tmp_path, kind, DISK) as disk, _broker(tmp_path, disk) as broker:
        load = Load(broker, chance)
        if at_once:
            asyncio.run(_fill_at_once(load, disk))
        else:
            asyncio.run(_fill_and_recover(load, disk, kills=kills))
        asyncio.run(_check(load))
        broker.kill()
        broker.start()
        asyncio.run(_check(load))
        assert "Traceback" not in broker.log
        print(
            f"{kind}: acknowledged={len(load.acknowledged)} committed={len(load.committed)} "
            f"rolled_back={len(load.rolled_back)} refused={sum(load.refusals.values())}"
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_costs_nothing_acknowledged(tmp_path: Path, kind: str) -> None:
    """Messages fill it, then another program to the last sector; no restart is needed."""
    _run(tmp_path, kind, printed_seed(), kills=False)


def test_a_broker_starts_on_a_full_disk(tmp_path: Path) -> None:
    """It serves, or exits with code 4 and logs how much to free."""
    _run(tmp_path, "ext4", printed_seed(), kills=True)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", KINDS)
def test_many_full_disks_cost_nothing_acknowledged(tmp_path: Path, kind: str) -> None:
    seed = printed_seed()
    end = time.monotonic() + campaign_seconds()
    turn = 0
    while turn == 0 or time.monotonic() < end:
        directory = tmp_path / str(turn)
        directory.mkdir()
        _run(directory, kind, seed + turn, kills=turn % 3 == 1, at_once=turn % 3 == 2)
        turn += 1
    print(f"{turn} turns")
