"""Which feature of which official client a test shows; docs/compatibility.md has the table."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

TESTS: Final = Path(__file__).parents[1] / "interop"
CLIENTS_OF: Final = {
    "test_java_client.py": ("Java 5.3.3", "Java 4.9.8"),
    "test_java_features.py": ("Java 5.3.3", "Java 4.9.8"),
    "test_traces.py": ("Java 5.3.3", "Java 4.9.8"),
    "test_go_client.py": ("Go 2.1.2",),
    "test_go_groups.py": ("Go 2.1.2",),
    "test_requests_to_consumers.py": ("Java 5.3.3", "Java 4.9.8"),
    "test_cpp_client.py": ("C++ 0.4.4",),
    "test_mixed_groups.py": (),
    "test_producers_retry.py": (),
}
"""Test file → the clients that all its tests run with, unless they say others."""

_Test = TypeVar("_Test", bound=Callable[..., object])


def feature(name: str, *clients: str) -> Callable[[_Test], _Test]:
    """Say that a test shows a row of the table: for these clients, by default those of its file."""
    del name, clients
    return lambda test: test


def shown_by_tests() -> set[tuple[str, str]]:
    """Return feature and client of every test, read from the sources: no client need be there."""
    return {
        (row, client)
        for file, usual in CLIENTS_OF.items()
        for name, *clients in _features(TESTS / file)
        for row, client in ((name, one) for one in clients or usual)
    }


def _features(path: Path) -> list[list[str]]:
    return [
        [text for argument in decorator.args for text in _texts(argument)]
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for decorator in function.decorator_list
        if isinstance(decorator, ast.Call)
        and isinstance(decorator.func, ast.Name)
        and decorator.func.id == feature.__name__
    ]


def _texts(argument: ast.expr) -> list[str]:
    """Return the texts of an argument: one, or those of a tuple with a star."""
    if isinstance(argument, ast.Starred):
        return [str(text) for text in ast.literal_eval(argument.value)]
    return [str(ast.literal_eval(argument))]
