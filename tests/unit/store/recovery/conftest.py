"""The directory of a store, for the tests of recovery."""

from pathlib import Path

import pytest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the root of a store that does not exist yet."""
    return tmp_path / "store"
