"""Runs attacks beside the probe, and judges what they did."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

from halfmq.client.testing import BrokerProcess, broker_process

from .attacker import Attack, Attacker
from .machine import few_descriptors

LOG_MAX: Final = 4 << 20
"""Characters that the broker may log during an attack; each line is short and says something."""

UNDISTURBED_S: Final = 1.0
"""Seconds of the probe before an attack, and after its connections are closed."""

LINGER_S: Final = 1.0
"""Seconds for which an attack's connections stay open after its last byte."""

RELEASE_S: Final = 30.0
"""Seconds in which memory must return. Waiting costs only those rows that fail."""

ROOT: Final = Path(__file__).parents[2]


class Memory(NamedTuple):
    """Of the broker's process, in MB."""

    resident: int
    peak: int
    own: int  # without mapped files


HEAD: Final = (
    "| Attack | Once | Took, s | Probe before, p99/max ms | During | After "
    f"| RSS before/peak/after, MB | Own before/after | Holds |\n|{'---|' * 9}"
)
"""Of the table of results."""


class Result(NamedTuple):
    """What an attack did."""

    name: str
    before: Memory
    after: Memory
    phases: list[Mapping[str, Any]]  # of the probe: before, during and after the attack
    lost: int
    seconds: float  # that the attack took
    log: str  # of the broker
    once: str  # what the attack did before the broker was bounded

    def waited_ms(self, phase: int) -> str:
        """Return the 99th percentile and the longest of the probe's waits."""
        waits = sorted(self.phases[phase]["waits_ms"]) or [0.0]
        return f"{waits[len(waits) * 99 // 100]:.0f}/{waits[-1]:.0f}"

    def __str__(self) -> str:
        before, during, after = map(self.waited_ms, range(3))
        cells = (
            f"{self.name:32}",
            f"{self.once:20}",
            f"{self.seconds:5.1f}",
            f"{before:>9}",
            f"{during:>9}",
            f"{after:>9}",
            f"{self.before.resident:3}/{self.after.peak:3}/{self.after.resident:3}",
            f"{self.before.own:3}/{self.after.own:3}",
            "; ".join(self.complaints) or "yes",
        )
        return f"| {' | '.join(cells)} |"

    complaints: tuple[str, ...] = ()


def check(result: Result, attack: Attack) -> tuple[str, ...]:
    """Return what an attack did that it must not; empty if all promises were kept."""
    refusals = [text for phase in result.phases for text in phase["refusals"]]
    errors = [line for line in result.log.splitlines() if "Traceback" in line or " ERROR" in line]
    cases = {
        f"{result.lost} messages lost": result.lost,
        f"connections of the probe closed: {_sum(result, 'closed')}": _sum(result, "closed"),
        f"sends of the probe refused: {refusals}": refusals,
        f"{_sum(result, 'early')} long polls answered early": _sum(result, "early"),
        f"{len(result.log)} characters of log": len(result.log) > LOG_MAX,
        f"errors: {errors}": errors,
        f"peak {result.after.peak} MB": result.after.peak > attack.peak_max_mb,
        f"{result.after.own - result.before.own} MB kept": result.after.own
        > result.before.own + attack.kept_max_mb,
    }
    return tuple(text for text, is_so in cases.items() if is_so)


def _sum(result: Result, count: str) -> int:
    return sum(phase[count] for phase in result.phases)


def run(name: str, attack: Attack, directory: Path, random: Random) -> Result:
    """Run one attack on a broker of its own."""
    with contextlib.ExitStack() as opened:
        with few_descriptors(directory, attack.descriptors or 1 << 16):
            broker = opened.enter_context(broker_process(directory, **attack.settings))
        return run_on(broker, {name: attack}, random)


def run_on(broker: BrokerProcess, attacks: Mapping[str, Attack], random: Random) -> Result:
    """Run attacks one after the other on a broker; all but their settings count."""
    with _probe(broker.address) as probe:
        time.sleep(UNDISTURBED_S)
        before, began = _memory(broker.pid), time.monotonic()
        _next_phase(probe)
        for attack in attacks.values():
            attacker = Attacker(broker.address, random)
            try:
                attack.act(attacker)
                time.sleep(LINGER_S)
            finally:
                attacker.close()
        seconds = time.monotonic() - began - LINGER_S * len(attacks)
        _next_phase(probe)
        time.sleep(UNDISTURBED_S)
        limit = time.monotonic() + RELEASE_S
        widest = Attack(
            _mixed,
            peak_max_mb=max(attack.peak_max_mb for attack in attacks.values()),
            # Each may leave what it may leave alone: pools of the allocator add up.
            kept_max_mb=sum(attack.kept_max_mb for attack in attacks.values()),
        )
        while time.monotonic() < limit:
            is_busy = _is_busy(broker.pid)  # it still serves what was sent before the close
            after = _memory(broker.pid)
            if not is_busy and after.own <= before.own + widest.kept_max_mb:
                break
        report = json.loads(probe.communicate()[0].splitlines()[-1])
    result = Result(
        " + ".join(attacks),
        before,
        after,
        report["phases"],
        report["lost"],
        seconds,
        broker.log,
        ", ".join(attack.once for attack in attacks.values()),
    )
    return result._replace(complaints=check(result, widest))


def _mixed(_attacker: Attacker) -> None:
    """Stand for several attacks, of which each ceiling is the largest."""


@contextmanager
def _probe(address: str) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-m", "tests.hostile.probe", address]
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def _next_phase(probe: subprocess.Popen[str]) -> None:
    assert probe.stdin is not None
    probe.stdin.write("\n")
    probe.stdin.flush()


def _is_busy(pid: int) -> bool:
    """Return whether the process runs for more than a fifth of the next half second."""

    def ticks() -> int:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    began = ticks()
    time.sleep(0.5)
    return ticks() - began > os.sysconf("SC_CLK_TCK") // 10


def _memory(pid: int) -> Memory:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return Memory(*(int(fields[key].split()[0]) >> 10 for key in ("VmRSS", "VmHWM", "RssAnon")))
