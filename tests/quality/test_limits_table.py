"""The limits that docs/operations.md lists are those of the code."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Final

from halfmq.broker.config import BrokerConfig

DOCUMENT: Final = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
ROW: Final = re.compile(
    r"^\| .* \| ([\d,]+(?: [KM]iB)?(?:, [\d,]+)?) \| .* \| (`.*` in `.*`) \|$", re.MULTILINE
)
UNITS: Final = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20}


def _values(text: str) -> list[int]:
    """Return the numbers of a cell; one may have a unit."""
    return [
        int(number.replace(",", "")) * UNITS[unit]
        for number, unit in re.findall(r"(\d[\d,]*\d|\d)(?: (\wiB))?", text)
    ]


def _constants(text: str) -> list[int]:
    """Return the values of the constants that a cell names: ``A``, ``B`` in ``a/file.py``."""
    values: list[int] = []
    for names, file in re.findall(r"((?:`\w+`(?:, )?)+) in `([\w/]+)\.py`", text):
        module = importlib.import_module(f"halfmq.{file.replace('/', '.')}")
        values += [getattr(module, name) for name in re.findall(r"`(\w+)`", names)]
    return values


def test_the_table_of_limits_has_the_values_of_the_code() -> None:
    """An operator plans memory by the table; who changes a limit changes it there."""
    section = DOCUMENT.split("## Memory that clients can take\n")[1].split("\n## ")[0]
    rows = {where: _values(limit) for limit, where in ROW.findall(section)}
    pending = rows.pop("`transactionPendingMax` in `conf/broker.conf`")

    assert len(rows) + 1 == section.count("\n| ") - 1  # every row below the title was read
    assert {where: _constants(where) for where in rows} == rows
    assert pending == [BrokerConfig().transaction.pending_max]
