"""Where a record's fields lie is stated in ``store/format/`` alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "broker", "client", "command", "spark_jobs", "store")
FORMAT = ROOT / "store" / "format"
TABLES = {"record", "record_fields", "queue_entry"}
"""Modules of ``store/format/`` that state where fields lie, or derive it."""

STRUCTURES = {"Struct", "unpack", "unpack_from", "pack", "pack_into", "iter_unpack", "calcsize"}
FORMATS = re.compile(r"[@=<>!]?[0-9xcbB?hHiIlLqQnNefdspP]+")
BEGINS_A_RECORD = re.compile(r"[>!]?iI")  # total size and magic
POSITION = re.compile(r"_?[A-Z_]+_AT")


def _uses_the_tables(tree: ast.Module) -> bool:
    """Tell whether a module imports from one of the tables, so that it works on records."""
    return any(
        isinstance(node, ast.ImportFrom)
        and "format" in (node.module or "")
        and (node.module or "").rpartition(".")[2] in TABLES
        for node in ast.walk(tree)
    )


def statements(source: str) -> Iterator[tuple[int, str]]:
    """Give the line and the reason of what states a position in a record by itself."""
    tree = ast.parse(source)
    works_on_records = _uses_the_tables(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function, written = node.func, node.args[0].value
            name = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
            if (
                name in STRUCTURES
                and isinstance(written, str)
                and FORMATS.fullmatch(written)
                and (works_on_records or BEGINS_A_RECORD.match(written))
            ):
                yield node.lineno, f"the layout {written}"
        elif (
            works_on_records
            and isinstance(node, ast.Assign | ast.AnnAssign)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, int)
        ):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and POSITION.fullmatch(target.id):
                    yield node.lineno, f"the position {target.id}"


def test_no_other_module_states_where_a_field_of_a_record_lies() -> None:
    """It would have to be found and changed with the table."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {reason}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if FORMAT not in path.parents
        for line, reason in statements(path.read_text(encoding="utf-8"))
    ]

    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "HEAD = Struct('>iIIi4xqqi44xi')",
        "size, magic = struct.unpack_from('>iI', content)",
        "from .format.record import PREFIX\nLINK: Final = Struct('>q')",
        "from halfmq.store.format.record_fields import FIELDS\nLINK_AT: Final = 76",
    ],
)
def test_such_statements_are_found(line: str) -> None:
    """Among them those that stood in nine modules."""
    assert list(statements(line))
