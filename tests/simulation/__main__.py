"""``python -m tests.simulation --seeds A..B [--trace]``: run seeds, or trace one."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Final, NamedTuple

from .world import run

HASH_SEED: Final = "PYTHONHASHSEED"
SEEDS_PER_POOL: Final = 1_000
"""Seeds until fresh processes take over: killed coroutines leave a megabyte per run."""


class Outcome(NamedTuple):
    """The result of a run, as another process returns it."""

    seed: int
    violations: list[str]
    steps: int
    events: Counter[str]
    seconds: float  # of processor time


def outcome_of(seed: int) -> Outcome:
    """Run one seed."""
    started = time.process_time()
    world = run(seed)
    seconds = time.process_time() - started
    return Outcome(seed, world.records.violations, world.loop.steps, world.records.events, seconds)


def outcomes(seeds: range, processes: int) -> Iterator[Outcome]:
    """Run seeds in several processes."""
    if processes == 1:
        yield from map(outcome_of, seeds)
        return
    for first in range(0, len(seeds), SEEDS_PER_POOL):
        with ProcessPoolExecutor(processes) as pool:
            yield from pool.map(outcome_of, seeds[first : first + SEEDS_PER_POOL], chunksize=8)


def fix_hashes(module: str) -> None:
    """Restart with a fixed hash seed: the order of sets of strings is part of a run."""
    if os.environ.get(HASH_SEED) != "0":
        os.environ[HASH_SEED] = "0"
        os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])


def _seeds(text: str) -> range:
    first, _, last = text.partition("..")
    return range(int(first), int(last or first) + 1)


def _show(seed: int) -> int:
    """Print every event of a run."""
    world = run(seed, keep_trace=True)
    print(world.scenario)
    for event in world.loop.trace or ():
        print(*event)
    for violation in world.records.violations:
        print("VIOLATION", violation)
    print(dict(world.records.events))
    print(f"seed {seed}: {world.loop.steps} steps, digest {world.loop.digest:08x}")
    return 1 if world.records.violations else 0


def main() -> int:
    """Run the seeds of the arguments; return 1 if an invariant was violated."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=_seeds, default=range(100), metavar="A..B")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--trace", action="store_true", help="print every event of the first seed")
    arguments = parser.parse_args()
    if arguments.trace:
        return _show(arguments.seeds[0])
    count = steps = bad = 0
    seconds = 0.0
    events = Counter[str]()
    for outcome in outcomes(arguments.seeds, arguments.processes):
        count, steps = count + 1, steps + outcome.steps
        seconds += outcome.seconds
        bad += bool(outcome.violations)
        events += outcome.events
        for violation in outcome.violations:
            print(f"seed {outcome.seed}: {violation}", flush=True)
        if count % 500 == 0:
            print(f"... {count} seeds, {bad} with violations", flush=True)
    print(
        f"{count} seeds from {arguments.seeds[0]} to {arguments.seeds[-1]}, {steps} steps, "
        f"{seconds / count * 1000:.0f} ms each, {bad} with violations"
    )
    print(", ".join(f"{number} x {name}" for name, number in sorted(events.items())))
    return 1 if bad else 0


if __name__ == "__main__":
    fix_hashes("tests.simulation")
    sys.exit(main())
