"""``spark.readStream``: follow a commit log that is being written, as records or as events.

The offset of the stream is a physical offset of the log, the border between the last record that
was read and the next. It goes over the ends of segments as the log does. A batch is what lies
between two such borders; read again after a failure, it has the same records.

What a broker may still be writing is waited for: see ``follow.py`` and ``segments.py``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from ..errors import in_one_sentence
from ..log.files import exists
from ..log.follow import OFFSET, LogFollower
from .event_source import EventSplitReader
from .options import LogOptions, ReadOptions
from .split_reader import SplitReader
from .splits import SegmentSplit, plan_partitions

StreamOffset = dict[str, Any]


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Decides on the driver how far to read next; executors read as for a batch."""

    def __init__(self, options: LogOptions) -> None:
        self._log = options
        self._follower = LogFollower(options.path, memory_map=options.memory_map)
        self._target = options.ending_offsets  # or the log's end, of trigger(availableNow=True)
        self._is_checked = False  # whether the first offset still is a border

    @in_one_sentence
    def initialOffset(self) -> StreamOffset:  # noqa: N802  Spark's name, as are those below
        if self._log.from_latest:
            return {OFFSET: self._follower.extent().end_offset}
        if self._log.starting_offsets is None:
            return {OFFSET: self._follower.extent().first_offset}
        return {OFFSET: self._follower.border(self._log.starting_offsets)}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        limit = self._log.max_bytes_per_trigger
        return ReadAllAvailable() if limit is None else ReadMaxBytes(limit)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        end = self._follower.extent().end_offset
        self._target = end if self._target is None else min(self._target, end)

    @in_one_sentence
    def latestOffset(self, start: StreamOffset, limit: ReadLimit) -> StreamOffset:  # noqa: N802
        first = int(start[OFFSET])
        self._demand(first)
        end = self._follower.end(first, getattr(limit, "max_bytes", None))
        if self._target is not None:
            end = min(end, max(first, self._target))
        return {OFFSET: end}

    def reportLatestOffset(self) -> StreamOffset:  # noqa: N802
        return {OFFSET: self._follower.extent().end_offset}

    @in_one_sentence
    def partitions(self, start: StreamOffset, end: StreamOffset) -> Sequence[InputPartition]:
        first, last = int(start[OFFSET]), int(end[OFFSET])
        self._demand(first, last)
        extent = self._follower.extent()
        part = extent.part(first, min(last, extent.end_offset))
        options = replace(self._log, starting_offsets=first)
        return plan_partitions(part, options, aligned=True)

    def _demand(self, first: int, last: int | None = None) -> None:
        if not self._log.fail_on_data_loss:
            return
        self._follower.demand(first, last)
        if not self._is_checked:
            self._follower.demand_border(first)
            self._is_checked = True

    def _is_gone(self, split: SegmentSplit) -> bool:
        """Tell whether a file was deleted since the batch was planned, and that is no error."""
        return not self._log.fail_on_data_loss and not exists(split.segment.path)


class CommitLogStreamReader(SplitReader, LogStreamReader):
    """Follows records."""

    def __init__(self, schema: StructType, options: ReadOptions) -> None:
        LogStreamReader.__init__(self, options)
        SplitReader.__init__(self, schema, options)

    def _read(self, split: SegmentSplit) -> Iterator[pa.RecordBatch]:
        return iter(()) if self._is_gone(split) else super()._read(split)


class EventStreamReader(EventSplitReader, LogStreamReader):
    """Follows events of transactions."""

    def __init__(self, schema: StructType, options: LogOptions) -> None:
        LogStreamReader.__init__(self, options)
        EventSplitReader.__init__(self, schema, options)

    def _read(self, split: SegmentSplit) -> Iterator[pa.RecordBatch]:
        return iter(()) if self._is_gone(split) else super()._read(split)
