"""Errors of SQL92 filters: a wrong expression, and values of a message that it cannot compare."""

from __future__ import annotations

from ..errors import BrokerError


class FilterSyntaxError(BrokerError):
    """An expression is wrong at ``position``, in characters from its start."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(position, reason)
        self.position, self.reason = position, reason

    def __str__(self) -> str:
        return f"SQL92 filter is wrong at character {self.position + 1}: {self.reason}"


class EvaluationError(BrokerError):
    """The values of a message cannot be compared as the expression requires."""
