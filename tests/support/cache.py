"""What tests fetch or build once and keep for all later runs."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Final

_STALE_SECONDS: Final = 86_400.0  # age of what was made from other sources and no run uses any more


def cache_directory() -> Path:
    """Where it is kept: `HALFMQ_TESTS_DIR` or below `~/.cache`."""
    directory = os.environ.get("HALFMQ_TESTS_DIR")
    path = Path(directory) if directory else Path.home() / ".cache" / "halfmq-tests"
    path.mkdir(parents=True, exist_ok=True)
    return path


def forget_others(directory: Path, pattern: str) -> None:
    """Remove what fits the pattern beside `directory` and is old."""
    for other in directory.parent.glob(pattern):
        if other != directory and time.time() - other.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(other, ignore_errors=True)
