"""SQL92 filters: what they mean, what is refused and where, and that all of it is bounded.

`tests/interop/test_sql_filters.py` compares hundreds of expressions with RocketMQ's own classes.
"""

from __future__ import annotations

import pytest

from halfmq.broker.errors import FilterSyntaxError
from halfmq.broker.filters.compiled_filter import NAMES_FEW
from halfmq.broker.filters.expressions import (
    CONTAINS_LENGTH_MAX,
    CONTAINS_OPERATORS,
    DEPTH_MAX,
    OPERATORS_MAX,
)
from halfmq.broker.filters.grammar import parse
from halfmq.broker.filters.values import NUMBER_LENGTH_MAX
from halfmq.store.format.properties import encode_properties

ORDER = {"amount": "120", "region": "EU", "status": "paid", "note": "it's late", "weight": "1.5"}


@pytest.mark.parametrize(
    "expression",
    [
        "amount > 100 AND region IN ('EU', 'US') AND status <> 'cancelled'",
        "amount BETWEEN 100 AND 120",
        "amount not between 1 and 5",
        "note CONTAINS '''s' AND note STARTSWITH 'it' AND note ENDSWITH 'late'",
        "discount IS NULL AND amount IS NOT NULL",
        "NOT (region = 'US')",
        "amount < 5 OR weight = 1.5",
        "-(-5) < amount",
        "/* a comment */ amount = 120 -- and another\n",
    ],
)
def test_an_order_matches(expression: str) -> None:
    """Comparisons, sets, ranges, parts of strings, missing properties and logic."""
    assert parse(expression).matches(encode_properties(ORDER))


@pytest.mark.parametrize(
    "expression",
    [
        "amount > 120",
        "discount > 5",  # NULL is not true
        "NOT (discount > 5)",  # and its opposite is not, either
        "discount <> 5",
        "discount NOT IN ('5')",
        "note NOT CONTAINS ''",
        "weight > 1",  # "1.5" is no Integer, so the message does not match
        "weight > 1 OR region = 'EU'",  # whatever the rest says
        "region",  # a property alone is never true
        "NOT region = 'US'",  # (NOT region) = 'US'
        "NULL",
    ],
)
def test_an_order_does_not_match(expression: str) -> None:
    """What RocketMQ does not deliver, even if that is surprising."""
    assert not parse(expression).matches(encode_properties(ORDER))


def test_expressions_of_few_and_many_properties_read_the_same_values() -> None:
    """Few properties are searched one by one, many are decoded together."""
    few = " AND ".join(f"p{number} = {number}" for number in range(NAMES_FEW))
    many = " AND ".join(f"p{number} = {number}" for number in range(NAMES_FEW + 1))
    properties = encode_properties({f"p{number}": str(number) for number in range(9)} | ORDER)

    for expression in (few, many):
        assert parse(expression).matches(properties)
        assert not parse(expression).matches(b"")
        assert not parse(expression).matches(b"p0\x01")


@pytest.mark.parametrize(
    ("expression", "value", "matches"),
    [
        ("n = 0.0", "0", True),
        ("n = 0e5", "0.0", True),
        ("n > 0.0", "0.25", True),
        ("n > .0", "-1", False),
        ("n BETWEEN -1.0 AND 0.0", "-0.5", True),
        ("n = -9223372036854775808", "-9223372036854775808", True),
        ("n > - 9223372036854775808L", "-9223372036854775808", False),
        ("n > -9223372036854775808", "-9223372036854775807", True),
        ("n = -9223372036854775808.0", "-9223372036854775808", True),
    ],
)
def test_zero_and_the_least_number_can_be_compared(
    expression: str, value: str, matches: bool
) -> None:
    """RocketMQ refuses to read both."""
    assert parse(expression).matches(encode_properties({"n": value})) == matches


@pytest.mark.parametrize(
    ("expression", "position", "reason"),
    [
        ("", 1, "something is missing at the end"),
        ("a = ", 5, "something is missing at the end"),
        ("a == 5", 4, "write = for equality"),
        ("a != 5", 3, "write <> for inequality"),
        ('a = "x"', 5, "strings stand in single quotes"),
        ("a LIKE 'x%'", 3, "LIKE is not supported; use CONTAINS, STARTSWITH or ENDSWITH"),
        ("a = 'x", 5, '"\'" cannot stand here'),
        ("a = 5 b = 6", 7, "'b' cannot stand here"),
        ("in = 5", 1, "'in' cannot stand here"),
        ("a > 'x'", 5, "'x' cannot be compared by >, only a number can"),
        ("5 IN ('5')", 1, "IN needs a property, not 5"),
        ("a = 1 OR 5", 10, "5 is neither true nor false"),
        ("a = NULL", 5, "write IS NULL or IS NOT NULL"),
        ("a BETWEEN 5 AND 1", 11, "5 is greater than 1"),
        ("a = 9223372036854775808", 5, "9223372036854775808 is greater than 9223372036854775807"),
        ("a IN ('x', 5)", 12, "'5' cannot stand here"),
        ("a IN ('x' 'y')", 11, '"\'" cannot stand here'),
        ("a IN ('x',", 11, "something is missing at the end"),
        ("a IN 'x'", 6, '"\'" cannot stand here'),
        ("a = -9223372036854775809", 6, "9223372036854775809 is greater than 9223372036854775807"),
        ("a = 1e-400", 5, "1e-400 is less than 4.9E-324; write 0.0"),
    ],
)
def test_an_error_names_the_character(expression: str, position: int, reason: str) -> None:
    """The message says where the expression is wrong and what to write."""
    with pytest.raises(FilterSyntaxError) as caught:
        parse(expression)

    assert str(caught.value) == f"SQL92 filter is wrong at character {position}: {reason}"


@pytest.mark.parametrize(
    "expression",
    [
        "NOT " * DEPTH_MAX + "(a = 1)",
        "(" * DEPTH_MAX + "NOT " * DEPTH_MAX + "(a = 1)" + ")" * DEPTH_MAX,
        "- " * DEPTH_MAX + "a = 1",
        "a = 1" + " IS NULL" * DEPTH_MAX,
        "a = b" + " = b" * DEPTH_MAX,
        "a = 1" + " OR a = 1" * OPERATORS_MAX,
        "TRUE" + " AND TRUE" * OPERATORS_MAX + " AND TRUE",
        "a = 1" + " OR a = 1" * 7_000,
        "a CONTAINS 'x'" + " OR a CONTAINS 'x'" * (OPERATORS_MAX // 8),
        "-" * 60_000 + "a",  # each could begin a comment
        "NOT " * 16_000 + "a",
        "(" * 32_700,
        "+" * 60_000 + "a = 1",
        " OR ".join(["((((a = 1))))"] * 200),
    ],
)
def test_pathological_expressions_are_refused(expression: str) -> None:
    """No message may take more than a millisecond, nor exhaust the stack."""
    with pytest.raises(FilterSyntaxError, match="more than"):
        parse(expression)


def test_the_largest_expressions_are_evaluated() -> None:
    """Expressions at the limits work; a long list costs no operators."""
    half = OPERATORS_MAX // 2
    assert parse("a = 0" + " OR a = 1" * (half - 1)).accepts({"a": "1"})
    assert parse("NOT " * (DEPTH_MAX - 3) + "(a = 1)").accepts({"a": "2"})
    assert parse("(" * OPERATORS_MAX + "a = 1" + ")" * OPERATORS_MAX).accepts({"a": "1"})
    long_list = ", ".join(f"'{number}'" for number in range(5_000))
    assert parse(f"a IN ({long_list})").accepts({"a": "4999"})
    assert parse("a in ( 'it''s',/* ' */ '(' -- '\n, ')' )").accepts({"a": ")"})


@pytest.mark.parametrize(
    "expression",
    [
        "(" * 60_000,
        "'" * 60_001,
        "a = '" + "x" * 60_000,
        "/*" + "*" * 60_000,
        "/*/" * 20_000,
        "1" * 60_000 + " = a",
        "a = " + "1" * 60_000 + "e5",
    ],
)
def test_the_error_of_a_long_expression_is_short(expression: str) -> None:
    """It travels in the header of an answer."""
    with pytest.raises(FilterSyntaxError) as caught:
        parse(expression)

    assert len(str(caught.value)) < 200


def test_a_long_string_is_no_number() -> None:
    """Hundreds of operators may parse it, and a property has up to 32 KiB."""
    longest = "0" * (NUMBER_LENGTH_MAX - 1) + "5"

    for expression in ("a = 5", "a > 4", "a = 5.0", "a > 4.5"):
        assert parse(expression).accepts({"a": longest})
        assert not parse(expression).accepts({"a": "0" + longest})


@pytest.mark.parametrize("wanted", ["x" * 40 + "y" + "x" * 58, "a.b", "[", "é\n", "''"])
def test_contains_finds_what_python_finds(wanted: str) -> None:
    """Whatever the characters; with the string that costs Python's own search most."""
    text = "x" * 29_000
    quoted = wanted.replace("'", "''")
    search = parse(f"a CONTAINS '{quoted}'")

    assert not search.accepts({"a": text})
    assert search.accepts({"a": f"{text}{wanted}{text}"})


def test_what_contains_may_cost_is_limited() -> None:
    """Each counts as many operators, and what it searches for has a length."""
    count = OPERATORS_MAX // (CONTAINS_OPERATORS + 1)
    assert parse(" OR ".join(["a CONTAINS 'x'"] * count)).accepts({"a": "x"})
    longest = "x" * CONTAINS_LENGTH_MAX
    assert parse(f"a CONTAINS '{longest}'").accepts({"a": longest})
    for expression in (
        " OR ".join(["a CONTAINS 'x'"] * (count + 2)),
        f"a CONTAINS '{longest}x'",
        "a CONTAINS '" + "x" * 60_000 + "'",
    ):
        with pytest.raises(FilterSyntaxError):
            parse(expression)


def test_the_parser_lets_other_threads_run() -> None:
    """Between the tokens of a long expression."""
    pauses = []

    parse("a = 1" + " OR a = 1" * 200, pause=lambda: pauses.append(1))

    assert len(pauses) > 10
