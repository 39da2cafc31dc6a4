"""Checkers for tests that let a broker ask."""

from __future__ import annotations

import queue
from collections import Counter
from typing import Final

from halfmq.client import Decision, MessageView
from tests.support.patience import PATIENCE_S

_ANSWERS: Final = {"commit": Decision.COMMIT, "rollback": Decision.ROLLBACK}


class AnsweringByBody:
    """Keeps what it was asked about, by body, and answers by the body's last word."""

    def __init__(self) -> None:
        self._bodies: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.commits: Counter[str] = Counter()
        """How often COMMIT was answered: Apache RocketMQ asks until it reads its own op message,
        and delivers for each of these answers."""

    def __call__(self, message: MessageView) -> Decision:
        body = message.body.decode()
        for word, decision in _ANSWERS.items():
            if body.endswith(word):
                self.commits[body] += decision is Decision.COMMIT
                self._bodies.put(body)
                return decision
        self._bodies.put(body)
        return Decision.UNKNOWN

    def until(self, bodies: set[str]) -> set[str]:
        """Wait until it was asked about all of these; return what it was asked about."""
        asked: set[str] = set()
        while not bodies <= asked:
            asked.add(self._bodies.get(timeout=PATIENCE_S))
        return asked | self.asked()

    def asked(self) -> set[str]:
        """What it was asked about since it was last looked at."""
        asked: set[str] = set()
        while not self._bodies.empty():
            asked.add(self._bodies.get())
        return asked
