"""``spark.read.format("rocketmq-commitlog")``: a RocketMQ commit log as a DataFrame.

``spark.readStream`` follows one that is being written; see ``stream.py``.

Each row is a message, or the blank that ends a segment, or a range of bytes that is no record
(``recordType`` tells). Columns are those of ``columns.py``; ask for few of them with
``.schema(ddl("topic", "physicalOffset"))``, because Spark does not tell a Python source which
columns a query uses. Options are those of ``options.py``; conditions of a query on offset, time and
topic are used like them (``pushdown.py``).

The end of the log is looked for once per DataFrame, when Spark first plans it, so that a query
sees one state of a log that is being written; ``load`` again to see what was added.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    Filter,
    InputPartition,
)
from pyspark.sql.types import StructType

from ..errors import OptionError, in_one_sentence
from ..log.log_end import surveys
from .options import ReadOptions
from .pushdown import narrowed
from .schema import full_ddl
from .split_reader import SplitReader
from .splits import in_times, plan_partitions

FORMAT: Final = "rocketmq-commitlog"


class CommitLogDataSource(DataSource):
    """What Spark asks first: the name, the schema and a reader."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    @in_one_sentence
    def schema(self) -> str:
        return full_ddl(ReadOptions.parse(self.options))

    @in_one_sentence
    def reader(self, schema: StructType) -> "CommitLogReader":
        return CommitLogReader(schema, ReadOptions.parse_batch(self.options))

    @in_one_sentence
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  Spark's name
        try:
            from .stream import CommitLogStreamReader  # noqa: PLC0415  from Spark 4.2 on
        except ImportError as error:
            raise OptionError("a stream of a commit log needs Spark 4.2 or newer") from error
        return CommitLogStreamReader(schema, ReadOptions.parse_stream(self.options))


class CommitLogReader(SplitReader, DataSourceReader):
    """Plans splits on the driver and reads them on the executors."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  Spark's name
        self._options = narrowed(self._options, filters)
        return filters

    @in_one_sentence
    def partitions(self) -> Sequence[InputPartition]:
        extents = surveys(self._options.places, memory_map=self._options.memory_map)
        return [
            partition
            for extent in extents
            for partition in plan_partitions(
                extent, self._options, chosen=in_times(extent, self._options)
            )
        ]
