"""Several brokers under one command (`brokers=N`), as processes that a test can kill."""

from __future__ import annotations

import os
import re

from halfmq.client.testing import BrokerProcess


def pids(command: BrokerProcess, name: str) -> list[int]:
    """Return the process ids that a broker has had, the present one last."""
    return [int(pid) for pid in re.findall(rf"child={name} pid=(\d+)", command.log)]


def is_back(command: BrokerProcess, name: str, before: list[int]) -> bool:
    """Return whether a broker that had these processes serves again, in another one."""
    last = command.log.rpartition(f"child={name} pid=")[2]
    others = f"event=broker_registered broker={name} "
    return len(pids(command, name)) > len(before) and others in last


def has_ended(pid: int) -> bool:
    """Return whether there is no such process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
