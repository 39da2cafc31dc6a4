"""The grammar of SQL92 filters, and its parser.

Import this module on a helper thread: with the library and the grammar's tables it takes 50 ms of
processor time and 3 MB, which a broker without SQL92 filters does not spend.

RocketMQ evaluates the longest valid beginning of an expression and ignores the rest. This parser
refuses an expression such as ``a = 1 LIKE 'b'``.

Source: RocketMQ 5.3.3 ``SelectorParser.jj``.
"""

import re
from collections.abc import Callable, Iterator
from typing import Final

from lark import Lark, Token, Transformer, UnexpectedToken, v_args
from lark.lexer import Lexer

from ..errors import FilterSyntaxError
from . import expressions as build
from .compiled_filter import CompiledFilter
from .expressions import Node
from .values import LONG_MIN

TOKENS_MAX: Final = 2_048
"""Words and signs of an expression, four for each of the permitted operators: compiling it takes at
most 20 ms."""

TOKENS_PER_STEP: Final = 64
"""Tokens, of about 10 us each, between two calls of ``pause``."""

_GRAMMAR: Final = r"""
start: any_of

?any_of: all_of (_OR all_of)*
?all_of: equality (_AND equality)*

?equality: comparison
    | equality _EQUAL comparison -> equal
    | equality _UNEQUAL comparison -> not_equal
    | equality _IS NULL -> is_null
    | equality _IS NOT NULL -> is_not_null

?comparison: unary
    | comparison _GREATER unary -> greater
    | comparison _GREATER_EQUAL unary -> greater_or_equal
    | comparison _LESS unary -> less
    | comparison _LESS_EQUAL unary -> less_or_equal
    | comparison _BETWEEN unary _AND unary -> between
    | comparison NOT _BETWEEN unary _AND unary -> not_between
    | comparison _IN STRINGS -> is_in
    | comparison NOT _IN STRINGS -> is_not_in
    | comparison CONTAINS STRING -> test
    | comparison STARTSWITH STRING -> test
    | comparison ENDSWITH STRING -> test
    | comparison NOT CONTAINS STRING -> not_test
    | comparison NOT STARTSWITH STRING -> not_test
    | comparison NOT ENDSWITH STRING -> not_test

?unary: operand
    | _PLUS unary
    | MINUS unary -> negative
    | NOT unary -> inverse

?operand: STRING -> string
    | LEAST -> least
    | WHOLE -> whole
    | FLOATING -> floating
    | TRUE -> true
    | FALSE -> false
    | NULL -> null
    | NAME -> property_named
    | _LPAR any_of _RPAR

%declare NOT _AND _OR _BETWEEN _IN _IS TRUE FALSE NULL CONTAINS STARTSWITH ENDSWITH
%declare _EQUAL _UNEQUAL _GREATER _GREATER_EQUAL _LESS _LESS_EQUAL _LPAR _RPAR _PLUS MINUS
%declare FLOATING LEAST WHOLE STRING STRINGS NAME
"""

_WORDS: Final = {
    **{word: f"_{word}" for word in ("AND", "OR", "BETWEEN", "IN", "IS")},
    **{word: word for word in ("NOT", "TRUE", "FALSE", "NULL")},
    **{word: word for word in ("CONTAINS", "STARTSWITH", "ENDSWITH")},
    "=": "_EQUAL",
    "<>": "_UNEQUAL",
    ">": "_GREATER",
    ">=": "_GREATER_EQUAL",
    "<": "_LESS",
    "<=": "_LESS_EQUAL",
    "(": "_LPAR",
    ")": "_RPAR",
    "+": "_PLUS",
    "-": "MINUS",
}
"""Keyword in capitals, or sign → terminal of the grammar."""

_BLANK: Final = r"[ \t\n\r\f]+|/\*[^*]*\*+(?:[^/*][^*]*\*+)*/"
_GAP: Final = re.compile(f"(?:{_BLANK})*")
_GAP_BEFORE_LINE_END: Final = re.compile(f"(?:{_BLANK}|--[^\n\r]*[\n\r])*")
_STRING: Final = re.compile(r"'[^']*(?:''[^']*)*'")
_STRINGS: Final = re.compile(rf"(?:[ \t\n\r\f]*{_STRING.pattern}[ \t\n\r\f]*,)++")
_TOKEN: Final = re.compile(
    r"(?P<FLOATING>(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|[0-9]+e[+-]?[0-9]+)"
    r"|(?P<LEAST>-[ \t\n\r\f]*9223372036854775808(?![0-9.e])l?)"
    r"|(?P<WHOLE>0|[1-9][0-9]*l?)"
    r"|(?P<NAME>[a-z_$][a-z0-9_$]*)"
    rf"|(?P<STRING>{_STRING.pattern})"
    r"|(?P<SIGN><>|[<>]=|[=<>()+-])",
    re.ASCII | re.IGNORECASE,  # without ASCII, other characters count as letters, such as a long s
)

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

_COUNTED: Final = frozenset({"MINUS", "_PLUS", "NOT", "_LPAR"})
"""Operators and brackets of which any number may stand in a row; each counts as one operator."""

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

    def is_in(self, value: Node, strings: Token) -> Node:
        return build.contained_in(value, [_unquoted(one) for one in _STRING.findall(strings)])

    def is_not_in(self, value: Node, _not: Token, strings: Token) -> Node:
        wanted = [_unquoted(one) for one in _STRING.findall(strings)]
        return build.contained_in(value, wanted, negated=True)

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

    def least(self, token: Token) -> Node:
        return build.constant(_start(token), token, LONG_MIN)

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


class _NoLexer(Lexer):
    """For the parser: tokens are fed to it one by one (`_tokens`)."""

    def __init__(self, _conf: object) -> None:
        pass

    def lex(self, _state: object, _parser_state: object) -> Iterator[Token]:
        raise NotImplementedError


_PARSER: Final = Lark(_GRAMMAR, parser="lalr", lexer=_NoLexer, transformer=_Builder())


def parse(text: str, pause: Callable[[], object] = lambda: None) -> CompiledFilter:
    """Compile an expression.

    ``pause`` is called after each ``TOKENS_PER_STEP`` tokens, so that other threads can run.

    Raises:
        FilterSyntaxError: The expression is invalid; the error has the position.
    """
    parser = _PARSER.parse_interactive()
    names: set[str] = set()
    counted = 0
    try:
        for number, token in enumerate(_tokens(text), 1):
            if number > TOKENS_MAX:
                raise FilterSyntaxError(_start(token), f"more than {TOKENS_MAX} words and signs")
            if token.type == "NAME":
                names.add(str(token))
            elif token.type in _COUNTED:
                counted += 1
                build.check_operators(counted, _start(token))
            parser.feed_token(token)
            if number % TOKENS_PER_STEP == 0:
                pause()
        condition: Node = parser.feed_eof()  # type: ignore[no-untyped-call]
    except UnexpectedToken as error:
        position = _start(error.token) if error.token.type != "$END" else len(text)
        raise FilterSyntaxError(position, _hint(text, position)) from None
    return CompiledFilter(condition, names)


def _tokens(text: str) -> Iterator[Token]:
    """Split an expression into the terminals of the grammar.

    The list after IN is one of them, so that thousands of strings take a few milliseconds.

    Raises:
        FilterSyntaxError: No token can begin at a character, or a list is wrong.
    """
    line_end = max(text.rfind("\n"), text.rfind("\r"))
    position, kind = 0, ""
    while (position := _after_gap(text, position, line_end)) < len(text):
        if kind == "_IN":
            start = position
            strings, position = _strings(text, position, line_end)
            kind = "STRINGS"
            yield Token(kind, strings, start_pos=start)
            continue
        found = _TOKEN.match(text, position)
        if found is None:
            raise FilterSyntaxError(position, _hint(text, position))
        word = found[0]
        kind = str(found.lastgroup)
        if kind in {"NAME", "SIGN"}:
            kind = _WORDS.get(word.upper(), kind)
        yield Token(kind, word, start_pos=position)
        position = found.end()


def _after_gap(text: str, position: int, line_end: int) -> int:
    """Return the position after blanks and comments; ``line_end`` is the last end of a line.

    After it no comment of a line can end, and sixty thousand minus signs must not each search.
    """
    gap = (_GAP_BEFORE_LINE_END if position < line_end else _GAP).match(text, position)
    assert gap is not None
    return gap.end()


def _strings(text: str, position: int, line_end: int) -> tuple[str, int]:
    """Return the strings of a list, joined by commas, and the position after the list."""
    strings: list[str] = []
    sign = "("
    while text[position : position + 1] == sign:
        position += 1
        if many := _STRINGS.match(text, position):
            strings += _STRING.findall(many[0])
            position = many.end()
        position = _after_gap(text, position, line_end)
        found = _STRING.match(text, position)
        if found is None:
            break
        strings.append(found[0])
        position = _after_gap(text, found.end(), line_end)
        if text[position : position + 1] == ")":
            return ",".join(strings), position + 1
        sign = ","
    raise FilterSyntaxError(position, _hint(text, position))


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
