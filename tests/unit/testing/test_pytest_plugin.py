"""The fixtures serve every way in which pytest runs asynchronous tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.documents import examples

TESTS = """
import pytest
from halfmq.client import Consumer, Message, Producer
{marks}

{first}
async def publishing(broker):
    async with Producer("shop", namesrv=broker.address) as producer:
        await producer.send(Message("orders", b"4711"))

async def test_one(halfmq_broker):
    await publishing(halfmq_broker)
    assert [one.body for one in await halfmq_broker.messages("orders")] == [b"4711"]

async def test_other(halfmq_broker):
    assert await halfmq_broker.messages("orders") == []
    await publishing(halfmq_broker)
    await halfmq_broker.advance(60)
    async with Consumer("g", {{"orders": "*"}}, namesrv=halfmq_broker.address) as consumer:
        assert (await consumer.receive()).body == b"4711"
"""

ANYIO = """
@pytest.fixture
def anyio_backend():
    return "asyncio"
"""

WAYS = {
    "strict": ("-o asyncio_mode=strict", "pytestmark = pytest.mark.asyncio", ""),
    "auto": ("-o asyncio_mode=auto", "", ""),
    "session": ("-o asyncio_mode=auto -o asyncio_default_test_loop_scope=session", "", ""),
    "anyio": ("-p no:asyncio", "pytestmark = pytest.mark.anyio", ANYIO),
    "xdist": ("-o asyncio_mode=auto -n 2", "", ""),
}


def _run_pytest(directory: Path, options: str, *, passed: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options.split(), "test_shop.py"],
        cwd=directory,
        env={key: value for key, value in os.environ.items() if not key.startswith("PYTEST")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{passed} passed" in done.stdout


@pytest.mark.parametrize("way", WAYS)
def test_tests_of_users_run(way: str, tmp_path: Path) -> None:
    """Strict and auto mode of pytest-asyncio, one loop for all tests, anyio, and xdist."""
    options, marks, first = WAYS[way]
    (tmp_path / "test_shop.py").write_text(TESTS.format(marks=marks, first=first))

    _run_pytest(tmp_path, options, passed=2)


def test_the_test_in_the_documentation_passes(tmp_path: Path) -> None:
    [shown] = [one for one in examples("docs/testing.md") if "halfmq_broker: " in one.code]
    (tmp_path / "test_shop.py").write_text(shown.code)

    _run_pytest(tmp_path, "-o asyncio_mode=auto", passed=1)


def test_a_process_serves_blocking_clients(tmp_path: Path) -> None:
    (tmp_path / "test_shop.py").write_text(
        """
from halfmq.client.blocking import Message, Producer

def test_sending(halfmq_process):
    with Producer("shop", namesrv=halfmq_process.address) as producer:
        assert producer.send(Message("orders", b"4711")).queue_offset == 0
"""
    )

    _run_pytest(tmp_path, "", passed=1)
