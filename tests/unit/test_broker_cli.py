"""The command, as far as it needs no running broker."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from halfmq.broker import cli
from tests.support.patience import PATIENCE_S

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
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )

    assert int(done.stdout) == min(may, cli.DESCRIPTORS_WANTED)


TABLE = """
from halfmq.broker.cli import raise_descriptor_limit, take_descriptor_table

raise_descriptor_limit()
take_descriptor_table()
print(open("/proc/self/status").read())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how large the table is")
def test_the_descriptor_table_never_grows_under_load() -> None:
    """To make it larger stops the thread that accepts a connection, which is the loop's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    may = max(soft, cli.DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else hard)
    done = subprocess.run(
        [sys.executable, "-c", TABLE],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )

    (slots,) = (line.split()[1] for line in done.stdout.splitlines() if line.startswith("FDSize"))
    assert int(slots) >= min(may, cli.DESCRIPTORS_WANTED)
