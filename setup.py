"""Builds halfmq; all else about the package is said in ``pyproject.toml``.

The methods of the blocking clients are made at run time (``client/threads/calls.py``). Type
checkers, editors and documentation tools run nothing, so a build writes what they read beside it:
``calls.pyi`` has the same methods with their signatures and docstrings, taken from the sources of
the async clients.
"""

from __future__ import annotations

import ast
import builtins
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CLIENT = Path(__file__).parent / "client"
STUB = CLIENT / "threads/calls.pyi"
HEAD = '"""Written by setup.py at each installation; changes here are lost."""\n\n'

Function = ast.FunctionDef | ast.AsyncFunctionDef


class BuildWithStub(build_py):  # type: ignore[misc]  # it has no types
    """Writes the stub before the package's files are listed, of an editable installation too."""

    def finalize_options(self) -> None:
        STUB.write_text(stub(), encoding="utf-8")
        super().finalize_options()


def stub() -> str:
    """Return the text of ``calls.pyi``."""
    imports = {"from .portal import Facade"}
    left_out = {function.name for function, _ in _methods("Facade", "threads.portal")}
    classes = []
    for node in _module("threads.calls").body:
        if not isinstance(node, ast.Assign):
            continue
        if isinstance(node.value, ast.Set):  # INTERNAL
            left_out |= ast.literal_eval(node.value)
        elif isinstance(node.value, ast.Call):  # ProducerCalls = _calls(Producer, …)
            client, *by_hand = node.value.args
            name, without = ast.unparse(node.targets[0]), left_out.union(map(_text, by_hand))
            classes.append(_class(name, ast.unparse(client), without, imports))
    return HEAD + "\n".join(sorted(imports)) + "\n\n" + "\n".join(classes)


def _text(node: ast.expr) -> str:
    return str(ast.literal_eval(node))


def _class(name: str, client: str, without: set[str], imports: set[str]) -> str:
    bases = f"Facade[{client}]"
    _import(client, "threads.calls", imports)
    definition, _ = _definition(client, "threads.calls")
    if any("V" in ast.unparse(base) for base in definition.bases):
        bases = f"Facade[{client}[V]], Generic[V]"
        imports |= {"from typing import Generic", "from ..message import V"}
    found: dict[str, str] = {}
    for function, module in _methods(client, "threads.calls"):
        is_public = not function.name.startswith("_") and function.name not in without
        if (is_public or function.name == "__init__") and function.name not in found:
            found[function.name] = _member(function, module, imports)
    members = "\n".join(found[one] for one in sorted(found))
    return f"class {name}({bases}):\n{textwrap.indent(members, '    ')}"


def _member(function: Function, module: str, imports: set[str]) -> str:
    """Return the blocking form of a method, and add the imports of what it names."""
    returns = ast.unparse(function.returns or ast.Constant(None))
    if returns.startswith("Async"):  # AsyncGenerator[X, None]
        item = returns.partition("[")[2].removesuffix("]").removesuffix(", None")
        returns = f"Iterator[{item}]"
        imports.add("from collections.abc import Iterator")
    head = f"def {function.name}({ast.unparse(function.args)}) -> {returns}:\n"
    for node in ast.walk(ast.parse(head + "    ...")):
        if isinstance(node, ast.Name) and node.id != "Iterator":
            _import(node.id, module, imports)
    decorators = [ast.unparse(one) for one in function.decorator_list]
    above = "@property\n" if "property" in decorators else ""
    text = ast.get_docstring(function) or ""
    quoted = f'"""{text}\n"""' if "\n" in text else f'"""{text}"""'
    return f"{above}{head}{textwrap.indent(quoted, '    ')}\n"


def _methods(name: str, module: str) -> Iterator[tuple[Function, str]]:
    """Yield the methods of a class and then those of its bases, each with its module."""
    definition, module = _definition(name, module)
    for node in definition.body:
        if isinstance(node, Function) and "overload" not in map(ast.unparse, node.decorator_list):
            yield node, module
    for base in definition.bases:
        parent = ast.unparse(base)
        if not parent.startswith("Generic["):
            yield from _methods(parent.partition("[")[0], module)


def _definition(name: str, module: str) -> tuple[ast.ClassDef, str]:
    """Return a class that a module of the client defines or imports, and where it is defined."""
    for node in _module(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node, module
    return _definition(name, _origin(name, module).removeprefix(".."))


def _import(name: str, module: str, imports: set[str]) -> None:
    """Add the import of a name that a module uses, as seen from ``client/threads``."""
    if not hasattr(builtins, name):
        origin = _origin(name, module)
        imports.add(f"from {origin} import {name}" if origin else f"import {name}")


def _origin(name: str, module: str) -> str:
    """Return from where a module has a name: ``..`` begins the path of a module of the client.

    Empty if the name is that of a module itself.
    """
    for node in ast.walk(_module(module)):
        if isinstance(node, ast.Import) and name in {one.name for one in node.names}:
            return ""
        if isinstance(node, ast.ImportFrom) and name in {one.name for one in node.names}:
            package = module.split(".")[: -node.level] if node.level else []
            within = ".".join([*package, node.module or ""])
            return f"..{within}" if node.level else within
    return f"..{module}"


@cache
def _module(name: str) -> ast.Module:
    return ast.parse((CLIENT / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8"))


if __name__ == "__main__":
    setup(cmdclass={"build_py": BuildWithStub})
