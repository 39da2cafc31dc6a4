"""Python processes that run to their end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.patience import PATIENCE_S


def python(
    *words: object,
    check: bool = False,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run this Python with arguments; return its exit code, its output and its errors."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=check,
        cwd=cwd,
        env=env,
    )
