"""A broker and a JVM in which scenarios of one Java client run side by side."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.processes import free_ports
from halfmq.client.testing import BrokerProcess, broker_process
from tests.support.java_clients import JavaClient, Kind, Line, java_client


class Java:
    """One kind of client with a broker of its own."""

    def __init__(
        self,
        kind: Kind,
        broker: BrokerProcess,
        client: JavaClient,
        home: Path,
        scenarios: Sequence[str],
    ) -> None:
        """Start the scenarios, each a name with its arguments, separated by blanks."""
        self.kind, self.broker, self.client, self.home = kind, broker, client, home
        self._runs = {one.split()[0]: client.start(*one.split()) for one in scenarios}

    def seen(self, scenario: str) -> list[Line]:
        """Return what a scenario said; it was started with all the others."""
        return self.client.lines(self._runs[scenario])


@contextlib.contextmanager
def java_scenarios(
    kind: Kind, home: Path, scenarios: Sequence[str], **settings: object
) -> Iterator[Java]:
    """Run a broker with these settings and a JVM, where all scenarios have been started."""
    port = free_ports(3) + 2  # old clients send to the port two below
    with (
        broker_process(home / "broker", listenPort=port, **settings) as broker,
        java_client(kind, broker.address, home / "client") as client,
    ):
        yield Java(kind, broker, client, home, scenarios)


def of(lines: list[Line], event: str) -> list[Line]:
    """Return the lines of one event."""
    return [line for line in lines if line["event"] == event]


def bodies(lines: list[Line]) -> list[str]:
    """Return the bodies of lines about messages."""
    return [line["body"] for line in lines]


def by_body(lines: list[Line]) -> dict[str, Line]:
    """Return the last line of each body."""
    return {line["body"]: line for line in lines}
