"""A halfmq master and its Apache RocketMQ slave, killed and frozen under load, then a takeover.

A round ends with a halfmq broker on the files of the slave: the copy of a frozen slave's directory
is what would be left if it were killed in that moment. ``python -m tests.support.replica_rounds
COUNT`` runs many rounds and prints a line for each.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from halfmq.client import (
    Admin,
    ClientConfig,
    ClientError,
    Consumer,
    Decision,
    Message,
    MessageView,
    Producer,
    TransactionProducer,
)
from halfmq.client.testing import BrokerProcess, broker_process, free_port
from tests.support.patience import PATIENCE_S
from tests.support.rocketmq_slave import OfficialSlave


@dataclass
class History:
    """Bodies by what is known of them; a body is sent once."""

    acknowledged: set[str] = field(default_factory=set)
    """Messages and commits that the master has confirmed."""
    rolled_back: set[str] = field(default_factory=set)
    """Transactions whose rollback the master has confirmed."""
    committed: set[str] = field(default_factory=set)
    """Transactions whose commit it has confirmed; they are acknowledged, too."""
    undecided: set[str] = field(default_factory=set)
    """Transactions without a decision whose half was acknowledged."""
    seen: set[str] = field(default_factory=set)
    """What consumers of the master have got."""
    delivered: Counter[str] = field(default_factory=Counter)
    """What consumers of the successor have got, who begin with the first message."""
    sent_after: set[str] = field(default_factory=set)
    """What the successor has acknowledged."""
    asked: Counter[str] = field(default_factory=Counter)
    """What the successor has asked producers about."""

    def faults(self) -> dict[str, set[str]]:
        """Return the bodies for which a promise was broken, by promise; empty if none was."""
        delivered = self.delivered.keys()
        found = {
            "lost": (self.acknowledged | self.sent_after) - delivered,
            "taken back": self.seen - delivered,
            "delivered though rolled back": self.rolled_back & delivered,
            "delivered twice": {body for body, count in self.delivered.items() if count > 1},
            "asked after a decision": (self.rolled_back | self.committed) & self.asked.keys(),
            "not asked": self.undecided - self.asked.keys(),
        }
        return {promise: bodies for promise, bodies in found.items() if bodies}


TOPIC: Final = "orders"
SENDERS: Final = 6  # of each kind
SIZES: Final = {"mappedFileSizeCommitLog": 1 << 20, "mappedFileSizeConsumeQueue": 6_000}
QUIET_S: Final = 1.0  # without a message, after all that was wanted: then nothing else comes
FROZEN_S: Final = (2.0, 15.0)


class Pair:
    """A master and its slave in one directory."""

    def __init__(self, home: Path, **settings: object) -> None:
        """Start the master, with other settings as well."""
        self.home = home
        self.history = History()
        self._stack = contextlib.ExitStack()
        self.master = self._stack.enter_context(
            broker_process(
                home / "master",
                slaveAddresses="127.0.0.1",
                haListenPort=free_port(),
                **{
                    "minInSyncReplicas": 2,
                    "transactionTimeOut": 600_000,
                    **SIZES,
                    **settings,
                },
            )
        )
        self.slave = OfficialSlave(home / "slave", self.master.address, **SIZES)
        self._stack.callback(self.slave.stop)
        self.number = 0

    def close(self) -> None:
        """End both."""
        with contextlib.suppress(ProcessLookupError):
            self.freeze_master(frozen=False)
        self._stack.close()

    def freeze_master(self, *, frozen: bool) -> None:
        """Stop the process of the master, or let it continue."""
        if self.master.running:
            signal_number = signal.SIGSTOP if frozen else signal.SIGCONT
            _kill(self.master.pid, signal_number)

    def freeze_slave(self, *, frozen: bool) -> None:
        """Stop the process of the slave, or let it continue."""
        self.slave.signal(signal.SIGSTOP if frozen else signal.SIGCONT)

    async def in_sync(self) -> None:
        """Return when the slave has the whole log."""
        end = time.monotonic() + PATIENCE_S
        async with Admin(config=_config(self.master)) as admin:
            while True:
                assert time.monotonic() < end, "the slave does not catch up"
                with contextlib.suppress(ClientError):
                    (found,) = (await admin.metrics()).values()
                    if found["halfmq.replication.refusing"] == "0" and (
                        found["halfmq.replication.lag_bytes"] == "0"
                    ):
                        return
                await asyncio.sleep(0.1)

    def body(self, kind: str) -> str:
        """Return a new body."""
        self.number += 1
        return f"{self.number}-{kind}"


def _kill(pid: int, number: signal.Signals) -> None:
    subprocess.run(["kill", f"-{int(number)}", str(pid)], check=True)


def _config(broker: BrokerProcess) -> ClientConfig:
    return ClientConfig(
        namesrv=broker.address,
        send_attempts_max=1,
        reconnect_delay_min=0.02,
        reconnect_delay_max=0.1,
    )


# --- the load

Work = Callable[[], Awaitable[None]]


async def _send(pair: Pair, producer: Producer, kind: str) -> None:
    body = pair.body(kind)
    level = 1 if kind == "delayed" else 0
    await producer.send(Message(TOPIC, body.encode(), keys=body, delay_level=level))
    pair.history.acknowledged.add(body)


async def _transact(pair: Pair, producer: TransactionProducer, kind: str) -> None:
    body, history = pair.body(kind), pair.history
    decision = {"commit": Decision.COMMIT, "rollback": Decision.ROLLBACK}.get(kind)
    async with producer.transaction(Message(TOPIC, body.encode(), keys=body)) as transaction:
        transaction.decide(decision or Decision.UNKNOWN)
    if decision is None:
        history.undecided.add(body)
    elif transaction.decided and decision is Decision.COMMIT:
        history.committed.add(body)
        history.acknowledged.add(body)
    elif transaction.decided:
        history.rolled_back.add(body)


async def _until(stop: asyncio.Event, work: Work, pause: float) -> None:
    while not stop.is_set():
        try:
            await work()
        except (ClientError, OSError):
            await asyncio.sleep(0.05)
        await asyncio.sleep(pause)


async def _watch(pair: Pair, stop: asyncio.Event) -> None:
    """Consume what the master lets consumers see."""
    config = _config(pair.master)
    while not stop.is_set():
        with contextlib.suppress(ClientError, OSError):
            async with Consumer(
                "watchers", {TOPIC: "*"}, start_from="first", config=config
            ) as watcher:
                while not stop.is_set():
                    message = await watcher.receive(0.2)
                    if message is not None:
                        pair.history.seen.add(message.body.decode())
                        await message.ack()
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def load(pair: Pair) -> AsyncIterator[None]:
    """Send, delay, commit, roll back and consume for the duration of the block."""
    stop = asyncio.Event()
    config = _config(pair.master)
    async with (
        Producer("writers", config=config) as plain,
        TransactionProducer(
            "deciders", checker=lambda _: Decision.UNKNOWN, config=config
        ) as deciding,
    ):
        works: list[Work] = []
        for _ in range(SENDERS):
            works += [partial(_send, pair, plain, kind) for kind in ("plain", "delayed")]
            works += [partial(_transact, pair, deciding, kind) for kind in ("commit", "rollback")]
        tasks = [asyncio.create_task(_until(stop, work, 0.002)) for work in works]
        undecided = _until(stop, partial(_transact, pair, deciding, "undecided"), 0.1)
        tasks += [asyncio.create_task(undecided), asyncio.create_task(_watch(pair, stop))]
        try:
            yield
        finally:
            stop.set()
            for task in tasks:  # answers that wait for a dead process
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


# --- the faults: each leaves the slave's files as they are when the takeover begins


async def master_then_slave(pair: Pair, chance: random.Random) -> None:
    """The machine of the master dies, and then the slave's process."""
    await asyncio.to_thread(pair.master.kill)
    await asyncio.sleep(chance.uniform(0, 0.5))
    pair.freeze_slave(frozen=True)


async def slave_then_master(pair: Pair, chance: random.Random) -> None:
    """The slave's process dies, and then, under load that nothing confirms, the master."""
    await asyncio.to_thread(pair.slave.kill)
    await asyncio.sleep(chance.uniform(0, 2.0))
    await asyncio.to_thread(pair.master.kill)


async def both(pair: Pair, _chance: random.Random) -> None:
    """Both die at once."""
    pair.freeze_slave(frozen=True)
    await asyncio.to_thread(pair.master.kill)


async def frozen_slave(pair: Pair, chance: random.Random) -> None:
    """The slave stands still for seconds and goes on; then both die."""
    pair.freeze_slave(frozen=True)
    await asyncio.sleep(chance.uniform(*FROZEN_S))
    pair.freeze_slave(frozen=False)
    await asyncio.sleep(chance.uniform(0, 2.0))
    await both(pair, chance)


async def frozen_master(pair: Pair, chance: random.Random) -> None:
    """The master stands still for seconds and goes on; then both die."""
    pair.freeze_master(frozen=True)
    await asyncio.sleep(chance.uniform(*FROZEN_S))
    pair.freeze_master(frozen=False)
    await asyncio.sleep(chance.uniform(0, 2.0))
    await both(pair, chance)


async def restarted_master(pair: Pair, chance: random.Random) -> None:
    """The master dies and starts again on its own files; then both die."""
    await asyncio.to_thread(pair.master.kill)
    await asyncio.to_thread(pair.master.start)
    await asyncio.sleep(chance.uniform(0, 8.0))  # a slave connects again after five seconds
    await both(pair, chance)


async def restarted_slave(pair: Pair, chance: random.Random) -> None:
    """The slave dies and starts again on its own files; then both die."""
    await asyncio.to_thread(pair.slave.kill)
    await asyncio.to_thread(pair.slave.start)
    await asyncio.sleep(chance.uniform(0, 8.0))
    await both(pair, chance)


async def wiped_slave(pair: Pair, chance: random.Random) -> None:
    """The slave loses its disk, and copies everything again; then both die."""
    await asyncio.to_thread(pair.slave.kill)
    pair.slave.wipe()
    await asyncio.to_thread(pair.slave.start)
    await pair.in_sync()
    await asyncio.sleep(chance.uniform(0, 2.0))
    await both(pair, chance)


async def replaced_master(pair: Pair, chance: random.Random) -> None:
    """The master stands still, the slave takes over, and the master goes on under load."""
    pair.freeze_master(frozen=True)
    await asyncio.sleep(chance.uniform(0, 1.0))
    pair.freeze_slave(frozen=True)  # its files are copied now, and it follows nobody any more
    _copy(pair)
    pair.freeze_master(frozen=False)
    await asyncio.sleep(2.0)
    await asyncio.to_thread(pair.master.kill)


Fault = Callable[[Pair, random.Random], Awaitable[None]]

FAULTS: Final[tuple[Fault, ...]] = (
    *(master_then_slave, slave_then_master, both, frozen_slave, frozen_master),
    *(restarted_master, restarted_slave, wiped_slave, replaced_master),
)


# --- the takeover


def _copy(pair: Pair) -> None:
    shutil.rmtree(pair.home / "successor", ignore_errors=True)
    shutil.copytree(pair.slave.store, pair.home / "successor" / "store")


async def _take_over(pair: Pair) -> History:
    """Start a halfmq broker on the slave's files; return what it delivered and asked."""
    history = pair.history
    history.delivered.clear()
    history.asked.clear()

    def check(message: MessageView) -> Decision:
        body = message.body.decode()
        history.asked[body] += 1
        return {"commit": Decision.COMMIT, "rollback": Decision.ROLLBACK}.get(
            body.partition("-")[2], Decision.ROLLBACK
        )

    settings = {**SIZES, "transactionTimeOut": 500, "transactionCheckInterval": 1_000}
    with broker_process(pair.home / "successor", **settings) as successor:
        async with TransactionProducer("deciders", checker=check, config=_config(successor)):
            await _send_after(successor, history)
            await _consume(successor, history)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    while not history.undecided <= history.asked.keys():  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
        await asyncio.to_thread(successor.stop)
    return history


async def _send_after(successor: BrokerProcess, history: History) -> None:
    """Send what gets the queue offsets after those of the copy, and none of them."""
    history.sent_after = {f"{number}-after" for number in range(8)}
    async with Producer("successors", config=_config(successor)) as producer:
        for body in sorted(history.sent_after):
            await producer.send(Message(TOPIC, body.encode(), keys=body))


async def _consume(successor: BrokerProcess, history: History) -> None:
    """Consume everything; return when all that is wanted has come, and nothing else comes."""
    last, end = time.monotonic(), time.monotonic() + PATIENCE_S
    wanted = history.acknowledged | history.seen | history.sent_after
    async with Consumer(
        "auditors", {TOPIC: "*"}, start_from="first", config=_config(successor)
    ) as auditor:
        while time.monotonic() < end:
            message = await auditor.receive(QUIET_S)
            if message is not None:
                history.delivered[message.body.decode()] += 1
                await message.ack()
                last = time.monotonic()
            elif time.monotonic() - last > QUIET_S and wanted <= history.delivered.keys():
                return


async def run_round(pair: Pair, fault: Fault, chance: random.Random) -> History:
    """Load the pair, let the fault happen, and let a broker on the slave's files take over."""
    await pair.in_sync()
    shutil.rmtree(pair.home / "successor", ignore_errors=True)
    async with load(pair):
        while not pair.history.acknowledged:  # noqa: ASYNC110 -- many tasks add to it
            await asyncio.sleep(0.05)
        await asyncio.sleep(chance.uniform(0.5, 2.0))
        await fault(pair, chance)
    if not (pair.home / "successor").exists():
        await asyncio.to_thread(_copy, pair)
    return await _take_over(pair)


async def repair(pair: Pair, fault: Fault) -> None:
    """Let the pair go on after a round: the master has all that the slave has."""
    if fault is slave_then_master:
        await asyncio.to_thread(pair.slave.start)
    else:
        pair.freeze_slave(frozen=False)
    await asyncio.to_thread(pair.master.start)


def name_of(fault: Fault) -> str:
    """Return the name of a fault."""
    return str(getattr(fault, "__name__", fault))


def shown(history: History) -> str:
    """Return the numbers of a round, and what was broken."""
    counts = ("acknowledged", "rolled_back", "undecided", "seen", "delivered", "asked")
    numbers = " ".join(f"{name}={len(getattr(history, name))}" for name in counts)
    broken = {promise: sorted(bodies)[:3] for promise, bodies in history.faults().items()}
    return f"{numbers} broken={broken}"


def main(count: int, seed: int) -> int:
    """Run rounds, a pair for one of each fault; return how many broke a promise."""
    chance = random.Random(seed)
    broken = done = 0
    while done < count:
        with tempfile.TemporaryDirectory(prefix="replica-") as home:
            pair = Pair(Path(home))
            try:
                pair.slave.start()
                for fault in chance.sample(FAULTS, len(FAULTS)):
                    began = time.monotonic()
                    history = asyncio.run(run_round(pair, fault, chance))
                    done += 1
                    broken += bool(history.faults())
                    seconds = time.monotonic() - began
                    print(
                        f"round={done} fault={name_of(fault)} seconds={seconds:.0f}",
                        shown(history),
                        flush=True,
                    )
                    asyncio.run(repair(pair, fault))
            finally:
                pair.close()
    return broken


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1) > 0)
