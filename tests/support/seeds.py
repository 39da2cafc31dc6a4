"""Seeds of tests, and how many examples and seconds random tests get."""

import os
import random
from typing import Final

NAME: Final = "HALFMQ_RUN_SEED"

EXAMPLES: Final = int(os.environ.get("HALFMQ_EXAMPLES", "40"))
"""Examples of a property, or runs of a state machine; `.ci/run` takes more."""


def run_seed() -> int:
    """Return the seed of this run of tests, which all of its processes share.

    Each process of a parallel run must collect the same tests, whose names may have the seed.
    """
    return int(os.environ.setdefault(NAME, str(random.SystemRandom().randrange(1 << 32))))


def printed_seed() -> int:
    """Return `HALFMQ_SEED`, or a random seed; print it, so that a failure can be repeated."""
    seed = int(os.environ.get("HALFMQ_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"HALFMQ_SEED={seed}")
    return seed


def campaign_seconds() -> float:
    """Return how long a campaign runs: `HALFMQ_CAMPAIGN_SECONDS`, 60 by default."""
    return float(os.environ.get("HALFMQ_CAMPAIGN_SECONDS", "60"))
