"""The queries of the jobs ``traffic``, ``lag`` and ``reconcile``: the files in ``sql/``.

A query of a file follows a line ``-- name: NAME``. It reads DataFrames by their names in braces:
those that the caller gives, and the queries before it. Parameters have a colon.
"""

import re
from collections.abc import Mapping
from importlib import resources
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_NAME: Final = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


def queries(
    file: str, parameters: Mapping[str, object], **frames: "DataFrame"
) -> dict[str, "DataFrame"]:
    """Return the queries of a file by name, over these frames; nothing runs yet."""
    spark = next(iter(frames.values())).sparkSession
    text = resources.files(__package__).joinpath("sql", f"{file}.sql").read_text("utf-8")
    _, *parts = _NAME.split(text)
    found: dict[str, DataFrame] = {}
    for name, query in zip(parts[::2], parts[1::2], strict=True):
        found[name] = spark.sql(query, dict(parameters), **frames, **found)
    return found
