"""One seed for a whole run of tests, which all of its processes share."""

import os
import random
from typing import Final

NAME: Final = "HALFMQ_RUN_SEED"


def run_seed() -> int:
    """Return the seed, which the first to ask has chosen; its child processes inherit it.

    What a parallel run collects must be the same in each process: names with a seed in them, and
    which campaigns the dose leaves out.
    """
    return int(os.environ.setdefault(NAME, str(random.SystemRandom().randrange(1 << 32))))
