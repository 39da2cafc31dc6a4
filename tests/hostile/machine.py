"""Attacks on what the machine has: file descriptors, and names that are kept on its disk."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final
from unittest.mock import patch

from halfmq.remoting.bodies import ConsumerData, HeartbeatData, encode_heartbeat
from halfmq.remoting.codes import RequestCode
from tests.support.usual_headers import send_header

from .attacker import Attack, Attacker, frame, pages

DESCRIPTORS: Final = 256


@contextlib.contextmanager
def few_descriptors(directory: Path, count: int) -> Iterator[None]:
    """Start Python with at most so many descriptors; the broker cannot raise that limit."""
    python = directory / "python"
    python.write_text(f'#!/bin/sh\nulimit -n {count}\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    with patch.object(sys, "executable", str(python)):
        yield


def no_descriptor_left(attacker: Attacker) -> None:
    """Open 600 connections to a broker of 256 descriptors, and send to new topics meanwhile."""
    wire = attacker.wire()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1_000
    for number in range(600):
        with contextlib.suppress(OSError):
            attacker.connect()
        if number % 10 == 0:
            header = send_header(topic=f"while-{number}")
            assert wire.ask(RequestCode.SEND_MESSAGE_V2, header, b"x").code == 0


def many_names(attacker: Attacker) -> None:
    """Name 20,000 topics and 10,000 groups, then commit 200,000 offsets of absent queues."""

    def send(number: int) -> bytes:
        header = send_header(topic=f"named-{number}")
        return frame(RequestCode.SEND_MESSAGE_V2, header, b"x", one_way=True)

    attacker.flood(*pages(20_000, send))
    wire = attacker.wire()
    for start in range(0, 10_000, 500):
        groups = [ConsumerData(group_name=f"g-{start + number}") for number in range(500)]
        data = HeartbeatData(client_id="c", consumer_data_set=tuple(groups))
        wire.ask(RequestCode.HEART_BEAT, body=encode_heartbeat(data))

    def commit(number: int) -> bytes:
        header = {
            "consumerGroup": f"g-{number}",
            "topic": "probe",
            "queueId": str(1_000 + number),
            "commitOffset": "1",
        }
        return frame(RequestCode.UPDATE_CONSUMER_OFFSET, header, one_way=True)

    (commits,) = pages(1_000, commit, 1_000)
    attacker.flood(*[commits] * 200)


MACHINE: Final[Mapping[str, Attack]] = {
    "no descriptor left": Attack(no_descriptor_left, "upkeep ended", descriptors=DESCRIPTORS),
    "many names": Attack(
        many_names, "others locked out", kept_max_mb=100
    ),  # these names, until they end
}
