"""A compiled SQL92 filter."""

from collections.abc import Collection
from typing import Final

from halfmq.store.format.properties import decode_properties, get_property

from ..errors import EvaluationError
from .expressions import Node, Properties

NAMES_FEW: Final = 4
"""Different properties of an expression that are searched for one by one; for more, all properties
of the message are decoded."""


OPERATOR_SIZE: Final = 512
"""Estimated bytes of one operator."""

OPERATORS_SHARED: Final = 8
"""Operators up to which a filter does not count where it is used."""


class CompiledFilter:
    """Tests whether a message matches an expression."""

    __slots__ = ("_names", "evaluate", "operators", "own_size")

    def __init__(self, condition: Node, names: Collection[str]) -> None:
        """``names`` are the properties in the expression."""
        self.operators = condition.operators
        self.evaluate = condition.evaluate
        # Usual filters are few, and all pulls with one share it.
        self.own_size = 0 if self.operators <= OPERATORS_SHARED else OPERATOR_SIZE * self.operators
        """Bytes that a waiting pull keeps in memory, perhaps as the only one with this filter."""
        few = len(names) <= NAMES_FEW
        self._names = [(name, name.encode()) for name in names] if few else None

    def matches(self, properties: bytes) -> bool:
        """Return whether a message with this property string matches."""
        if self._names is None:
            return self.accepts(decode_properties(properties))
        found: dict[str, str] = {}
        for name, encoded in self._names:
            value = get_property(properties, encoded)
            if value is not None:
                found[name] = value.decode(errors="replace")
        return self.accepts(found)

    def accepts(self, properties: Properties) -> bool:
        """Return whether a message with these properties matches."""
        try:
            return self.evaluate(properties) is True
        except EvaluationError:
            return False
