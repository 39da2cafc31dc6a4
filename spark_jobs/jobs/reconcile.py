"""The command ``reconcile``."""

import argparse
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from ..errors import LedgerError
from ..stages import Stages, reading
from .command import (
    CLEAN,
    FINDINGS,
    add_output,
    age,
    find_log,
    log_summary,
    new_parser,
    rows,
    spark_for,
    utc,
)
from .output import Output

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from ..log.segments import LogExtent
    from ..reconcile import Range
    from .command import Jobs

LISTED_MAX: Final = 2_000  # differences of each kind in the JSON; the Parquet files have all
SHOWN_MAX: Final = 50  # in the table, of all kinds in turn
_GRACE: Final = timedelta(minutes=1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def add(jobs: "Jobs") -> None:
    """Add the command to the others."""
    parser = new_parser(
        jobs,
        "reconcile",
        "compare the messages of a log with the rows of a ledger",
        ends="0 they agree, 1 differences, 2 they could not be compared",
        example="~/.halfmq/store --topic orders --ledger orders.parquet --key-column order_id",
    )
    add_output(
        parser,
        writes="write differences/ as Parquet and summary.json to DIR, replacing earlier ones",
    )
    parser.add_argument(
        "--topic",
        metavar="TOPIC",
        action="append",
        required=True,
        help="whose messages are compared; may be given several times",
    )
    parser.add_argument(
        "--message-key",
        metavar="NAME",
        default="KEYS",
        help="the property with a message's key: KEYS (its words, default), UNIQ_KEY or any other",
    )
    _add_ledger(parser)
    _add_range(parser)
    parser.set_defaults(run=run)


def _add_ledger(parser: argparse.ArgumentParser) -> None:
    ledger = parser.add_argument_group("the ledger")
    ledger.add_argument(
        "--ledger",
        metavar="PLACE",
        required=True,
        help="Parquet or CSV files, or the JDBC URL of a database",
    )
    ledger.add_argument(
        "--ledger-format", choices=("parquet", "csv", "jdbc"), help="default: told by the place"
    )
    ledger.add_argument(
        "--key-column", metavar="NAME", required=True, help="the column with the key of a message"
    )
    ledger.add_argument(
        "--where", metavar="SQL", help="which rows must have a message, as in \"status = 'paid'\""
    )
    ledger.add_argument("--table", metavar="NAME", help="of a database")
    ledger.add_argument(
        "--user",
        metavar="NAME",
        help="of a database; its password is taken from HALFMQ_LEDGER_PASSWORD",
    )
    ledger.add_argument(
        "--driver-package",
        metavar="GROUP:ARTIFACT:VERSION",
        help="the JDBC driver, fetched from Maven Central",
    )
    ledger.add_argument("--driver-jar", metavar="FILE", help="the JDBC driver")
    ledger.add_argument("--driver", metavar="CLASS", help="the driver's class, if not well known")


def _add_range(parser: argparse.ArgumentParser) -> None:
    times = parser.add_argument_group("times")
    times.add_argument(
        "--time-column",
        metavar="NAME",
        help="when a row was written (a time, or ms since 1970): rows too young or too old for the"
        " log are told apart",
    )
    times.add_argument(
        "--from", dest="since", metavar="TIME", type=_time, help="judge what is from then on"
    )
    times.add_argument(
        "--until", metavar="TIME", type=_time, help="and before then, as in 2026-01-31T00:00Z"
    )
    times.add_argument(
        "--grace",
        metavar="AGE",
        type=age,
        default=_GRACE,
        help="how far apart row and message may be (1m)",
    )


def _time(text: str) -> int:
    """Read a time as ms since 1970; without a zone it is in UTC."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        expected = "expected a date and time, as in 2026-01-31T00:00Z"
        raise argparse.ArgumentTypeError(f"{text!r}: {expected}") from error
    aware = time if time.tzinfo else time.replace(tzinfo=UTC)
    return (aware - _EPOCH) // timedelta(milliseconds=1)


def run(options: argparse.Namespace) -> int:
    """Compare a log with a ledger and return the exit code."""
    if options.time_column is None and (options.since or options.until):
        raise LedgerError("--from and --until", "name the ledger's --time-column too")
    extent = find_log(options.directory)
    output = Output(options, "differences")
    stage = Stages("reconcile")
    with spark_for(extent, stage) as spark:
        summary = _compared(spark, extent, options, stage, output)
        output.publish(summary, "\n".join(_table(summary)))
    return FINDINGS if summary["finding_count"] or summary["damaged"]["ranges"] else CLEAN


def _compared(
    spark: "SparkSession",
    extent: "LogExtent",
    options: argparse.Namespace,
    stage: Stages,
    output: Output,
) -> dict[str, Any]:
    from .. import reconcile  # noqa: PLC0415  see command.py

    within = _range(options, extent)
    ledger = reconcile.rows(
        _ledger(spark, options), options.key_column, options.time_column, within
    ).persist()
    log = _log(spark, extent, options)
    stage(reading(extent))
    damaged = rows(_damage(log))[0]
    stage("comparing it with the ledger")
    entries = reconcile.messages(log, options.topic, options.message_key, within).persist()
    found = reconcile.differences(entries, ledger).persist()
    try:
        counts = {row["kind"]: row["count"] for row in found.groupBy("kind").count().collect()}
        if options.output:
            stage(f"writing {options.output}")
            output.parquet("differences", found.coalesce(1))
        listed = reconcile.first_of_each_kind(found, LISTED_MAX).orderBy("kind", "key", "at")
        return {
            "directory": options.directory,
            "log": log_summary(extent),
            "topics": sorted(options.topic),
            "message_key": options.message_key,
            "from": None if options.since is None else utc(options.since),
            "until": None if options.until is None else utc(options.until),
            "matched_keys": reconcile.matched_keys(entries, ledger).count(),
            "counts": dict(sorted(counts.items())),
            "finding_count": sum(counts.get(kind, 0) for kind in reconcile.FINDINGS),
            "damaged": damaged,
            "differences": rows(listed),
        }
    finally:
        for kept in (found, entries, ledger):
            kept.unpersist()


def _ledger(spark: "SparkSession", options: argparse.Namespace) -> "DataFrame":
    from ..ledger import Ledger, read_ledger  # noqa: PLC0415  see command.py

    return read_ledger(
        spark,
        Ledger(
            location=options.ledger,
            format=options.ledger_format,
            table=options.table,
            user=options.user,
            driver=options.driver,
            driver_jar=options.driver_jar,
            driver_package=options.driver_package,
            where=options.where,
        ),
    )


def _log(spark: "SparkSession", extent: "LogExtent", options: argparse.Namespace) -> "DataFrame":
    from halfmq.store.format import topics  # noqa: PLC0415  see command.py

    from .. import reconcile, roles  # noqa: PLC0415

    hidden = (
        topics.HALF_TOPIC,
        topics.TRANS_CHECK_MAX_TIME_TOPIC,
        topics.SCHEDULE_TOPIC,
        topics.TIMER_TOPIC,
    )
    return roles.read_log(
        spark,
        options.directory,
        *reconcile.COLUMNS,
        "size",
        extent=extent,
        partitions=spark.sparkContext.defaultParallelism,
        options={"subscribe": ",".join((*options.topic, *hidden))},
    )


def _damage(log: "DataFrame") -> "DataFrame":
    from pyspark.sql import functions as F  # noqa: PLC0415, N812

    damaged = log.where("recordType = 'corrupt'")
    size = F.coalesce(F.sum(F.col("size").cast("bigint")), F.lit(0))
    return damaged.agg(F.count("*").alias("ranges"), size.alias("bytes"))


def _range(options: argparse.Namespace, extent: "LogExtent") -> "Range":
    from ..log.log_times import log_times  # noqa: PLC0415  see command.py
    from ..reconcile import Range  # noqa: PLC0415

    return Range(
        since_ms=options.since,
        until_ms=options.until,
        grace=options.grace,
        log=log_times(extent) if options.time_column else None,
    )


def _in_turn(differences: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Take one of each kind, then the next of each, so that no kind hides another."""
    seen = Counter[str]()
    ranked = []
    for row in differences:
        seen[row["kind"]] += 1
        ranked.append((seen[row["kind"]], row))
    return [row for _, row in sorted(ranked, key=lambda pair: pair[0])]


def _table(summary: dict[str, Any]) -> Iterator[str]:
    yield f"commit log    {summary['directory']}"
    yield f"topics        {', '.join(summary['topics'])}"
    yield f"matched keys  {summary['matched_keys']:,}"
    for kind, count in summary["counts"].items():
        yield f"  {kind.replace('_', ' '):20}{count:,}"
    if summary["damaged"]["ranges"]:
        damaged = summary["damaged"]
        yield f"damaged       {damaged['bytes']:,} bytes of the log in {damaged['ranges']:,} places"
    yield ""
    yield f"differences   {sum(summary['counts'].values()):,}"
    shown = _in_turn(summary["differences"])[:SHOWN_MAX]
    for row in sorted(shown, key=lambda row: str(row["kind"])):
        places = ", ".join(map(str, dict.fromkeys(row["offsets"] or [])))
        hidden = f" ({row['hidden']})" if row["hidden"] else ""
        yield f"  {row['kind']:20} {row['key'] or ''}{' at ' if places else ''}{places}{hidden}"
    if sum(summary["counts"].values()) > len(shown):
        yield "  and more: see --json or --output"
