"""What the store does to files goes through one module, behind which tests put another disk."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOOR = ROOT / "store" / "files" / "disk.py"
BROKER = (
    "broker/tables/table_file.py",
    "broker/disk/disk_limits.py",
    "broker/transaction/replay/snapshot_file.py",
)

MODULES = {"io", "mmap", "os", "pathlib", "shutil", "tempfile"}
"""Modules that reach files; of them only what is in `HARMLESS` may be used."""

HARMLESS = {
    "io.SEEK_END",
    "mmap.mmap",  # in store/format, to say what a buffer may be
    "os.SEEK_SET",
    "os.cpu_count",
    "os.getpid",
    "os.set_blocking",  # a pipe to another process of ours
    "os.write",  # to that pipe
    "pathlib.Path",
}

METHODS = {
    "exists", "glob", "hardlink_to", "is_dir", "is_file", "iterdir", "lstat", "mkdir",
    "read_bytes", "read_text", "rename", "rglob", "rmdir", "samefile", "stat", "symlink_to",
    "touch", "unlink", "walk", "write_bytes", "write_text",
}  # fmt: skip
"""Methods of `Path` that reach files. `open` and `replace` others have as well; see below."""

OPENED = {"writer"}
"""What has a method `open` and is no path."""


def _modules() -> list[Path]:
    store = sorted((ROOT / "store").rglob("*.py"))
    return [path for path in store if path != DOOR] + [ROOT / name for name in BROKER]


def _trespasses(source: str) -> Iterator[str]:
    """Say what of some code reaches a file by itself."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module in MODULES:
            for name in node.names:
                if f"{node.module}.{name.name}" not in HARMLESS:
                    yield f"{node.lineno}: import of {node.module}.{name.name}"
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name in MODULES and name.asname:
                    yield f"{node.lineno}: import of {name.name} by another name"
        elif isinstance(node, ast.Attribute):
            used = ast.unparse(node)
            if used.split(".")[0] in MODULES and used not in HARMLESS:
                yield f"{node.lineno}: {used}"
        elif isinstance(node, ast.Call):
            yield from _calls(node)


def _calls(call: ast.Call) -> Iterator[str]:
    called = ast.unparse(call.func)
    is_look_up = called in {"getattr", "hasattr"} and ast.unparse(call.args[0]) in MODULES
    if called == "open" or is_look_up:
        yield f"{call.lineno}: {ast.unparse(call)}"
    if not isinstance(call.func, ast.Attribute):
        return
    owner, method = ast.unparse(call.func.value), call.func.attr
    if owner == "disk":
        return
    is_path = method in METHODS or (
        (method == "open" and owner not in OPENED)
        # str.replace takes two arguments, and that of a date and of a dataclass named ones.
        or (method == "replace" and len(call.args) == 1)
    )
    if is_path:
        yield f"{call.lineno}: {ast.unparse(call)}"


@pytest.mark.parametrize("path", _modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_reached_through_the_door_only(path: Path) -> None:
    """What goes past it would be durable on the simulated disk whatever the code does."""
    assert list(_trespasses(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import os\nfd = os.open(path, os.O_RDONLY)",
        "from os import fsync",
        "import os as system",
        "import os\nsync = getattr(os, 'fdatasync', None)",
        "import mmap\nmmap.mmap(fd, 10, mmap.PROT_READ)",
        "import shutil\nshutil.rmtree(path)",
        "with path.open('rb') as file: pass",
        "with open(path) as file: pass",
        "(root / 'abort').unlink(missing_ok=True)",
        "path.stat().st_size",
        "sorted(directory.iterdir())",
        "new.replace(path)",
        "content = self._path.read_bytes()",
    ],
)
def test_a_way_past_the_door_is_found(source: str) -> None:
    assert list(_trespasses(source)) != []
