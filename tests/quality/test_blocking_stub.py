"""The blocking methods as editors, type checkers and documentation tools see them."""

from __future__ import annotations

import ast

from tests.support.blocking_stub import CLASSES, STUB, stub


def test_the_stub_is_that_of_the_async_methods() -> None:
    """After a change of these: ``python -m tests.support.blocking_stub``."""
    assert STUB.read_text(encoding="utf-8") == stub()


def test_every_method_and_constructor_has_its_text() -> None:
    """Hovering over a call shows what it does."""
    classes = {
        node.name: node
        for node in ast.parse(STUB.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }
    members = [
        (name, member.name, ast.get_docstring(member))
        for name, node in classes.items()
        for member in node.body
        if isinstance(member, ast.FunctionDef)
    ]

    assert tuple(classes) == CLASSES
    assert [one[:2] for one in members if not one[2]] == []
    assert {("ProducerCalls", "__init__"), ("AdminCalls", "redrive")} <= {
        one[:2] for one in members
    }
