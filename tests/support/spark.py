"""One Spark session for all tests of a run: starting one takes longer than most tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession

from halfmq.spark_jobs.datasource import FORMAT, register
from halfmq.spark_jobs.jobs.session import start_session


@contextmanager
def session() -> Iterator[SparkSession]:
    """Start the session that the audit command would start, and end it."""
    spark = start_session()
    register(spark)
    try:
        yield spark
    finally:
        spark.stop()


def load(
    spark: SparkSession, folder: Path, columns: str | None = None, **options: Any
) -> DataFrame:
    """Read a log; options by their names in the documentation."""
    reader = spark.read.format(FORMAT).options(**options)
    return (reader.schema(columns) if columns else reader).load(str(folder))


def rows(frame: DataFrame) -> list[Row]:
    """Collect in the order of the log."""
    return frame.orderBy("physicalOffset").collect()
