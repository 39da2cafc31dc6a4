"""The dose of campaigns: of each file so many tests, others in every run."""

from __future__ import annotations

import os
import random
from collections import defaultdict

import pytest

DOSE = "HALFMQ_CAMPAIGN_TESTS"
"""Most tests of one file that a run of campaigns takes; all when it is not set."""

SEED = "HALFMQ_CAMPAIGN_SEED"
"""Chooses which; printed, and set to have the same ones again."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out campaigns above the dose; what is no campaign is not touched."""
    dose = os.environ.get(DOSE)
    if dose is None:
        return
    seed = os.environ.get(SEED) or str(random.randrange(1 << 32))
    by_file: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("campaign") is not None:
            by_file[item.nodeid.partition("::")[0]].append(item)
    left_out: set[pytest.Item] = set()
    for file, tests in by_file.items():
        choose = random.Random(f"{seed} {file}")
        left_out.update(choose.sample(tests, max(len(tests) - int(dose), 0)))
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=[*left_out])
    print(f"\n{DOSE}={dose} {SEED}={seed}: {len(left_out)} campaign tests left out")
