"""The grammar of SQL92 filters, and its parser.

Import this module on a helper thread: with the library and the grammar's tables it takes 50 ms of
processor time and 3 MB, which a broker without SQL92 filters does not spend.

RocketMQ evaluates the longest valid beginning of an expression and ignores the rest. This parser
refuses an expression such as ``a = 1 LIKE 'b'``.

Source: RocketMQ 5.3.3 ``SelectorParser.jj``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from lark import Lark, Token, Transformer, UnexpectedCharacters, UnexpectedToken, v_args

from . import expressions as build
from .compiled_filter import CompiledFilter
from .errors import FilterSyntaxError
from .expressions import Node

TOKENS_PER_STEP: Final = 64
"""Tokens, of about 10 us each, between two calls of ``pause``."""

_GRAMMAR: Final = r"""
start: any_of

?any_of: all_of (_OR all_of)*
?all_of: equality (_AND equality)*

?equality: comparison
    | equality "=" comparison -> equal
    | equality "<>" comparison -> not_equal
    | equality _IS NULL -> is_null
    | equality _IS NOT NULL -> is_not_null

?comparison: unary
    | comparison ">" unary -> greater
    | comparison ">=" unary -> greater_or_equal
    | comparison "<" unary -> less
    | comparison "<=" unary -> less_or_equal
    | comparison _BETWEEN unary _AND unary -> between
    | comparison NOT _BETWEEN unary _AND unary -> not_between
    | comparison _IN strings -> is_in
    | comparison NOT _IN strings -> is_not_in
    | comparison CONTAINS STRING -> test
    | comparison STARTSWITH STRING -> test
    | comparison ENDSWITH STRING -> test
    | comparison NOT CONTAINS STRING -> not_test
    | comparison NOT STARTSWITH STRING -> not_test
    | comparison NOT ENDSWITH STRING -> not_test

strings: "(" STRING ("," STRING)* ")"

?unary: operand
    | "+" unary
    | MINUS unary -> negative
    | NOT unary -> inverse

?operand: STRING -> string
    | WHOLE -> whole
    | FLOATING -> floating
    | TRUE -> true
    | FALSE -> false
    | NULL -> null
    | NAME -> property_named
    | "(" any_of ")"

NOT: "NOT"i
_AND: "AND"i
_OR: "OR"i
_BETWEEN: "BETWEEN"i
_IN: "IN"i
_IS: "IS"i
TRUE: "TRUE"i
FALSE: "FALSE"i
NULL: "NULL"i
CONTAINS: "CONTAINS"i
STARTSWITH: "STARTSWITH"i
ENDSWITH: "ENDSWITH"i
MINUS: "-"

FLOATING.2: /([0-9]+\.[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|[0-9]+e[+-]?[0-9]+/i
WHOLE.1: /0|[1-9][0-9]*l?/i
STRING: /'(''|[^'])*'/
NAME: /[a-z_$][a-z0-9_$]*/i

LINE_COMMENT: /--[^\n\r]*(\r\n|\n|\r)/
BLOCK_COMMENT: /\/\*[^*]*\*+([^\/*][^*]*\*+)*\//
BLANK: /[ \t\n\r\f]+/
%ignore LINE_COMMENT
%ignore BLOCK_COMMENT
%ignore BLANK
"""

_TESTS: Final[dict[str, Callable[[str, str], bool]]] = {
    "CONTAINS": build.contains,
    "STARTSWITH": str.startswith,
    "ENDSWITH": str.endswith,
}

_HINTS: Final = {
    "LIKE": "LIKE is not supported; use CONTAINS, STARTSWITH or ENDSWITH",
    "==": "write = for equality",
    "!=": "write <> for inequality",
    '"': "strings stand in single quotes",
}
"""Common mistakes → what to write instead."""

_SIGNS: Final = frozenset({"MINUS", "NOT"})

_NEXT_WORD: Final = re.compile(r"[\w$]+|[=!<>]+|\S")


@v_args(inline=True)
class _Builder(Transformer[Token, Node]):
    """Creates the node of each rule that the parser completes."""

    def any_of(self, *operands: Node) -> Node:
        return build.any_of(operands)

    def all_of(self, *operands: Node) -> Node:
        return build.all_of(operands)

    def start(self, node: Node) -> Node:
        return build.condition(node)

    def is_null(self, left: Node, _null: Token) -> Node:
        return build.is_null(left)

    def is_not_null(self, left: Node, _not: Token, _null: Token) -> Node:
        return build.is_not_null(left)

    def not_between(self, value: Node, _not: Token, low: Node, high: Node) -> Node:
        return build.not_between(value, low, high)

    def strings(self, *tokens: Token) -> list[str]:
        return [_unquoted(token) for token in tokens]

    def is_in(self, value: Node, strings: list[str]) -> Node:
        return build.contained_in(value, strings)

    def is_not_in(self, value: Node, _not: Token, strings: list[str]) -> Node:
        return build.contained_in(value, strings, negated=True)

    def test(self, value: Node, kind: Token, wanted: Token) -> Node:
        return build.string_test(value, _TESTS[kind.type], _unquoted(wanted))

    def not_test(self, value: Node, _not: Token, kind: Token, wanted: Token) -> Node:
        return build.string_test(value, _TESTS[kind.type], _unquoted(wanted), negated=True)

    def negative(self, minus: Token, operand: Node) -> Node:
        return build.negative(_start(minus), operand)

    def inverse(self, word: Token, operand: Node) -> Node:
        return build.inverse(_start(word), operand)

    def string(self, token: Token) -> Node:
        return build.constant(_start(token), token, _unquoted(token))

    def whole(self, token: Token) -> Node:
        return build.whole(_start(token), token)

    def floating(self, token: Token) -> Node:
        return build.floating(_start(token), token)

    def true(self, token: Token) -> Node:
        return build.constant(_start(token), token, True)

    def false(self, token: Token) -> Node:
        return build.constant(_start(token), token, False)

    def null(self, token: Token) -> Node:
        return build.constant(_start(token), token, None)

    def property_named(self, token: Token) -> Node:
        return build.property_named(_start(token), str(token))

    equal = staticmethod(build.equal)
    not_equal = staticmethod(build.not_equal)
    greater = staticmethod(build.greater)
    greater_or_equal = staticmethod(build.greater_or_equal)
    less = staticmethod(build.less)
    less_or_equal = staticmethod(build.less_or_equal)
    between = staticmethod(build.between)


_PARSER: Final = Lark(
    _GRAMMAR,
    parser="lalr",
    lexer="basic",  # keywords are reserved, even where the grammar allows only a name
    transformer=_Builder(),
    g_regex_flags=re.ASCII,  # else ignoring case would accept other characters, such as a long s
)


def parse(text: str, pause: Callable[[], object] = lambda: None) -> CompiledFilter:
    """Compile an expression.

    ``pause`` is called after each ``TOKENS_PER_STEP`` tokens, so that other threads can run.

    Raises:
        FilterSyntaxError: The expression is invalid; the error has the position.
    """
    parser = _PARSER.parse_interactive(text)
    names: set[str] = set()
    signs = 0
    try:
        for number, token in enumerate(parser.iter_parse(), 1):
            if token.type == "NAME":
                names.add(str(token))
            elif token.type in _SIGNS:
                # Count them while parsing: at each minus the lexer searches for the end of a
                # comment, so sixty thousand of them would take half a minute.
                signs += 1
                build.check_operators(signs, _start(token))
            if number % TOKENS_PER_STEP == 0:
                pause()
        condition: Node = parser.feed_eof()  # type: ignore[no-untyped-call]
    except UnexpectedCharacters as error:
        position: int = error.pos_in_stream  # type: ignore[assignment]  # it says None
        raise FilterSyntaxError(position, _hint(text, position)) from None
    except UnexpectedToken as error:
        position = _start(error.token) if error.token.type != "$END" else len(text)
        raise FilterSyntaxError(position, _hint(text, position)) from None
    return CompiledFilter(condition, names)


def _hint(text: str, position: int) -> str:
    found = _NEXT_WORD.search(text, position)
    if found is None:
        return "something is missing at the end"
    word = found[0]
    hint = _HINTS.get(word.upper()) or _HINTS.get(text[max(position - 1, 0) : position + 1])
    return hint or f"{word[:32]!r} cannot stand here"


def _start(token: Token) -> int:
    assert token.start_pos is not None
    return token.start_pos


def _unquoted(token: Token) -> str:
    return token[1:-1].replace("''", "'")
