"""What tests expect of an audit must not come from the audit."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[3] / "support"
WRITERS = ["log_writer.py", "planted_log.py", "planted_faults.py", "planted_delays.py"]
FILES = [*sorted((SUPPORT / "oracle").glob("*.py")), *(SUPPORT / name for name in WRITERS)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_oracle_and_planter_share_nothing_with_what_they_check(path: Path) -> None:
    """A rule, a name or a layout that is wrong there would be wrong here too."""
    tree = ast.parse(path.read_text("utf-8"))
    imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported += [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    ]

    assert not [name for name in imported if name.startswith("halfmq")]
