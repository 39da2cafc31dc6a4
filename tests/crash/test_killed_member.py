"""`kill -9` of one of several brokers under one command: nothing acknowledged is lost.

The others go on, and it is started again. As a campaign for `HALFMQ_CAMPAIGN_SECONDS` (60).
"""

import asyncio
import os
import random
import signal
import time
from datetime import datetime
from pathlib import Path
from typing import Final

import pytest

from halfmq.client import (
    Admin,
    ClientConfig,
    ClientError,
    Decision,
    Message,
    MessageView,
    Producer,
    TransactionProducer,
)
from halfmq.client.testing import BrokerProcess, broker_process
from tests.support.broker_processes import is_back, pids
from tests.support.ledger import Ledger, consume_all
from tests.support.patience import PATIENCE_S
from tests.support.seeds import campaign_seconds, printed_seed

BROKERS: Final = 2
SENDERS: Final = 4
SETTINGS: Final = {
    "brokers": BROKERS,
    "mappedFileSizeCommitLog": 1 << 20,
    "mappedFileSizeConsumeQueue": 20_000,
    "transactionTimeOut": 500,
    "transactionCheckInterval": 500,
}


class Load:
    """Producers of messages and transactions."""

    def __init__(self, command: BrokerProcess) -> None:
        self.config = ClientConfig(
            namesrv=command.address, reconnect_delay_min=0.02, reconnect_delay_max=0.1
        )
        self.ledger = Ledger()
        self.stop = asyncio.Event()

    async def send(self, name: str) -> None:
        """Send plain messages until the end."""
        number = 0
        async with Producer("killed-plain", config=self.config) as producer:
            while not self.stop.is_set():
                number += 1
                body = f"{name}-{number}".encode()
                self.ledger.sent.add(body)
                try:
                    await producer.send(Message("crash", body))
                except ClientError:
                    await asyncio.sleep(0.01)  # the outcome stays in doubt
                else:
                    self.ledger.acknowledged.add(body)

    async def transact(self, name: str, done: asyncio.Event) -> None:
        """Commit and roll back in turn until the end; then answer checks until ``done``."""
        number = 0
        async with TransactionProducer("killed-tx", _decide, config=self.config) as producer:
            while not self.stop.is_set():
                number += 1
                body = f"{name}-{number}-{('commit', 'rollback')[number % 2]}".encode()
                if body.endswith(b"commit"):
                    self.ledger.sent.add(body)
                try:
                    async with producer.transaction(Message("crash", body)) as transaction:
                        transaction.decide(_decision(body))
                except ClientError:
                    await asyncio.sleep(0.01)
                else:
                    if body.endswith(b"commit"):
                        self.ledger.acknowledged.add(body)
            await done.wait()


def _decision(body: bytes) -> Decision:
    return Decision.COMMIT if body.endswith(b"commit") else Decision.ROLLBACK


async def _decide(message: MessageView) -> Decision:
    return _decision(message.body)


async def _kill(command: BrokerProcess, name: str, load: Load) -> None:
    """Kill a broker under load; a new producer is served meanwhile. Return when it is back."""
    before, body = pids(command, name), f"new-{len(load.ledger.sent)}".encode()
    os.kill(before[-1], signal.SIGKILL)
    load.ledger.sent.add(body)
    async with Producer("killed-new", config=load.config) as producer:
        result = await producer.send(Message("crash", body))
    load.ledger.acknowledged.add(body)
    assert result.queue.broker_name != name or is_back(command, name, before)
    async with asyncio.timeout(PATIENCE_S):
        while not is_back(command, name, before):  # noqa: ASYNC110 -- it is told by its log
            await asyncio.sleep(0.02)


async def _run(command: BrokerProcess, seconds: float, chance: random.Random) -> Ledger:
    load, done = Load(command), asyncio.Event()
    async with Admin(config=load.config) as admin:
        await admin.create_topic("crash", queues=2)
    async with asyncio.TaskGroup() as group:
        for number in range(SENDERS):
            group.create_task(load.send(f"plain-{number}"))
            group.create_task(load.transact(f"tx-{number}", done))
        end = time.monotonic() + seconds
        names = [f"broker-a-{number}" for number in range(BROKERS)]
        rounds = 0
        while rounds < BROKERS or time.monotonic() < end:
            await asyncio.sleep(chance.uniform(0.1, 0.6))
            await _kill(command, names[rounds % BROKERS], load)
            rounds += 1
        load.stop.set()
        consuming = consume_all(load.ledger, load.config, load.ledger.acknowledged)
        await asyncio.wait_for(consuming, PATIENCE_S)
        done.set()
    if not load.ledger.acknowledged <= load.ledger.consumed.keys():  # the last ones of the senders
        await asyncio.wait_for(
            consume_all(load.ledger, load.config, load.ledger.acknowledged), PATIENCE_S
        )
    return load.ledger


def _away_s(command: BrokerProcess) -> list[float]:
    """Return the seconds from the end of each killed broker to its first answer to another."""
    ended: dict[str, datetime] = {}
    found = []
    for line in command.log.splitlines():
        when = datetime.fromisoformat(line.partition(" ")[0])
        if "event=child_ended child=" in line:
            ended[line.partition("child_ended child=")[2].partition(" ")[0]] = when
        elif "event=broker_registered broker=" in line:
            name = line.partition("broker_registered broker=")[2].partition(" ")[0]
            if name in ended:
                found.append((when - ended.pop(name)).total_seconds())
    return found


def _check(tmp_path: Path, seconds: float) -> None:
    with broker_process(tmp_path, **SETTINGS) as command:
        ledger = asyncio.run(_run(command, seconds, random.Random(printed_seed())))
        away = _away_s(command)
    assert ledger.acknowledged <= ledger.consumed.keys()
    assert ledger.consumed.keys() <= ledger.sent  # nothing that was rolled back
    assert len(away) >= BROKERS
    print(
        f"kills={len(away)} acknowledged={len(ledger.acknowledged)}"
        f" away_s={min(away):.2f}..{max(away):.2f}"
    )


def test_a_killed_broker_loses_nothing_and_is_started_again(tmp_path: Path) -> None:
    """Each of two is killed once under load."""
    _check(tmp_path, 0)


@pytest.mark.campaign
def test_many_kills_of_brokers_lose_nothing(tmp_path: Path) -> None:
    """The same until the campaign ends, one broker after the other."""
    _check(tmp_path, campaign_seconds())
