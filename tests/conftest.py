"""Which tests are slow, how they are shared out among processes, and Hypothesis' profile.

No test depends on how fast the machine is: see `tests.support.patience`.
"""

from __future__ import annotations

import gc
import os
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling, Scheduling
from xdist.workermanage import WorkerController

from halfmq.broker.loop import slices
from halfmq.broker.net import shared_state
from halfmq.client import ClientConfig
from halfmq.store.files import disk
from tests.support.cache import cache_directory
from tests.support.patience import PATIENCE_S
from tests.support.seeds import EXAMPLES, NAME, run_seed

SLOW = (
    "tests/browser/",
    "tests/crash/",
    "tests/hostile/",
    "tests/interop/",
    "tests/property/test_store_damage.py",
    "tests/property/test_store_verify.py",
    "tests/quality/test_example_types.py",
    "tests/quality/test_packaging.py",
    "tests/quality/test_readme.py::test_the_audit_line_runs_on_the_live_directory",
    "tests/quality/test_sourcecode.py::test_types_are_sound",
    "tests/simulation/test_simulation.py::test_a_missing_protection_is_found",
    "tests/simulation/test_simulation.py::test_a_seed_replays_exactly",
    "tests/simulation/test_simulation.py::test_every_mutation_fits_the_code",
    "tests/spark/",
    "tests/unit/broker/access/test_misconfigured.py",
)
"""What is marked `slow`, by how its node ids begin: 6 % of the tests, 60 % of the time."""

QUICK = (
    "tests/hostile/test_access.py",
    "tests/interop/test_golden_answers.py",
    "tests/spark/test_job_steps.py",
)
"""What of it is not marked."""

RUN_THEM = "pytest -m 'not campaign' runs the slow ones too, pytest -m campaign the campaigns"

DOSE = "HALFMQ_CAMPAIGN_TESTS"
"""Most tests of one file that a run of campaigns takes, others in every run; all when not set."""

SPARK = "tests/spark/"
"""Tests that share one Spark session, hence one process: to start one takes as long as most."""

WORKERS_MAX = 4
"""Processes of a parallel run."""


settings.register_profile(
    "halfmq",
    max_examples=EXAMPLES,
    deadline=None,  # a busy machine stops any process for a second
    derandomize=False,  # other examples in every run, also where the variable CI is set
    print_blob=True,  # a failure says how to see the same example again
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("halfmq")  # before test modules derive their own settings from it


LIMITS = ("connect_timeout", "request_timeout", "send_timeout", "own_check_timeout")
"""Time limits of a client that do not pass in a test that does not set them."""


@pytest.fixture(autouse=True, scope="session")
def patient_clients() -> None:
    """A client is no witness of how fast the machine is; its usual three seconds are too few."""
    defaults = ClientConfig.__init__.__kwdefaults__
    assert defaults is not None
    defaults.update(dict.fromkeys(LIMITS, PATIENCE_S))


@pytest.fixture(autouse=True, scope="session")
def long_slices() -> Iterator[None]:
    """How much fits into a slice of background work, or into a turn, is the machine's business.

    Tests of slices give them no time at all: then each takes one step.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "SLICE_S", PATIENCE_S)
        patch.setattr(shared_state, "TURN_S", PATIENCE_S)
        yield


@pytest.fixture(autouse=True, scope="session")
def no_wait_for_the_disk() -> Iterator[None]:
    """No test cuts the power, so what a test's own process has written is there without a flush.

    Brokers in processes of their own flush in earnest.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(disk, name, os.fstat)  # which refuses a wrong descriptor too
        yield


def pytest_configure() -> None:
    """Choose the seed, and keep bytecode, before there are other processes, which then do so too.

    Where Python is told to write none, each of a hundred brokers would compile all their modules.
    It is kept outside of the tree then.
    """
    run_seed()
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
        prefix = os.environ.setdefault("PYTHONPYCACHEPREFIX", str(cache_directory() / "bytecode"))
        sys.dont_write_bytecode, sys.pycache_prefix = False, prefix


def pytest_collection_finish() -> None:
    """Leave out of all later garbage collections what stays to the end: thousands of tests.

    They would be looked at again and again, by each process.
    """
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str:
    """Say what has these very tests chosen again when it is set."""
    return f"{NAME}={run_seed()}"


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: half of the time, tests wait for processes and for the disk.

    No more than a few, since each may take a gigabyte, and the one with Spark two.
    """
    return min((os.cpu_count() or 1) + 1, WORKERS_MAX)


class FilesScheduling(LoadFileScheduling):  # type: ignore[misc]  # xdist tells no types
    """Gives each process whole files, whose tests share brokers, and one all tests of Spark."""

    def _split_scope(self, nodeid: str) -> str:
        return SPARK if nodeid.startswith(SPARK) else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    """Share out the tests of a parallel run."""
    return FilesScheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the slow tests, leave out campaigns above the dose, and put those with Spark first.

    One process runs them, for longest: begun last, it would run on when the others are done.
    """
    items.sort(key=lambda item: "spark" not in item.nodeid)
    for item in items:
        if item.nodeid.startswith(SLOW) and not item.nodeid.startswith(QUICK):
            item.add_marker("slow")
    dose = os.environ.get(DOSE)
    if dose is None:
        return
    by_file: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("campaign") is not None:
            by_file[item.nodeid.partition("::")[0]].append(item)
    left_out: set[pytest.Item] = set()
    for file, tests in by_file.items():
        choose = random.Random(f"{run_seed()} {file}")
        left_out.update(choose.sample(tests, max(len(tests) - int(dose), 0)))
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=[*left_out])


# --- what a run says it left out


left_out_counts = pytest.StashKey[Counter[str]]()


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count what was left out, by mark; each process of a parallel run collects all tests."""
    for item in items:
        counts = item.config.stash.setdefault(left_out_counts, Counter())
        for mark in ("campaign", "slow"):
            if item.get_closest_marker(mark) is not None:
                counts[mark] += 1
                break


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that prints the summary."""
    if hasattr(session.config, "workeroutput"):
        counts = session.config.stash.get(left_out_counts, Counter())
        session.config.workeroutput["left_out"] = dict(counts)


def pytest_testnodedown(node: WorkerController) -> None:
    """Keep what a process of a parallel run has counted."""
    output = getattr(node, "workeroutput", None) or {}  # None: it died
    node.config.stash[left_out_counts] = Counter(output.get("left_out"))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say what the default selection left out, and how to run it."""
    counts = config.stash.get(left_out_counts, Counter())
    if counts and "not slow" in config.option.markexpr:
        slow = f"{counts['slow']} slow tests (Spark, crashes, clients, browser, types, ...)"
        left_out = f"left out: {slow}, {counts['campaign']} campaigns"
        terminalreporter.write_line(f"{left_out}; {RUN_THEM}")
