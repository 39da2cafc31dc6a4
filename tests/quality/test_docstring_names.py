"""A name in backquotes in a docstring leads to code or a file that exists."""

from __future__ import annotations

import ast
import builtins
import functools
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PRODUCT: Final = ("broker", "client", "command", "remoting", "spark_jobs", "store")
FOREIGN: Final = {
    "Accept": "HTTP",
    "AsyncConnection": "SQLAlchemy",
    "AsyncSession": "SQLAlchemy",
    "cleanOffset": "RocketMQ's request",
    "connection.cursor": "a database's driver",
    "createAcl": "mqadmin",
    "createUser": "mqadmin",
    "DataFrameReader.schema": "Spark",
    "df": "the Unix command",
    "engine.connect": "SQLAlchemy",
    "halfmq_jobs.py": "a user's file",
    "java.util.zip.CRC32": "the JDK",
    "jdk.incubator.vector": "the JDK",
    "lo": "RocketMQ's short key",
    "maxPartitionBytes": "Spark",
    "maxTransferBytesOnMessageInMemory": "RocketMQ's setting",
    "ns": "RocketMQ's short key",
    "nsd": "RocketMQ's short key",
    "org.apache.rocketmq.filter.expression": "RocketMQ",
    "pool.acquire": "asyncpg",
    "pool.connection": "psycopg",
    "producer.pending": "an example's variable",
    "protocol_version": "TLS",
    "python3": "the command",
    "result.recall_handle": "an example's variable",
    "String.hashCode": "Java",
    "Task.get_stack": "asyncio",
    "tmp_path": "pytest",
    "tools.yml": "RocketMQ",
}
"""Names of others that our code does not contain, and whose they are."""

_QUOTED: Final = re.compile(r"``([^`\n]+)``|(?<!`)`([^`\n]+)`(?!`)")
_FILE: Final = re.compile(r"[\w./]+\.(py|md)")
_NAME: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_OF_OTHERS: Final = re.compile(r"RocketMQ|Source:|Java")
"""A docstring that says so may name what is RocketMQ's: ``CamelCase``, ``CONSTANT``."""


def _paths(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def _docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.lineno, value.value


def _code(source: str) -> str:
    """Return the tokens of a module without comments and docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return " ".join(
        token.string
        for token in tokens
        if token.type != tokenize.COMMENT and not token.string.startswith(('"""', "'''"))
    )


@functools.cache
def _files() -> str:
    return "\n".join(
        f"/{path.relative_to(ROOT)}"
        for folder in (*PRODUCT, "tests", "docs", "benchmarks")
        for path in (ROOT / folder).rglob("*")
    )


@functools.cache
def _words() -> set[str]:
    """Return each word of the product's code and dotted pair of words, and each file's name."""
    words = {name for path in _paths(*PRODUCT) for name in path.relative_to(ROOT).parts}
    for path in ROOT.glob("client/*/*.pyi"):  # classes with a blocking form
        words.add(path.name)
        for made in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(made, ast.ClassDef):
                own = [one for one in made.body if isinstance(one, ast.FunctionDef)]
                words.update(f"{made.name.removesuffix('Calls')}.{one.name}" for one in own)
    for path in _paths(*PRODUCT):
        source = path.read_text(encoding="utf-8")
        code = re.sub(r" ?\. ?", ".", _code(source))
        words.update(re.findall(r"\w+", code), [path.stem])
        # attrs drops the underscore of a field from the name of its parameter
        words.update(re.findall(r"^    _(\w+):", source, re.MULTILINE))
        words.update(re.findall(r"(?=\b([A-Za-z_]\w*\.\w+))", code))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                inside = set(re.findall(r"\w+", ast.unparse(node)))
                words.update(f"{node.name}.{name}" for name in inside)
                words.update(f"{path.stem}.{name}" for name in inside)
            elif isinstance(node, ast.FunctionDef | ast.Name):
                words.add(f"{path.stem}.{getattr(node, 'name', getattr(node, 'id', ''))}")
    return words


def _is_known(name: str, text: str) -> bool:
    if name in FOREIGN:
        return True
    if _FILE.fullmatch(name):
        return f"/{name}\n" in _files() + "\n"
    parts = name.split(".")
    if parts[0] in {"halfmq", *sys.stdlib_module_names}:
        return True
    if _OF_OTHERS.search(text) and re.search(r"[A-Z][a-z]|[a-z][A-Z]|^[A-Z_]+$", name):
        return True
    pairs = [".".join(pair) for pair in pairwise(parts)] or parts
    return all(pair in _words() or pair in dir(builtins) for pair in pairs)


def _stale(source: str) -> Iterator[str]:
    for line, text in _docstrings(ast.parse(source)):
        for quoted in _QUOTED.finditer(text):
            name = (quoted[1] or quoted[2]).removesuffix("()")
            if (_FILE.fullmatch(name) or _NAME.fullmatch(name)) and not _is_known(name, text):
                yield f"{line}: {name}"


def test_docstrings_name_what_exists() -> None:
    """Who follows a name finds it: rename it in docstrings too."""
    found = [
        f"{path.relative_to(ROOT)}:{stale}"
        for path in _paths(*PRODUCT)
        for stale in _stale(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_the_list_of_foreign_names_has_none_that_nobody_uses() -> None:
    """A name goes from the list with its last docstring."""
    texts = " ".join(
        text
        for path in _paths(*PRODUCT)
        for _, text in _docstrings(ast.parse(path.read_text(encoding="utf-8")))
    )
    assert [name for name in FOREIGN if name not in texts] == []


@pytest.mark.parametrize(
    "name", ["group_commit.py", "MessageStore.retention", "no_such_name", "NoSuchClass"]
)
def test_a_stale_name_is_found(name: str) -> None:
    assert list(_stale(f'"""See ``{name}``."""')) == [f"1: {name}"]
    assert list(_stale(f'"""See `{name}`."""')) == [f"1: {name}"]
