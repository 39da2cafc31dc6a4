"""Tests and benchmarks read a private name only where this table gives the reason."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
MODULES: Final = {"os", "sys", "ctypes"}  # their public functions, whatever the names look like
NAMED_TUPLE: Final = {"_asdict", "_field_defaults", "_fields", "_make", "_replace"}

PARTS: Final = "gives other tests the parts that they compare, and no user needs"
FOREIGN: Final = "the foreign library has no public way"
MEMORY: Final = "no result shows what stays in memory"
PATH: Final = "no result shows which way the work took"
MOMENT: Final = "no caller can hit the moment"
LIMIT: Final = "no setting is as small, or takes effect as soon"

READ: Final = (
    ("benchmarks/traced_broker.py", "_tick _name", PATH),
    ("tests/property/test_transaction_model.py", "_in_background", MOMENT),
    ("*/simulation/loop.py", "_args _callback _cancelled _context _log_destroy_pending", FOREIGN),
    ("*/simulation/patches.py", "_set_running_loop", FOREIGN),
    ("*/simulation/poppers.py", "_handle _popper", MOMENT),
    ("*/simulation/world.py", "_group _polling _release _staged _stalled _waiting", MEMORY),
    ("*/simulation/world.py", "_delays _done _hours _interval_ms _log_bytes_min", LIMIT),
    ("*/simulation/world.py", "_reserved_ms _retention _saves _snapshots", LIMIT),
    ("tests/spark/test_reconcile.py", "_jvm", FOREIGN),
    ("tests/support/*_parts.py", "*", PARTS),
    ("tests/support/cpp_client.py", "_CConsumeStatus _handle _register_callback", FOREIGN),
    ("tests/support/race_windows.py", "_fdatasync _flusher", MOMENT),
    ("tests/support/stores.py", "*", PARTS),
    ("tests/support/transactions.py", "*", PARTS),
    ("tests/unit/benchmarks/test_benchmarks.py", "_timed", PATH),
    ("*/broker/handlers/messages/test_sql_pull.py", "_compile", PATH),
    ("*/broker/handlers/messages/test_staged_pull.py", "_send_staged _staged_bytes", MEMORY),
    ("tests/unit/broker/handlers/transactions/test_end_batch.py", "_append", MOMENT),
    ("tests/unit/broker/net/test_connection.py", "_resume_stalled _stall _stalled", MOMENT),
    ("tests/unit/broker/net/test_direct_writes.py", "_connected_socket", PATH),
    ("tests/unit/broker/net/test_long_polling.py", "_sweep", MOMENT),
    ("tests/unit/broker/tables/test_client_registry.py", "_left", MEMORY),
    ("tests/unit/broker/tables/test_consumer_offsets.py", "_offsets", PATH),
    ("tests/unit/broker/tables/test_new_topics.py", "_awaited _begin _begin_save", MOMENT),
    ("tests/unit/broker/test_live_settings.py", "*", PARTS),
    ("*/transaction/checks/test_checker.py", "_buckets _fetched _order _timetable", MEMORY),
    ("*/client/consuming/test_delivery.py", "_extended _receivers _redelivery_timers", MEMORY),
    ("tests/unit/client/net/test_connection.py", "_cluster _connect", MOMENT),
    ("tests/unit/client/test_blocking.py", "_wait", MOMENT),
    ("tests/unit/client/test_consumer.py", "_refusals", LIMIT),
    ("tests/unit/client/transactional/test_blocks.py", "_recordings", MEMORY),
    ("tests/unit/client/transactional/test_check_back.py", "_check_back _pool _running", MOMENT),
    ("tests/unit/client/transactional/test_decisions.py", "_decisions _open_batches", MEMORY),
    ("tests/unit/client/transactional/test_multi_message.py", "_open", MEMORY),
    ("tests/unit/store/files/test_disk.py", "_zeros", MEMORY),
    ("tests/unit/store/files/test_zero_copy.py", "_cached_until", MEMORY),
    ("tests/unit/store/index/test_index_builder.py", "_pending", MEMORY),
    ("tests/unit/store/index/test_index_service.py", "_files _slots", MOMENT),
)  # fmt: skip
"""Files, the private names that they read, and why; the place itself says more."""


def _reads(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the private names that a file takes from others, each with its line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            names = [node.attr] if owner not in {"self", "cls", "super()", *MODULES} else []
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("setattr", ".object")):
            names = [str(arg.value) for arg in node.args[1:2] if isinstance(arg, ast.Constant)]
        for name in names:
            if name.startswith("_") and not name.startswith("__") and name not in NAMED_TUPLE:
                yield name, getattr(node, "lineno", 0)


@functools.cache
def _all_reads() -> dict[str, list[tuple[str, int]]]:
    paths = (path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
    return {str(path.relative_to(ROOT)): list(_reads(path)) for path in sorted(paths)}


def _allowed(file: str) -> set[str]:
    return {name for pattern, names, _ in READ if fnmatch(file, pattern) for name in names.split()}


def test_a_private_name_is_read_only_for_a_reason() -> None:
    """Prefer what users and other folders see; otherwise add the name and its reason above."""
    found = [
        f"{file}:{line}: {name}"
        for file, reads in _all_reads().items()
        for name, line in reads
        if not _allowed(file) & {"*", name}
    ]
    assert found == []


def test_the_table_lists_no_name_that_nobody_reads() -> None:
    """A reason goes with its last reader."""
    reads = {file: {name for name, _ in names} for file, names in _all_reads().items()}
    for pattern, names, _ in READ:
        used = set().union(*(names for file, names in reads.items() if fnmatch(file, pattern)))
        assert used, pattern
        assert set(names.split()) - {"*"} <= used, pattern


@pytest.mark.parametrize(
    "source",
    [
        "broker._store.close()",
        "from halfmq.client.testing import _is_free",
        "monkeypatch.setattr(index, '_files', [])",
        "self.broker._store.close()",
    ],
)
def test_a_reach_in_is_found(tmp_path: Path, source: str) -> None:
    (tmp_path / "test_one.py").write_text(source)
    assert len(list(_reads(tmp_path / "test_one.py"))) == 1
