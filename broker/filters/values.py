"""Values in SQL92 filters and their comparison, as Java does it.

A property is a string. A number in an expression is an Integer, a Long (outside the range of an
Integer) or a Double. Its type decides how a string compared with it is parsed: ``price > 1`` parses
an Integer, which "1.5" is not, and ``price > 1.0`` a Double. If a string cannot be parsed, the
whole expression fails, and the message does not match.

Source: RocketMQ ``ComparisonExpression.__compare``; Java ``Integer.valueOf``, ``Double.valueOf``,
``Double.compare``.
"""

import re
from math import copysign, isnan
from typing import Final, TypeAlias

from ..errors import EvaluationError

Known: TypeAlias = bool | int | float | str
Value: TypeAlias = Known | None
"""None is SQL's NULL."""

INTEGER_MAX: Final = (1 << 31) - 1
LONG_MAX: Final = (1 << 63) - 1
LONG_MIN: Final = -LONG_MAX - 1

SHORT: Final = 10
"""Whole numbers of fewer digits are in the range of an Integer."""

NUMBER_LENGTH_MAX: Final = 64
"""Characters of a string that is parsed as a number. A property may have 32 KiB, and each of
hundreds of operators parses it. Java parses longer strings, but only zeros or useless decimals make
a number so long."""

# Java's charAt returns surrogates for characters beyond 0xFFFF, and they are not digits.
_WHOLE: Final = re.compile(r"[+-]?(?:(?![\U00010000-\U0010FFFF])\d)+")
_SIGNED: Final = r"[\x00-\x20]*([+-]?)"
_DECIMAL: Final = re.compile(
    _SIGNED + r"((?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)[fFdD]?[\x00-\x20]*"
)
_HEXADECIMAL: Final = re.compile(
    _SIGNED
    + r"(0[xX](?:[0-9a-fA-F]+\.?|[0-9a-fA-F]*\.[0-9a-fA-F]+)[pP][+-]?[0-9]+)[fFdD]?[\x00-\x20]*"
)
_NAMED: Final = re.compile(_SIGNED + r"(NaN|Infinity)[\x00-\x20]*")
_NAMES: Final = {"NaN": float("nan"), "Infinity": float("inf")}


def whole_number(text: str, maximum: int) -> int:
    """Return the number that Java's ``Integer.valueOf`` or ``Long.valueOf`` returns.

    Raises:
        EvaluationError: The text is not such a number, or out of range.
    """
    if len(text) < SHORT and text.isdigit() and text.isascii():
        return int(text)
    if len(text) <= NUMBER_LENGTH_MAX and _WHOLE.fullmatch(text) is not None:
        number = int(text)
        if -maximum - 1 <= number <= maximum:
            return number
    raise EvaluationError(f"{text!r} is not a whole number of this size")


def floating_number(text: str) -> float:
    """Return the number that Java's ``Double.valueOf`` returns.

    Raises:
        EvaluationError: The text is not a number.
    """
    if len(text) > NUMBER_LENGTH_MAX:
        raise EvaluationError(f"a string of {len(text)} characters is not read as a number")
    if (found := _DECIMAL.fullmatch(text)) is not None:
        number = float(found[2])
    elif (found := _NAMED.fullmatch(text)) is not None:
        number = _NAMES[found[2]]
    elif (found := _HEXADECIMAL.fullmatch(text)) is not None:
        try:
            number = float.fromhex(found[2])
        except OverflowError:
            number = _NAMES["Infinity"]
    else:
        raise EvaluationError(f"{text!r} is not a number")
    return -number if found[1] == "-" else number


def compare(left: Known, right: Known) -> int:
    """Return a negative number, 0 or a positive number, as Java's ``compareTo``.

    Values that cannot be compared are "less", as in RocketMQ.

    Raises:
        EvaluationError: A string is not the number, or the boolean, that it is compared with.
    """
    if isinstance(left, str):
        if isinstance(right, str):
            return (left > right) - (left < right)
        if isinstance(right, bool):
            return (len(left) == len("true") and left.lower() == "true") - right
        return _compare_numbers(_number_like(right, left), right)
    if isinstance(left, bool):
        if isinstance(right, str):  # RocketMQ casts the wrong side
            raise EvaluationError("a boolean on the left cannot be compared with a string")
        return left - right if isinstance(right, bool) else -1
    if isinstance(right, bool):
        return -1
    if isinstance(right, str):
        return _compare_numbers(left, _number_like(left, right))
    return _compare_numbers(left, right)


def _number_like(number: float, text: str) -> float:
    """Parse a number of the same Java type as ``number``."""
    if isinstance(number, int):  # for a type checker, int is a float
        return whole_number(text, maximum_like(number))
    return floating_number(text)


def maximum_like(number: int) -> int:
    """Return the greatest number of the Java type that a whole number has in an expression."""
    return INTEGER_MAX if abs(number) <= INTEGER_MAX else LONG_MAX


def _compare_numbers(left: float, right: float) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return (left > right) - (left < right)
    return compare_doubles(float(left), float(right))


def compare_doubles(left: float, right: float) -> int:
    """Compare in Java's order: -0.0 is less than 0.0, and NaN is equal to itself and greatest."""
    if left < right:
        return -1
    if left > right:
        return 1
    first, second = _rank(left), _rank(right)
    return (first > second) - (first < second)


def _rank(number: float) -> float:
    """Order doubles of which neither is less than the other."""
    if isnan(number):
        return 2.0
    return copysign(1.0, number) if number == 0.0 else 0.0
