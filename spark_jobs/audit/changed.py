"""What differs from the digests of a store, as a DataFrame of findings."""

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812  as everyone writes it

from ..log.digests import changes, digest_of
from ..log.segments import LogExtent, Segment
from .judge import Kind

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FOUND = "array<struct<kind: string, offsets: array<bigint>, detail: string, at: bigint>>"


def changed_bytes(spark: "SparkSession", extent: LogExtent) -> "DataFrame":
    """Compare every segment that has a digest with it."""
    segments = [
        (*segment, extent.limit(segment))
        for segment in extent.segments
        if digest_of(segment) is not None
    ]
    frame = spark.createDataFrame(segments, "base bigint, path string, size bigint, stop bigint")
    find = F.udf(_find, _FOUND, useArrow=False)
    found = frame.repartition(max(1, len(segments)), "base").select(
        F.explode(find("base", "path", "size", "stop")).alias("found")
    )
    return found.select("found.*")


def _find(
    base: int, path: str, size: int, limit: int
) -> list[tuple[str, list[int], str, int | None]]:
    return [
        (str(Kind.CRC), change.offsets, change.detail, change.offsets[0])
        if change.is_record
        else (str(Kind.CORRUPT_RECORD), change.offsets, change.detail, None)
        for change in changes(Segment(base, path, size), limit)
    ]
