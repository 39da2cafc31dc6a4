"""Times of checks in tests, and what tests of check-back have in common."""

from __future__ import annotations

from tests.support.transactions import Broker, Connected

DAY_MS = 86_400_000
TIMEOUT_MS = 6_000
INTERVAL_MS = 30_000
PAUSES_MS = (30_000, 45_000, 67_500)


def member(broker: Broker, name: str = "p") -> Connected:
    """Connect a halfmq client, which acknowledges checks."""
    return broker.producers.join("pg", Connected(name, acknowledges=True))


def counts(broker: Broker) -> tuple[int, int, int]:
    """Return the numbers of checks sent, delivered and not accepted."""
    checks = broker.checker
    return checks.sent, checks.delivered, checks.not_accepted
