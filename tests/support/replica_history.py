"""What happened to messages before and after a takeover, and whether any promise was broken."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class History:
    """Bodies by what is known of them; a body is sent once."""

    acknowledged: set[str] = field(default_factory=set)
    """Messages and commits that the master has confirmed."""
    rolled_back: set[str] = field(default_factory=set)
    """Transactions whose rollback the master has confirmed."""
    committed: set[str] = field(default_factory=set)
    """Transactions whose commit it has confirmed; they are acknowledged, too."""
    undecided: set[str] = field(default_factory=set)
    """Transactions without a decision whose half was acknowledged."""
    seen: set[str] = field(default_factory=set)
    """What consumers of the master have got."""
    delivered: Counter[str] = field(default_factory=Counter)
    """What consumers of the successor have got, who begin with the first message."""
    sent_after: set[str] = field(default_factory=set)
    """What the successor has acknowledged."""
    asked: Counter[str] = field(default_factory=Counter)
    """What the successor has asked producers about."""

    def faults(self) -> dict[str, set[str]]:
        """Return the bodies for which a promise was broken, by promise; empty if none was."""
        delivered = self.delivered.keys()
        found = {
            "lost": (self.acknowledged | self.sent_after) - delivered,
            "taken back": self.seen - delivered,
            "delivered though rolled back": self.rolled_back & delivered,
            "delivered twice": {body for body, count in self.delivered.items() if count > 1},
            "asked after a decision": (self.rolled_back | self.committed) & self.asked.keys(),
            "not asked": self.undecided - self.asked.keys(),
        }
        return {promise: bodies for promise, bodies in found.items() if bodies}
