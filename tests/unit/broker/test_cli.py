"""The command, as far as it needs no running broker."""

from __future__ import annotations

import logging
import resource
import sys

import pytest

from halfmq.broker import cli
from halfmq.broker.config_file import load_config
from tests.support.python import python

SCRIPT = """
import logging
import resource
from halfmq.broker.cli import raise_descriptor_limit

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
raise_descriptor_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def test_the_descriptor_limit_is_raised_to_the_hard_limit() -> None:
    """Shells allow 1,024 descriptors, which a thousand clients would use up."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    may = cli.DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else hard
    done = python("-c", SCRIPT, check=True)

    assert int(done.stdout) == min(may, cli.DESCRIPTORS_WANTED)


TABLE = """
from halfmq.broker.cli import raise_descriptor_limit, reserve_descriptor_table

raise_descriptor_limit()
reserve_descriptor_table()
print(open("/proc/self/status").read())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how large the table is")
def test_the_descriptor_table_never_grows_under_load() -> None:
    """Growing it stops the thread that accepts a connection, which is the event loop."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    may = max(soft, cli.DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else hard)
    done = python("-c", TABLE, check=True)

    (slots,) = (line.split()[1] for line in done.stdout.splitlines() if line.startswith("FDSize"))
    assert int(slots) >= min(may, cli.DESCRIPTORS_WANTED)


@pytest.mark.parametrize(
    ("settings", "event"),
    [
        ([], None),
        (["bindAddress=::1"], None),
        (["bindAddress=0.0.0.0"], "open_to_everybody"),
        (["bindAddress=10.1.2.3"], "open_to_everybody"),
        (["bindAddress=0.0.0.0", "aclEnable=true"], None),
        (["bindAddress=0.0.0.0", "authenticationEnabled=true"], "open_to_every_user"),
        (
            ["bindAddress=0.0.0.0", "authenticationEnabled=true", "authorizationEnabled=true"],
            None,
        ),
    ],
)
def test_a_broker_that_is_open_to_other_machines_says_so(
    settings: list[str], event: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning at every start, unless requests are signed and policies are enforced."""
    config = load_config(None, settings).config

    with caplog.at_level(logging.WARNING):
        cli.warn_of_exposure(config)

    said = [record.message.split()[0] for record in caplog.records]
    assert said == ([] if event is None else [f"event={event}"])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("", None),
        ("brokerIP1=127.0.0.1", None),
        ("brokerIP1=10.1.2.3 bindAddress=0.0.0.0", None),
        ("brokerIP1=10.1.2.3 bindAddress=10.1.2.3", None),
        ("brokerIP1=fd00::5 bindAddress=::", None),
        ("namesrvAddr=10.1.2.3:9876 bindAddress=10.1.2.4", None),
        ("namesrvAddr=localhost:1;127.0.0.1:2", None),
        ("brokerIP1=10.1.2.3", "brokerIP1=10.1.2.3 bindAddress=127.0.0.1"),
        ("brokerIP1=10.1.2.3 bindAddress=10.1.2.4", "brokerIP1=10.1.2.3 bindAddress=10.1.2.4"),
        ("brokerIP1=fd00::5 bindAddress=0.0.0.0", "brokerIP1=fd00::5 bindAddress=0.0.0.0"),
        ("brokerIP1=0.0.0.0 bindAddress=0.0.0.0", "brokerIP1=0.0.0.0 bindAddress=0.0.0.0"),
        ("namesrvAddr=localhost:1;ns:2", "namesrvAddr=localhost:1;ns:2 bindAddress=127.0.0.1"),
    ],
)
def test_a_broker_that_sends_clients_where_it_does_not_listen_says_so(
    settings: str, says: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning at every start names both settings; something may forward from there."""
    with caplog.at_level(logging.WARNING):
        cli.warn_of_wrong_address(load_config(None, settings.split()).config.network)

    said = [record.message.partition(" note=")[0] for record in caplog.records]
    assert said == ([] if says is None else [f"event=unreachable_address {says}"])
