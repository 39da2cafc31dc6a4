"""SQL92 filters, compared with a model that walks the tree; and arbitrary texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import hypothesis.strategies as st
from hypothesis import given

from halfmq.broker.errors import FilterSyntaxError
from halfmq.broker.filters.grammar import parse

Tree = tuple[object, ...]

NAMES = st.sampled_from(["a", "b", "c"])
NUMBERS = st.integers(-1_000, 1_000)
TEXTS = st.text("ab'1 é", max_size=4)
PROPERTIES = st.dictionaries(
    NAMES, st.integers(-1_000, 1_000).map(str) | st.text("ab'1é", min_size=1, max_size=4)
)

COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "<": lambda left, right: left < right,
    "<=": lambda left, right: left <= right,
    ">": lambda left, right: left > right,
    ">=": lambda left, right: left >= right,
    "=": lambda left, right: left == right,
    "<>": lambda left, right: left != right,
}
LEAVES: st.SearchStrategy[Tree] = st.one_of(
    st.tuples(st.just("compare"), NAMES, st.sampled_from([*COMPARISONS]), NUMBERS),
    st.tuples(st.just("equal"), NAMES, TEXTS),
    st.tuples(st.just("null"), NAMES, st.booleans()),
    st.tuples(st.just("in"), NAMES, st.lists(TEXTS, min_size=1, max_size=7), st.booleans()),
    st.tuples(st.sampled_from(["CONTAINS", "STARTSWITH", "ENDSWITH"]), NAMES, TEXTS, st.booleans()),
)
TREES: st.SearchStrategy[Tree] = st.recursive(
    LEAVES,
    lambda inner: (
        st.tuples(st.just("NOT"), inner)
        | st.tuples(st.sampled_from(["AND", "OR"]), st.lists(inner, min_size=2, max_size=4))
    ),
    max_leaves=12,
)


class NoMatchError(Exception):
    """A string was compared with a number."""


def written(tree: Tree) -> str:
    """Return the tree as an expression."""
    match tree:
        case ("compare", name, sign, number):
            return f"{name} {sign} {number}"
        case ("equal", name, str(text)):
            return f"{name} = {quoted(text)}"
        case ("null", name, negated):
            return f"{name} IS {'NOT ' if negated else ''}NULL"
        case ("in", name, list(texts), negated):
            return f"{name} {'NOT ' if negated else ''}IN ({','.join(map(quoted, texts))})"
        case ("NOT", tuple(inner)):
            return f"NOT ({written(inner)})"
        case ("AND" | "OR" as word, list(parts)):
            return f" {word} ".join(f"({written(part)})" for part in parts)
        case (test, name, str(text), negated):
            return f"{name} {'not ' if negated else ''}{test} {quoted(text)}"
    raise AssertionError(tree)


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def value_of(tree: Tree, properties: Mapping[str, str]) -> bool | None:
    """Evaluate the tree node by node, with SQL's three values."""
    match tree:
        case ("NOT", tuple(inner)):
            value = value_of(inner, properties)
            return None if value is None else not value
        case ("AND" | "OR" as word, list(parts)):
            result: bool | None = word == "AND"
            for part in parts:
                value = value_of(part, properties)
                if value is (word == "OR"):
                    return value
                result = None if value is None else result
            return result
    found = properties.get(str(tree[1]))
    match tree:
        case ("null", _, bool(negated)):
            return (found is not None) is negated
        case ("CONTAINS" | "STARTSWITH" | "ENDSWITH" as test, _, str(text), bool(negated)):
            holds = {"CONTAINS": str.__contains__, "STARTSWITH": str.startswith}
            if not text or found is None:
                return False
            return holds.get(test, str.endswith)(found, text) is not negated
    if found is None:
        return None
    match tree:
        case ("compare", _, str(sign), int(number)):
            try:
                return COMPARISONS[sign](int(found), number)
            except ValueError:
                raise NoMatchError from None
        case ("equal", _, str(text)):
            return found == text
        case ("in", _, list(texts), bool(negated)):
            return (found in texts) is not negated
    raise AssertionError(tree)


def model(tree: Tree, properties: Mapping[str, str]) -> bool:
    try:
        return value_of(tree, properties) is True
    except NoMatchError:
        return False


@given(tree=TREES, properties=PROPERTIES)
def test_a_filter_says_what_its_tree_says(tree: Tree, properties: dict[str, str]) -> None:
    """The printed tree, parsed and compiled, gives the value of the tree."""
    assert parse(written(tree)).accepts(properties) is model(tree, properties)


WORDS = st.sampled_from(
    [
        *("a", "b", "'x'", "''", "'", "5", "5.5", ".5", "1e9", "9999999999999999999", "0x5"),
        *("(", ")", ",", "=", "<>", "<", "<=", ">", ">=", "-", "+", "--", "/*", "*/", "$", "#"),
        *("NOT", "AND", "OR", "BETWEEN", "IN", "IS", "NULL", "TRUE", "FALSE"),
        *("CONTAINS", "STARTSWITH", "ENDSWITH", "é", "\ud800", "\x00"),
    ]
)


@given(
    expression=st.lists(WORDS, max_size=30).map(" ".join) | st.text(max_size=60),
    properties=st.dictionaries(NAMES, st.text(max_size=9)),
)
def test_garbage_is_refused_or_evaluated(expression: str, properties: dict[str, str]) -> None:
    """A text is a filter, or an error that gives the position in the expression."""
    position = 0
    try:
        compiled = parse(expression)
    except FilterSyntaxError as error:
        position = error.position
    else:
        assert compiled.accepts(properties) in (True, False)
    assert 0 <= position <= len(expression)
