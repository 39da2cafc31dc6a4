"""The data sources, for ``spark.read.format``; the modules of ``source/`` describe them."""

import os
import sys
from typing import TYPE_CHECKING

from pyspark.sql.utils import is_remote

from .source.event_source import EVENT_FORMAT, TransactionDataSource
from .source.log_source import FORMAT, CommitLogDataSource
from .source.queue_source import QUEUE_FORMAT, ConsumeQueueDataSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["EVENT_FORMAT", "FORMAT", "QUEUE_FORMAT", "register"]


def register(spark: "SparkSession") -> None:
    """Make the formats known to a session.

    They are ``rocketmq-commitlog``, ``rocketmq-consumequeue`` and ``rocketmq-transactions``.
    """
    _use_this_python(spark)  # it becomes part of what is registered
    spark.dataSource.register(CommitLogDataSource)
    spark.dataSource.register(ConsumeQueueDataSource)
    spark.dataSource.register(TransactionDataSource)


def _use_this_python(spark: "SparkSession") -> None:
    """Have local workers run on the interpreter of this session, which has the packages.

    Spark takes the first ``python3`` of PATH, which in an IDE, a notebook or cron is another one.
    """
    if is_remote() or "PYSPARK_PYTHON" in os.environ:
        return
    context = spark.sparkContext
    is_chosen = context.getConf().contains("spark.pyspark.python")
    if str(context.master).startswith("local") and not is_chosen:
        context.pythonExec = sys.executable
