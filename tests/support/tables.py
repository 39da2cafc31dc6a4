"""The broker's tables in ``config/``, as tests read them."""

from pathlib import Path
from typing import Any

from halfmq.store.files.json_table import TableOrigin, read_table


def load_table(path: Path) -> dict[str, Any] | None:
    """Return the table kept at ``path``, or its ``.bak``; None if there is neither."""
    content, origin = read_table(path)
    return None if origin is TableOrigin.NOTHING else content
