"""Two workers of a group at a time, one of which is always about to be killed or stopped.

A campaign: `HALFMQ_WORKER_ENDS` (200) ends in each way to consume, or as many as
`HALFMQ_CAMPAIGN_SECONDS` allow. The seed is printed and can be set by `HALFMQ_SEED`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import random
import signal
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from halfmq.client import Message, Producer
from halfmq.client.testing import broker_process
from tests.support.ending_worker import main
from tests.support.patience import PATIENCE_S, until
from tests.support.seeds import printed_seed

FORKS: Final = multiprocessing.get_context("forkserver")
"""Where workers come from: to import the client takes longer than most of them live."""
FORKS.set_forkserver_preload(["tests.support.ending_worker"])
KEYS: Final = 12


class Line(NamedTuple):
    """What a worker has said."""

    worker: str
    word: str
    key: str
    job: int

    @property
    def message(self) -> tuple[str, int]:
        return self.key, self.job


class Team:
    """A topic, a producer of jobs, and two workers."""

    def __init__(
        self, topic: str, address: str, path: Path, how: dict[str, Any], calls: str
    ) -> None:
        self.topic, self.address, self.path = topic, address, path
        self._how, self._calls = json.dumps(how), calls
        self._numbers = itertools.count()
        self.workers: dict[str, ForkServerProcess] = {}
        self.ends: dict[str, signal.Signals] = {}
        self.sent = 0
        self._left: dict[str, int] = {}
        self._lines: list[Line] = []
        self._done: set[tuple[str, int]] = set()
        self._running: set[str] = set()
        path.touch()
        self._read_bytes = 0

    def lines(self) -> list[Line]:
        """All that was said, in its order."""
        with self.path.open("rb") as file:
            file.seek(self._read_bytes)
            whole, end, _ = file.read().rpartition(b"\n")
        self._read_bytes += len(whole + end)
        for said in whole.decode().splitlines():
            worker, word, key, job = said.split()
            line = Line(worker, word, key, int(job))
            self._lines.append(line)
            if word == "did":
                self._done.add(line.message)
            elif word == "runs":
                self._running.add(worker)
        return self._lines

    def done(self) -> set[tuple[str, int]]:
        self.lines()
        return self._done

    def running(self) -> set[str]:
        self.lines()
        return self._running

    async def send_until(self, enough: asyncio.Event, pause_s: float) -> None:
        """Send jobs, fewer than the workers handle."""
        async with Producer(f"{self.topic}-p", namesrv=self.address) as producer:
            for number in itertools.count():
                key = f"k{number % KEYS}"
                body = f"{key} {number // KEYS}".encode()
                await producer.send(Message(self.topic, body), order_key=key)
                self.sent = number + 1
                await asyncio.sleep(pause_s)
                if enough.is_set():
                    return

    async def fill(self) -> None:
        """Have two workers that run."""
        while len(self.workers) < 2:
            name = f"w{next(self._numbers)}"
            words = [self.address, self.topic, self.path, name, self._how, self._calls]
            self.workers[name] = FORKS.Process(target=main, args=tuple(map(str, words)))
            self.workers[name].start()
            await until(lambda: name in self.running())  # noqa: B023

    async def end(self, name: str, number: signal.Signals) -> None:
        worker = self.workers.pop(name)
        assert worker.pid is not None
        os.kill(worker.pid, number)
        self.ends[name] = number
        await asyncio.to_thread(worker.join, PATIENCE_S)
        assert worker.exitcode == (0 if number == signal.SIGTERM else -number)

    async def end_all(self) -> None:
        for name in tuple(self.workers):
            await self.end(name, signal.SIGTERM)

    def kill_all(self) -> None:
        for worker in self.workers.values():
            worker.kill()
            worker.join()

    def check(self, *, ordered: bool, exclusive: bool) -> tuple[int, int]:
        """Check all that is promised; return how much was handled, and how much again.

        A queue moves when a member joins. What the other one had in hand then is handled by both,
        unless the queues are locked or messages shared: there it is ``exclusive``.
        """
        lines = self.lines()
        did = [line.message for line in lines if line.word == "did"]
        assert len(set(did)) == self.sent
        since, drained = self._joined(lines), dict[tuple[str, int], str]()
        for line in lines:
            before = drained.get(line.message)
            if line.word == "got" and before is not None:
                assert not exclusive, f"{line} was drained by {before}"
                assert since[line.worker] < self._left[before], f"{line} was drained by {before}"
            elif line.word == "did" and self.ends[line.worker] == signal.SIGTERM:
                drained[line.message] = line.worker
        if ordered:
            self._check_order(lines, exclusive=exclusive)
        return len(did), len(did) - len(set(did))

    def _joined(self, lines: list[Line]) -> dict[str, int]:
        """Where each worker began; sets where each one ended."""
        self._left = {line.worker: number for number, line in enumerate(lines)}
        return {line.worker: number for number, line in enumerate(lines) if line.word == "runs"}

    def _check_order(self, lines: list[Line], *, exclusive: bool) -> None:
        """A job comes when the one before it was done; if exclusive, nobody else has one then."""
        at_work: dict[str, Line] = {}
        next_job: dict[str, int] = defaultdict(int)
        for line in lines:
            before = at_work.get(line.key)
            if line.word == "got":
                assert line.job <= next_job[line.key], f"{line} comes too early"
                if exclusive and before is not None and before.worker != line.worker:
                    assert self.ends[before.worker] == signal.SIGKILL, f"{line} while {before}"
                at_work[line.key] = line
            elif line.word == "did":
                next_job[line.key] = max(next_job[line.key], line.job + 1)
                if before is not None and before.message == line.message:
                    del at_work[line.key]


class Way(NamedTuple):
    """A way to consume, and how the campaign goes about it."""

    how: dict[str, Any]
    calls: str
    teams: int
    """Each kill of a worker holds up the queues that it has locked for 30 s: so there are more."""
    pause_s: float
    """Between two sends."""


WAYS: Final = {
    "ordered": Way({"ordered": True}, "", 6, 0.03),
    "messages": Way({"share": "messages", "ack_timeout": 5.0}, "", 1, 0.01),
    "ordered_by": Way({}, "ordered_by", 1, 0.01),
}


@pytest.mark.campaign
@pytest.mark.parametrize("way", WAYS)
async def test_two_workers_at_once_end_at_any_moment(way: str, tmp_path: Path) -> None:
    """All messages are handled, in order where promised; what a stopped worker did stays done."""
    chance = random.Random(printed_seed())
    how, calls, teams_count, pause_s = WAYS[way]
    ends_max = int(os.environ.get("HALFMQ_WORKER_ENDS", "200"))
    until_time = time.monotonic() + float(os.environ.get("HALFMQ_CAMPAIGN_SECONDS", "3600"))
    async with AsyncExitStack() as stack:
        broker = stack.enter_context(broker_process(tmp_path / "broker"))
        enough = asyncio.Event()
        teams = [
            Team(f"jobs-{number}", broker.address, tmp_path / f"said-{number}", how, calls)
            for number in range(teams_count)
        ]
        for team in teams:
            stack.callback(team.kill_all)
        sending = [asyncio.create_task(team.send_until(enough, pause_s)) for team in teams]

        async def act(team: Team) -> None:
            for _ in range(ends_max // len(teams)):
                await team.fill()
                target = len(team.done()) + chance.randrange(1, 40)
                await until(lambda: len(team.done()) >= target)  # noqa: B023
                number = chance.choice((signal.SIGKILL, signal.SIGTERM))
                await team.end(chance.choice(sorted(team.workers)), number)
                if time.monotonic() > until_time:
                    return

        await asyncio.gather(*(act(team) for team in teams))
        enough.set()
        await asyncio.gather(*sending)
        for team in teams:
            await team.fill()
        for team in teams:
            await until(lambda: len(team.done()) == team.sent)  # noqa: B023
            await team.end_all()
    for team in teams:
        handled, again = team.check(ordered=way != "messages", exclusive=way != "ordered_by")
        kills = list(team.ends.values()).count(signal.SIGKILL)
        print(f"{way}: {len(team.ends)} ends, {kills} kills, {team.sent} sent, {again} again")
        assert handled
