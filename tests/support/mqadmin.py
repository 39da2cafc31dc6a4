"""The official operators' tool, mqadmin, in a JVM of its own beside a broker."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from halfmq.client.testing import BrokerProcess, broker_process
from tests.support.java_clients import JavaClient, Kind, Line, class_path, java_client


class Mqadmin:
    """One JVM with mqadmin; ``home`` has its ``conf/``."""

    def __init__(self, broker: BrokerProcess, client: JavaClient, home: Path) -> None:
        self.broker, self.client, self.home = broker, client, home
        self.at = ("-b", broker.address)
        self.cluster = ("-c", "DefaultCluster")

    def run(self, *arguments: str) -> list[str]:
        """Have a command run; return the lines that it prints."""
        printed, failure = self.outcome(arguments)
        assert not failure, failure
        return [" ".join(line.split()) for line in printed.splitlines() if line.strip()]

    def attempt(self, *arguments: str) -> list[str]:
        """Have a command run that may fail; return the lines that it prints."""
        return [" ".join(line.split()) for line in self.outcome(arguments)[0].splitlines() if line]

    def failure(self, *arguments: str) -> str:
        """Have a command run that does not succeed; return what it says."""
        printed, failure = self.outcome(arguments)
        assert "success" not in printed
        return " ".join(failure.split())

    def start(self, scenario: str, *arguments: object) -> str:
        """Have a Java client run a scenario beside the tool; return the number of the run."""
        return self.client.start(scenario, *arguments)

    def said(self, run: str, event: str) -> Line:
        """Wait until that run says this; return the line."""
        return self.client.said(run, event)

    def finish(self, run: str) -> list[Line]:
        """Wait for the end of that run; return what it said since."""
        return self.client.lines(run)

    def outcome(self, arguments: tuple[str, ...]) -> tuple[str, str]:
        (line,) = self.client.run("mqadmin", *arguments, "-n", self.broker.address)
        return line["text"], line["failure"]


def mqadmin(stack: ExitStack, version: str, home: Path, **settings: object) -> Mqadmin:
    """Start a broker with these settings, and mqadmin of a version beside it."""
    class_path(version)
    (home / "conf").mkdir(exist_ok=True)
    (home / "conf" / "logback_tools.xml").write_text("<configuration/>")
    conf = home / "broker.conf"
    conf.touch()
    broker = stack.enter_context(broker_process(home / "broker", conf=conf, **settings))
    kind = Kind(version, (f"-Drocketmq.home.dir={home}",))
    client = stack.enter_context(java_client(kind, broker.address, home / "client"))
    return Mqadmin(broker, client, home)
