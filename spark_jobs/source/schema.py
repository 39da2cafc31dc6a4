"""Spark and Arrow schemas of the sources, derived from their tables of columns."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import pyarrow as pa
from pyspark.sql.types import StructType

from ..errors import OptionError
from .columns import ARROW_TYPES, COLUMNS
from .options import ReadOptions, unknown


class Typed(Protocol):
    """A column of a source, as far as schemas go."""

    @property
    def spark_type(self) -> str:
        """Its type as in DDL."""


def ddl(*names: str, columns: Mapping[str, Typed] = COLUMNS) -> str:
    """Spell a schema of these columns, for ``DataFrameReader.schema``."""
    return ", ".join(f"`{name}` {columns[name].spark_type}" for name in names)


def full_ddl(options: ReadOptions) -> str:
    """Spell the schema of a read that names none itself."""
    left_out = set()
    if not options.has_value:
        left_out.add("value")
    if not options.include_headers:
        left_out.add("headers")
    return ddl(*(name for name in COLUMNS if name not in left_out))


def arrow_schema(schema: StructType, columns: Mapping[str, Typed] = COLUMNS) -> pa.Schema:
    """Turn the schema of a read into one of Arrow; names do not depend on case, as in Spark.

    ``as_asked`` gives batches the names that Spark expects. Built by hand, because Spark compares
    it exactly and its own conversion is private and differs between its versions.

    Raises:
        OptionError: A column does not exist or has another type.
    """
    fields = []
    by_lower = {name.lower(): name for name in columns}
    for column in schema.fields:
        name = by_lower.get(column.name.lower())
        if name is None:
            raise OptionError(unknown("column", column.name, list(columns)))
        known, asked = columns[name].spark_type, column.dataType.simpleString()
        if asked != known:
            raise OptionError(f"column {column.name} is {known}, not {asked}")
        fields.append(pa.field(name, ARROW_TYPES[known], nullable=column.nullable))
    return pa.schema(fields)


def as_asked(batches: Iterable[pa.RecordBatch], names: list[str]) -> Iterator[pa.RecordBatch]:
    """Give the columns of batches the names in the schema of the read, which may differ in case."""
    return (batch.rename_columns(names) for batch in batches)
