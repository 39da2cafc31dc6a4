"""Errors of SQL92 filters.

`FilterError`
├── `FilterSyntaxError`: the expression is invalid
└── `EvaluationError`: the values of one message cannot be compared; it does not match
"""

from __future__ import annotations

from ..errors import BrokerError


class FilterError(BrokerError):
    """Root of the errors of SQL92 filters."""


class FilterSyntaxError(FilterError):
    """An expression is wrong at ``position``, in characters from its start."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(position, reason)
        self.position, self.reason = position, reason

    def __str__(self) -> str:
        return f"SQL92 filter is wrong at character {self.position + 1}: {self.reason}"


class EvaluationError(FilterError):
    """The values of a message cannot be compared as the expression requires."""
