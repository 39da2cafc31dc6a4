"""The job ``reconcile``: compare messages with a ledger; its queries are ``sql/reconcile.sql``.

``ledger.py`` reads the ledger.
"""

import argparse
from collections.abc import Collection, Iterator
from datetime import UTC, datetime, timedelta
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  as everyone writes it
from pyspark.sql.types import NumericType, TimestampNTZType, TimestampType

from halfmq.store.format import topics
from halfmq.store.format.properties import PROPERTY_KEYS

from ..errors import OptionError
from ..log.lookup import LogTimes, log_times
from ..report.tables import fact, listing
from ..source.message_roles import with_roles
from .command import CLEAN, FINDINGS, add_job, age, rows, running
from .ledger import read_ledger
from .output import utc
from .queries import queries

if TYPE_CHECKING:
    from .command import Jobs

COLUMNS: Final = (
    "topic",
    "timestamp",
    "physicalOffset",
    "size",
    "sysFlag",
    "realTopic",
    "key",
    "uniqKey",
    "properties",
    "recordType",
)
LISTED_MAX: Final = 2_000  # differences of each kind in the JSON; the Parquet files have all
_NO_FINDINGS: Final = ("waiting", "too_young", "too_old")  # differences that prove nothing
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MINUTE: Final = timedelta(minutes=1)
_HIDDEN: Final = (  # topics whose records consumers do not see
    topics.HALF_TOPIC,
    topics.TRANS_CHECK_MAX_TIME_TOPIC,
    topics.SCHEDULE_TOPIC,
    topics.TIMER_TOPIC,
)


def ledger_rows(ledger: DataFrame, key: str, time: str | None = None) -> DataFrame:
    """Bring a ledger to the form that ``differences`` compares.

    ``key`` and ``time`` name columns. Keys are compared as strings; a time that is a number is in
    milliseconds since 1970.

    Raises:
        OptionError: There is no such column.
    """
    for name in filter(None, (key, time)):
        if name not in ledger.columns:
            known = ", ".join(ledger.columns)
            raise OptionError(f"column {name}", f"the ledger has no such column; it has {known}")
    at = F.lit(None).cast("bigint") if time is None else _time_of(ledger, time)
    text = F.col(f"`{key}`").cast("string")
    return ledger.select(F.nullif(text, F.lit("")).alias("key"), at.alias("at"))


def _time_of(ledger: DataFrame, name: str) -> Column:
    column, kind = F.col(f"`{name}`"), ledger.schema[name].dataType
    if isinstance(kind, NumericType):
        return column.cast("bigint")
    if not isinstance(kind, TimestampType | TimestampNTZType):
        as_time = F.unix_millis(column.cast("string").try_cast("timestamp"))
        return F.coalesce(as_time, column.cast("string").try_cast("bigint"))
    return F.unix_millis(column.cast("timestamp"))


def differences(
    log: DataFrame,
    ledger: DataFrame,
    topics: Collection[str],
    key: str = PROPERTY_KEYS,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    grace: timedelta = _MINUTE,
    times: LogTimes | None = None,
) -> dict[str, DataFrame]:
    """Compare the messages of some topics with a ledger: the queries of ``sql/reconcile.sql``.

    ``log`` has ``COLUMNS``, ``ledger`` is what ``ledger_rows`` returns, ``key`` is the property
    that holds the keys. What is from ``since`` on and before ``until`` is judged; its counterpart
    may lie ``grace`` outside. Without the ``times`` of the log, rows are judged whatever their age.
    """
    grace_ms = grace // timedelta(milliseconds=1)
    first = None if times is None else times.first
    parameters = {
        "topics": sorted(topics),
        "key": key,
        "since": _ms(since),
        "until": _ms(until),
        "grace": grace_ms,
        "young": None if times is None else times.last - grace_ms,
        "old": None if first is None else first + grace_ms,
        "listed": LISTED_MAX,
    }
    return queries("reconcile", parameters, log=with_roles(log, named=key), ledger=ledger)


def _ms(time: datetime | None) -> int | None:
    return None if time is None else (time - _EPOCH) // timedelta(milliseconds=1)


def add(jobs: "Jobs") -> None:
    """Add the command to the others."""
    parser = add_job(
        jobs,
        "reconcile",
        "compare the messages of a log with the rows of a ledger",
        run,
        ends="0 they agree, 1 differences, 2 they could not be compared",
        example="~/.halfmq/store --topic orders --ledger orders.parquet --key-column order_id",
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
    ledger = parser.add_argument_group("the ledger")
    ledger.add_argument(
        "--ledger",
        metavar="PLACE",
        required=True,
        help="Parquet files, or CSV files (.csv, .tsv), or the JDBC URL of a database",
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
    times = parser.add_argument_group("times")
    times.add_argument(
        "--time-column",
        metavar="NAME",
        help="when a row was written (a time, or ms since 1970): rows too young or too old for the"
        " log are no findings",
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
        default=timedelta(minutes=1),
        help="how far apart row and message may be (1m)",
    )


def _time(text: str) -> datetime:
    """Read a time; without a zone it is in UTC."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        expected = "expected a date and time, as in 2026-01-31T00:00Z"
        raise argparse.ArgumentTypeError(f"{text!r}: {expected}") from error
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def run(options: argparse.Namespace) -> int:
    """Compare a log with a ledger and return the exit code."""
    if options.time_column is None and (options.since or options.until):
        raise OptionError("--from and --until", "name the ledger's --time-column too")
    with running(options, "differences") as job:
        ledger = read_ledger(job.spark, options)
        found = differences(
            job.log(*COLUMNS, subscribe=",".join((*options.topic, *_HIDDEN))),
            ledger_rows(ledger, options.key_column, options.time_column),
            options.topic,
            options.message_key,
            since=options.since,
            until=options.until,
            grace=options.grace,
            times=log_times(job.extent) if options.time_column else None,
        )
        (damaged,) = rows(found["damage"])
        job.step("comparing it with the ledger")
        for name in ("messages", "rows", "differences"):
            job.cached(found[name])
        counts = {row["kind"]: row["count"] for row in rows(found["counts"])}
        summary = {
            **job.about_log(),
            "topics": sorted(options.topic),
            "message_key": options.message_key,
            "from": options.since and utc(options.since),
            "until": options.until and utc(options.until),
            "matched_keys": rows(found["matched"])[0]["keys"],
            "counts": counts,
            "finding_count": sum(n for kind, n in counts.items() if kind not in _NO_FINDINGS),
            "damaged": damaged,
            "differences": rows(found["listed"]),
        }
        job.write(differences=found["differences"].coalesce(1))
        job.publish(summary, _table(summary))
    return FINDINGS if summary["finding_count"] or damaged["ranges"] else CLEAN


def _table(summary: dict[str, Any]) -> Iterator[str]:
    damaged = summary["damaged"]
    yield fact("commit log", summary["directory"])
    yield fact("topics", ", ".join(summary["topics"]))
    yield fact("matched keys", summary["matched_keys"])
    if damaged["ranges"]:
        yield fact("damaged", f"{damaged['bytes']:,} bytes in {damaged['ranges']:,} places")
    yield fact("differences", sum(summary["counts"].values()))
    for kind, listed in groupby(summary["differences"], itemgetter("kind")):
        shown = [{kind: row["key"], **row} for row in listed]
        yield from listing(shown, kind, "offsets", "hidden", "at", total=summary["counts"][kind])
