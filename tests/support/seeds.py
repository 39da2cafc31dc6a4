"""The seed of a whole run of tests, which all of its processes share, and the dose of examples."""

import os
import random
from typing import Final

NAME: Final = "HALFMQ_RUN_SEED"

EXAMPLES: Final = int(os.environ.get("HALFMQ_EXAMPLES", "40"))
"""Examples of a property, or runs of a state machine; `.ci/run` takes more."""


def run_seed() -> int:
    """Return the seed, which the first to ask has chosen; its child processes inherit it.

    What a parallel run collects must be the same in each process: names with a seed in them, and
    which campaigns the dose leaves out.
    """
    return int(os.environ.setdefault(NAME, str(random.SystemRandom().randrange(1 << 32))))
