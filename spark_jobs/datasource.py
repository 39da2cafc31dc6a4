"""Register the data sources of this package for ``spark.read.format``."""

from typing import TYPE_CHECKING

from .source.event_source import EVENT_FORMAT, TransactionDataSource
from .source.log_source import FORMAT, CommitLogDataSource
from .source.pushdown import ENABLED
from .source.queue_source import QUEUE_FORMAT, ConsumeQueueDataSource
from .source.worker_python import use_this_python

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["EVENT_FORMAT", "FORMAT", "QUEUE_FORMAT", "register"]


def register(spark: "SparkSession") -> None:
    """Register ``rocketmq-commitlog``, ``rocketmq-consumequeue`` and ``rocketmq-transactions``."""
    use_this_python(spark)  # what is registered includes the interpreter
    spark.conf.set(ENABLED, "true")
    spark.dataSource.register(CommitLogDataSource)
    spark.dataSource.register(ConsumeQueueDataSource)
    spark.dataSource.register(TransactionDataSource)
