"""Every log line is an event with fields, for grep and for machines."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
LEVELS: Final = {"debug", "info", "warning", "error", "critical", "exception", "log"}
LINE: Final = re.compile(r"event=[\w%]+( [\w.]+=('[^']*'|[^\s']+))*")
KEY: Final = re.compile(r"([\w.]+)=")
TEXT: Final = re.compile(r"\b(reason|remark|error|function|note)=%s")


def templates(*folders: str) -> Iterator[tuple[str, str]]:
    """Yield place and template of each line that these folders log."""
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in LEVELS
                and ast.unparse(node.func.value) in ("logger", "_log")
            ):
                template = node.args[node.func.attr == "log"]
                assert isinstance(template, ast.Constant), ast.unparse(node)
                yield f"{path.relative_to(ROOT)}:{node.lineno}", str(template.value)


def test_every_template_is_an_event_with_fields() -> None:
    """Texts have a key and quotes; the broker's log quotes values of ``%s`` where necessary."""
    found = dict(templates("broker", "store", "client"))

    assert len(found) > 200
    assert not {place: text for place, text in found.items() if not LINE.fullmatch(text)}


def test_the_client_quotes_texts_itself() -> None:
    """Its lines are written by the log of the program that uses it."""
    assert not {place: text for place, text in templates("client") if TEXT.search(text)}


def test_no_field_hides_what_every_line_has() -> None:
    """In JSON all are fields of one object."""
    own = {"time", "level", "logger", "exception"}

    assert not {place for place, text in templates("broker") if own & set(KEY.findall(text))}
