"""What benchmarks share that end in one table: signals, exit codes, and the machine beside it."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from .build import CompilerMissingError
from .generator import GeneratorError
from .machine import describe_machine
from .processes import ServerError, end_in_order
from .report import table
from .rocketmq_peer import PeerMissingError


def print_measured(
    head: Sequence[str], directory: Path, measure: Callable[[], Sequence[Sequence[str]]]
) -> int:
    """Print the rows that are measured; return the exit code.

    1: it failed, 2: it cannot be measured here. SIGTERM ends the servers as well.
    """
    signal.signal(signal.SIGTERM, end_in_order)
    try:
        rows = measure()
    except (CompilerMissingError, PeerMissingError) as error:
        print(error, file=sys.stderr)
        return 2
    except (GeneratorError, ServerError) as error:
        print(error, file=sys.stderr)
        return 1
    machine = describe_machine(directory)
    load = os.getloadavg()[0]
    print(f"{machine.processor}, {machine.cores} cores, {machine.python}, load {load:.2f}\n")
    print(table(head, rows))
    return 0
