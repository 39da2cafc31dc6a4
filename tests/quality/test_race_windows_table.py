"""The table of windows in ``docs/transactions.md`` says what is tested, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
DOCUMENT: Final = ROOT / "docs" / "transactions.md"
WINDOWS: Final = [f"W{number}" for number in range(1, 31)]


def _rows() -> dict[str, list[str]]:
    """The cells of each row, by its window."""
    rows: dict[str, list[str]] = {}
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if re.fullmatch(r"W\d+", cells[0]):
            assert cells[0] not in rows, f"{cells[0]} has two rows"
            rows[cells[0]] = cells[1:]
    return rows


def _tests() -> set[str]:
    """The names of all tests in ``tests/race_windows``."""
    texts = [path.read_text("utf-8") for path in (ROOT / "tests/race_windows").glob("test_*.py")]
    return set(re.findall(r"^(?:async )?def (test_\w+)\(", "\n".join(texts), re.MULTILINE))


def _window_of(test: str) -> str:
    found = re.match(r"test_w(\d\d)_", test)
    assert found, f"{test} is not named by its window"
    return f"W{int(found[1])}"


def test_every_window_has_its_row() -> None:
    """Thirty windows are known, each with what RocketMQ does and what halfmq does."""
    rows = _rows()

    assert list(rows) == WINDOWS
    for window, cells in rows.items():
        assert len(cells) == 4, f"{window}: window, RocketMQ, halfmq, tests"
        assert all(cells), f"{window} has an empty cell"


def test_every_test_of_a_window_is_named_in_its_row_and_exists() -> None:
    """A reader who follows the table finds the proof, and no proof is left out."""
    named = {
        window: set(re.findall(r"`(test_\w+)`", cells[3])) for window, cells in _rows().items()
    }
    written: dict[str, set[str]] = {window: set() for window in WINDOWS}
    for test in _tests():
        written[_window_of(test)].add(test)

    assert named == written
    assert all(written.values())


def test_readers_of_the_readme_find_the_document() -> None:
    """What the README only mentions is explained there."""
    assert "(docs/transactions.md" in (ROOT / "README.md").read_text(encoding="utf-8")
