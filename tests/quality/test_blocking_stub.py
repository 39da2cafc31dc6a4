"""The blocking methods as editors, type checkers and documentation tools see them."""

from __future__ import annotations

import ast
import inspect
import runpy
from pathlib import Path
from typing import Any

import pytest

from halfmq.client.threads import calls

SETUP = runpy.run_path(str(Path(__file__).parents[2] / "setup.py"), run_name="its_functions")
CLASSES = ("ProducerCalls", "TransactionProducerCalls", "ConsumerCalls", "AdminCalls")


def _declared(name: str) -> dict[str, ast.FunctionDef]:
    """Return the methods of a class of the stub."""
    (found,) = (
        node
        for node in ast.parse(SETUP["stub"]()).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    return {one.name: one for one in found.body if isinstance(one, ast.FunctionDef)}


def _made(name: str) -> dict[str, Any]:
    """Return the methods and properties that the class has at run time."""
    members = vars(getattr(calls, name)).items()
    return {
        name: inspect.unwrap(one) if inspect.isfunction(one) else one
        for name, one in members
        if inspect.isfunction(one) or isinstance(one, property)
    }


@pytest.mark.parametrize("name", CLASSES)
def test_the_stub_declares_what_there_is(name: str) -> None:
    """A method is offered if and only if it exists, with its parameters."""
    declared, made = _declared(name), _made(name)

    assert declared.keys() == made.keys()
    for method, function in made.items():
        if isinstance(function, property):
            assert [ast.unparse(one) for one in declared[method].decorator_list] == ["property"]
            continue
        every = declared[method].args
        names = [one.arg for one in (*every.args, *every.kwonlyargs)]
        names += [one.arg for one in (every.vararg, every.kwarg) if one is not None]
        assert sorted(names) == sorted(inspect.signature(function).parameters), method


@pytest.mark.parametrize("name", CLASSES)
def test_every_method_and_constructor_has_its_text(name: str) -> None:
    """Hovering over a call shows what it does."""
    declared = _declared(name)

    assert "__init__" in declared
    for method, function in _made(name).items():
        assert ast.get_docstring(declared[method]) == inspect.getdoc(function)


def test_what_is_installed_is_the_stub_of_the_sources() -> None:
    """After a change of the async methods: ``pip install --no-deps -e .``."""
    assert SETUP["STUB"].read_text(encoding="utf-8") == SETUP["stub"]()
