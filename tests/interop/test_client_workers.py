"""Workers in processes of their own, stopped and killed in the middle of their messages.

`tests.crash.test_worker_ends` is the campaign of it.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from halfmq.client import Message, Producer
from halfmq.client.testing import BrokerProcess, broker_process
from tests.support.fake_broker import until
from tests.support.patience import PATIENCE_S

WORKER = """
import asyncio, os, sys
from functools import partial
from halfmq.client import ClientConfig, Consumer

address, path = sys.argv[1:]
out = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY)

async def handle(message):
    await asyncio.sleep(0.002)
    os.write(out, message.body + b"\\n")

async def main():
    config = ClientConfig(namesrv=address, offset_commit_interval=0.05)
    async with Consumer("workers", {"jobs": "*"}, start_from="first", config=config) as consumer:
        asyncio.get_running_loop().call_soon(partial(print, "running", flush=True))
        summary = await consumer.run(handle, ordered_by=lambda message: message.body.split()[0])
        print(summary.handled, summary.retried, summary.rejected, summary.left)

asyncio.run(main())
"""
KEYS = 12
JOBS = 400


def _lines(path: Path) -> list[str]:
    return path.read_text().split("\n")[:-1] if path.exists() else []


async def _send(broker: BrokerProcess) -> None:
    async with Producer("jobs-producer", namesrv=broker.address) as producer:
        for job in range(JOBS):
            key = f"k{job % KEYS}"
            await producer.send(Message("jobs", f"{key} {job // KEYS}".encode()), order_key=key)


async def _work(broker: BrokerProcess, path: Path, number: int, handled: int) -> str:
    """Run a worker until this many messages are handled; end it, and return what it printed."""
    worker = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        WORKER,
        broker.address,
        str(path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert worker.stdout is not None
        assert await worker.stdout.readline() == b"running\n"  # its signals are handled from here
        await until(lambda: len(set(_lines(path))) >= handled)
        worker.send_signal(number)
        output, errors = await asyncio.wait_for(worker.communicate(), PATIENCE_S)
    finally:
        if worker.returncode is None:
            worker.kill()
    assert worker.returncode == (0 if number == signal.SIGTERM else -number), errors
    return output.decode().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_workers_that_end_lose_nothing_and_keep_the_order_of_keys(
    number: signal.Signals, tmp_path: Path
) -> None:
    """Stopped ones handle each message exactly once; killed ones at least once."""
    path = tmp_path / "handled"
    runs: list[list[str]] = []
    with broker_process(tmp_path / "broker") as broker:
        sending = asyncio.ensure_future(_send(broker))
        for end, handled in ((number, 90), (number, 210), (signal.SIGTERM, JOBS)):
            printed = await _work(broker, path, end, handled)
            runs.append(_lines(path)[sum(map(len, runs)) :])
            if end == signal.SIGTERM:
                assert printed == f"{len(runs[-1])} 0 0 0"
        await sending

    lines = [line for run in runs for line in run]
    assert len(set(lines)) == JOBS
    if number == signal.SIGTERM:
        assert len(lines) == JOBS
    for run in runs:
        _check_order(run)


def _check_order(run: list[str]) -> None:
    """Of each key without a gap: a killed worker's successor begins again with some it had."""
    by_key: dict[str, list[int]] = defaultdict(list)
    for line in run:
        key, job = line.split()
        by_key[key].append(int(job))
    for jobs in by_key.values():
        assert jobs == list(range(jobs[0], jobs[0] + len(jobs)))
