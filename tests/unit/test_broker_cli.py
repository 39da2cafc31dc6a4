"""The command, as far as it needs no running broker."""

from __future__ import annotations

import resource
import subprocess
import sys

from halfmq.broker import cli

SCRIPT = """
import resource
from halfmq.broker.cli import raise_descriptor_limit

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
raise_descriptor_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def test_the_broker_takes_the_descriptors_it_may_have() -> None:
    """Shells give a process 1 024, which a thousand clients would use up."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    may = cli.DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else hard
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60
    )

    assert int(done.stdout) == min(may, cli.DESCRIPTORS_WANTED)
