"""Run attacks and print what they did: ``python -m tests.hostile [NAME...]``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from random import Random

from tests.support.seeds import printed_seed

from .attacks import ATTACKS
from .rig import HEAD, run


def main(names: list[str]) -> int:
    """Return the number of attacks that broke a promise."""
    if unknown := [name for name in names if name not in ATTACKS]:
        print(f"no such attack: {unknown}; there are {list(ATTACKS)}")
        return 2
    random = Random(printed_seed())
    failed = 0
    print(HEAD)
    for name in names or ATTACKS:
        with tempfile.TemporaryDirectory(prefix="halfmq-hostile-") as directory:
            result = run(name, ATTACKS[name], Path(directory), random)
        print(result, flush=True)
        failed += bool(result.complaints)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
