"""Which Python the workers of a session run."""

import os
import sys
from typing import TYPE_CHECKING

from pyspark.sql.utils import is_remote

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def use_this_python(spark: "SparkSession") -> None:
    """Have local workers run on the interpreter of this session, which has the packages.

    Spark takes the first ``python3`` of PATH, which in an IDE, a notebook or cron is another one.
    """
    if is_remote() or "PYSPARK_PYTHON" in os.environ:
        return
    context = spark.sparkContext
    is_chosen = context.getConf().contains("spark.pyspark.python")
    if str(context.master).startswith("local") and not is_chosen:
        context.pythonExec = sys.executable
