"""The nodes of an SQL92 filter: what may be combined, and how it is evaluated.

A node is compiled into a function of the message's properties, so that no tree is traversed for a
message. Logic has three values: a comparison with a property that a message lacks is None, SQL's
NULL. A message matches if the whole expression is true.

Clients expect some surprising results: ``NOT a = 1`` is ``(NOT a) = 1`` and never true; a property
alone is never true; two properties that are both missing are equal.

Source: RocketMQ 5.3.3, classes of ``org.apache.rocketmq.filter.expression``.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from ..errors import FilterSyntaxError
from .values import (
    LONG_MAX,
    Value,
    compare,
    compare_doubles,
    floating_number,
    maximum_like,
    whole_number,
)

Properties: TypeAlias = Mapping[str, str]
Evaluate: TypeAlias = Callable[[Properties], Value]

DEPTH_MAX: Final = 64
"""Nested operators; each is a call in Python when a message is evaluated. A sequence of AND or OR
counts as one."""

OPERATORS_MAX: Final = 512
"""Operators of an expression: evaluating them for one message takes less than a millisecond. IN
counts as one operator however long its list is, because the list is a set."""

CONTAINS_OPERATORS: Final = 64
"""Operators that CONTAINS counts as: it may search 32 KiB, which takes up to 270 us."""

CONTAINS_LENGTH_MAX: Final = 1_024
"""Characters that CONTAINS searches for; a longer search takes milliseconds to compile."""

TEXT_MAX: Final = 32
"""Characters of an operand shown in error messages."""


@dataclass(frozen=True, slots=True)
class Node:
    """A part of an expression."""

    position: int  # of its first character
    text: str  # as messages show it
    evaluate: Evaluate
    depth: int = 1
    operators: int = 0

    @property
    def is_boolean(self) -> bool:
        """Whether it is true, false or NULL, whatever the message."""
        return False


@dataclass(frozen=True, slots=True)
class Property(Node):
    """The value of a property."""

    name: str = ""


@dataclass(frozen=True, slots=True)
class Constant(Node):
    """A literal."""

    value: Value = None

    @property
    def is_boolean(self) -> bool:
        return self.value is None or isinstance(self.value, bool)


class Negation(Node):
    """An operand with a minus sign."""


class FilterCondition(Node):
    """A comparison, or several combined by AND, OR or NOT."""

    @property
    def is_boolean(self) -> bool:
        return True


def property_named(position: int, name: str) -> Property:
    """Return the value of a property, a string; None if the message lacks it."""
    return Property(position, name[:TEXT_MAX], lambda properties: properties.get(name), name=name)


def constant(position: int, text: str, value: Value) -> Constant:
    """Return a literal."""
    return Constant(position, text[:TEXT_MAX], lambda _: value, value=value)


def whole(position: int, text: str) -> Constant:
    """Return a literal without decimal point; a final L has no effect."""
    number = int(text.rstrip("lL")) if len(text) <= len(str(LONG_MAX)) + 1 else LONG_MAX + 1
    if number > LONG_MAX:
        raise FilterSyntaxError(position, f"{text[:TEXT_MAX]} is greater than {LONG_MAX}")
    return constant(position, text, number)


_NOT_ZERO: Final = re.compile(r"[0.]*[1-9]")


def floating(position: int, text: str) -> Constant:
    """Return a literal with decimal point or exponent."""
    number, shown = float(text), text[:TEXT_MAX]
    if number == float("inf"):
        raise FilterSyntaxError(position, f"{shown} is greater than 1.7976931348623157E308")
    if number == 0.0 and _NOT_ZERO.match(text):
        raise FilterSyntaxError(position, f"{shown} is less than 4.9E-324; write 0.0")
    return constant(position, text, number)


def negative(position: int, operand: Node) -> Node:
    """Return ``-operand``; its value is None unless the operand is a number."""
    evaluate = operand.evaluate

    def negated(properties: Properties) -> Value:
        value = evaluate(properties)
        return None if value is None or isinstance(value, bool | str) else -value

    return Negation(position, "-…", negated, *_size(operand))


def condition(node: Node) -> Node:
    """Return the node as a condition; a property alone is a condition that is never true.

    Raises:
        FilterSyntaxError: The node is a string or a number.
    """
    if node.is_boolean:
        return node
    if not isinstance(node, Property):
        raise FilterSyntaxError(node.position, f"{node.text} is neither true nor false")
    get = node.evaluate
    return FilterCondition(
        node.position, node.text, lambda properties: None if get(properties) is None else False
    )


def inverse(position: int, operand: Node) -> Node:
    """Return ``NOT operand``."""
    evaluate = condition(operand).evaluate

    def inverted(properties: Properties) -> Value:
        value = evaluate(properties)
        return None if value is None else not value

    return FilterCondition(position, "NOT …", inverted, *_size(operand))


def any_of(operands: Sequence[Node]) -> Node:
    """Return the operands joined by OR."""
    return _joined(operands, stop=True)


def all_of(operands: Sequence[Node]) -> Node:
    """Return the operands joined by AND."""
    return _joined(operands, stop=False)


def _joined(operands: Sequence[Node], *, stop: bool) -> Node:
    """Join operands: the value is ``stop`` if one is, else NULL if one is, else ``not stop``."""
    evaluates = [condition(operand).evaluate for operand in operands]

    def joined(properties: Properties) -> Value:
        result: bool | None = not stop
        for evaluate in evaluates:
            value = evaluate(properties)
            if value is stop:
                return stop
            if value is None:
                result = None
        return result

    word = "OR" if stop else "AND"
    return FilterCondition(operands[0].position, f"… {word} …", joined, *_size(*operands))


def equal(left: Node, right: Node) -> Node:
    """Return ``left = right``."""
    for operand in (left, right):
        if isinstance(operand, Constant) and operand.value is None:
            raise FilterSyntaxError(operand.position, "write IS NULL or IS NOT NULL")
    both_constant = isinstance(left, Constant) and isinstance(right, Constant)
    if both_constant and left.is_boolean and not right.is_boolean:
        raise FilterSyntaxError(left.position, f"{left.text} cannot equal {right.text}")
    return _equality(left, right)


def not_equal(left: Node, right: Node) -> Node:
    """Return ``left <> right``."""
    return inverse(left.position, equal(left, right))


def is_null(left: Node) -> Node:
    """Return ``left IS NULL``."""
    return _equality(left, constant(left.position, "NULL", None))


def is_not_null(left: Node) -> Node:
    """Return ``left IS NOT NULL``."""
    return inverse(left.position, is_null(left))


def _equality(left: Node, right: Node) -> Node:
    usual = _equality_with_constant(left, right)
    return FilterCondition(
        left.position, "… = …", usual or _equality_of_any(left, right), *_size(left, right)
    )


def _equality_of_any(left: Node, right: Node) -> Evaluate:
    left_value, right_value = left.evaluate, right.evaluate

    def equality(properties: Properties) -> Value:
        first, second = left_value(properties), right_value(properties)
        if first is None:
            return True if second is None else None
        if second is None:
            return False
        return compare(first, second) == 0

    return equality


def _equality_with_constant(left: Node, right: Node) -> Evaluate | None:
    """Return a faster test for the usual cases, in which types are known; None for other cases."""
    if not (isinstance(left, Property) and isinstance(right, Constant)):
        return None
    name, value = left.name, right.value

    def is_string(properties: Properties) -> Value:
        text = properties.get(name)
        return None if text is None else text == value

    def is_whole(properties: Properties) -> Value:
        text = properties.get(name)
        return None if text is None else whole_number(text, maximum) == value

    if isinstance(value, str):
        return is_string
    if type(value) is int:
        maximum = maximum_like(value)
        return is_whole
    return None


def greater(left: Node, right: Node) -> Node:
    """Return ``left > right``."""
    return _ordered(left, ">", right, lambda order: order > 0)


def greater_or_equal(left: Node, right: Node) -> Node:
    """Return ``left >= right``."""
    return _ordered(left, ">=", right, lambda order: order >= 0)


def less(left: Node, right: Node) -> Node:
    """Return ``left < right``."""
    return _ordered(left, "<", right, lambda order: order < 0)


def less_or_equal(left: Node, right: Node) -> Node:
    """Return ``left <= right``."""
    return _ordered(left, "<=", right, lambda order: order <= 0)


def _ordered(left: Node, sign: str, right: Node, holds: Callable[[int], bool]) -> Node:
    for operand in (left, right):
        if _number(operand) is None and isinstance(operand, Constant | FilterCondition):
            raise FilterSyntaxError(
                operand.position, f"{operand.text} cannot be compared by {sign}, only a number can"
            )
    ordered = _ordered_by_number(left, right, holds) or _ordered_by_any(left, right, holds)
    return FilterCondition(left.position, f"… {sign} …", ordered, *_size(left, right))


def _number(operand: Node) -> float | None:
    """Return the value of a number literal; None for any other node."""
    value = operand.value if isinstance(operand, Constant) else None
    return None if value is None or isinstance(value, bool | str) else value


def _ordered_by_any(left: Node, right: Node, holds: Callable[[int], bool]) -> Evaluate:
    left_value, right_value = left.evaluate, right.evaluate

    def ordered(properties: Properties) -> Value:
        first = left_value(properties)
        if first is None:
            return None
        second = right_value(properties)
        if second is None:
            return None
        if isinstance(first, str) and isinstance(second, str):
            return holds(compare_doubles(floating_number(first), floating_number(second)))
        return holds(compare(first, second))

    return ordered


def _ordered_by_number(left: Node, right: Node, holds: Callable[[int], bool]) -> Evaluate | None:
    """Return a faster comparison of a property and a whole number; None for other cases."""
    if not (isinstance(left, Property) and isinstance(right, Constant)):
        return None
    name, number = left.name, right.value
    if type(number) is not int:
        return None
    maximum = maximum_like(number)

    def ordered(properties: Properties) -> Value:
        text = properties.get(name)
        return None if text is None else holds(whole_number(text, maximum) - number)

    return ordered


def between(value: Node, low: Node, high: Node) -> Node:
    """Return ``value BETWEEN low AND high``."""
    inside = all_of((greater_or_equal(value, low), less_or_equal(value, high)))
    first, last = _number(low), _number(high)
    if first is not None and last is not None and compare(last, first) < 0:
        raise FilterSyntaxError(low.position, f"{low.text} is greater than {high.text}")
    return inside


def not_between(value: Node, low: Node, high: Node) -> Node:
    """Return ``value NOT BETWEEN low AND high``."""
    return any_of((less(value, low), greater(value, high)))


def contained_in(value: Node, strings: Sequence[str], *, negated: bool = False) -> Node:
    """Return ``value IN ('one', 'another')``, or NOT IN."""
    if not isinstance(value, Property):
        raise FilterSyntaxError(value.position, f"IN needs a property, not {value.text}")
    wanted, get = frozenset(strings), value.evaluate

    def contained(properties: Properties) -> Value:
        found = get(properties)
        return None if found is None else (found in wanted) is not negated

    return FilterCondition(value.position, "… IN …", contained, *_size(value))


contains: Final[Callable[[str, str], bool]] = str.__contains__


def _search_of(position: int, wanted: str) -> Callable[[str, str], bool]:
    """Return ``contains`` for one wanted string; it takes time linear in the searched length.

    A search of ``str`` in strings of less than 30,000 characters is not: with "xxx…yxxx…" of 99
    it takes ten times as long.
    """
    if len(wanted) > CONTAINS_LENGTH_MAX:
        raise FilterSyntaxError(
            position, f"CONTAINS searches for {CONTAINS_LENGTH_MAX} characters at most"
        )
    search = re.compile(re.escape(wanted)).search
    return lambda found, _: search(found) is not None


def string_test(
    value: Node, holds: Callable[[str, str], bool], wanted: str, *, negated: bool = False
) -> Node:
    """Return CONTAINS, STARTSWITH or ENDSWITH, or NOT with one of them.

    All of them are false, with or without NOT, if ``wanted`` is empty or the value is not a string.
    """
    evaluate = value.evaluate

    def test(properties: Properties) -> Value:
        found = evaluate(properties)
        return bool(wanted) and isinstance(found, str) and holds(found, wanted) is not negated

    depth, operators = _size(value)
    if holds is contains:
        operators += CONTAINS_OPERATORS - 1
        check_operators(operators, value.position)
        holds = _search_of(value.position, wanted)
    return FilterCondition(value.position, "… CONTAINS …", test, depth, operators)


def _size(*operands: Node) -> tuple[int, int]:
    """Return depth and number of operators of a node with these operands."""
    depth = 1 + max(operand.depth for operand in operands)
    if depth > DEPTH_MAX:
        position = operands[0].position
        raise FilterSyntaxError(position, f"more than {DEPTH_MAX} nested operators")
    operators = max(len(operands) - 1, 1) + sum(operand.operators for operand in operands)
    check_operators(operators, operands[0].position)
    return depth, operators


def check_operators(count: int, position: int) -> None:
    """Refuse an expression with too many operators.

    Raises:
        FilterSyntaxError: There are more than OPERATORS_MAX.
    """
    if count > OPERATORS_MAX:
        raise FilterSyntaxError(position, f"more than {OPERATORS_MAX} operators")
