"""The data sources, for ``spark.read.format``; the modules of ``source/`` describe them."""

from typing import TYPE_CHECKING

from .source.log_source import FORMAT, CommitLogDataSource
from .source.queue_source import QUEUE_FORMAT, ConsumeQueueDataSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["FORMAT", "QUEUE_FORMAT", "register"]


def register(spark: "SparkSession") -> None:
    """Make the formats ``rocketmq-commitlog`` and ``rocketmq-consumequeue`` known to a session."""
    spark.dataSource.register(CommitLogDataSource)
    spark.dataSource.register(ConsumeQueueDataSource)
