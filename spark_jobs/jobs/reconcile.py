"""The job ``reconcile``: compare messages with a ledger.

``differences.py`` compares, ``ledger.py`` reads the ledger.
"""

import argparse
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from halfmq.store.format import topics

from ..errors import OptionError
from ..log.lookup import log_times
from ..report.tables import fact, listing
from . import differences
from .command import CLEAN, FINDINGS, add_job, age, rows, running
from .ledger import read_ledger
from .output import utc

if TYPE_CHECKING:
    from .command import Jobs

LISTED_MAX: Final = 2_000  # differences of each kind in the JSON; the Parquet files have all
_DAMAGE: Final = """
    select count(*) as ranges, coalesce(sum(bigint(size)), 0) as bytes
    from {log} where recordType = 'corrupt'
"""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_HIDDEN: Final = (  # topics whose records consumers do not see
    topics.HALF_TOPIC,
    topics.TRANS_CHECK_MAX_TIME_TOPIC,
    topics.SCHEDULE_TOPIC,
    topics.TIMER_TOPIC,
)


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
        within = differences.TimeRange(
            since_ms=_ms(options.since),
            until_ms=_ms(options.until),
            grace=options.grace,
            log=log_times(job.extent) if options.time_column else None,
        )
        ledger = differences.rows(
            read_ledger(job.spark, options), options.key_column, options.time_column, within
        )
        ledger = job.cached(ledger)
        log = job.log(*differences.COLUMNS, "size", subscribe=",".join((*options.topic, *_HIDDEN)))
        (damaged,) = rows(job.spark.sql(_DAMAGE, log=log))
        job.step("comparing it with the ledger")
        entries = differences.messages(log, options.topic, options.message_key, within)
        entries = job.cached(entries)
        found = job.cached(differences.differences(entries, ledger))
        counts = {row["kind"]: row["count"] for row in rows(found.groupBy("kind").count())}
        listed = differences.first_of_each_kind(found, LISTED_MAX)
        summary = {
            **job.about_log(),
            "topics": sorted(options.topic),
            "message_key": options.message_key,
            "from": options.since and utc(options.since),
            "until": options.until and utc(options.until),
            "matched_keys": differences.matched_keys(entries, ledger).count(),
            "counts": dict(sorted(counts.items())),
            "finding_count": sum(counts.get(kind, 0) for kind in differences.FINDINGS),
            "damaged": damaged,
            "differences": rows(listed),
        }
        job.write(differences=found.coalesce(1))
        job.publish(summary, _table(summary))
    return FINDINGS if summary["finding_count"] or damaged["ranges"] else CLEAN


def _ms(time: datetime | None) -> int | None:
    return None if time is None else (time - _EPOCH) // timedelta(milliseconds=1)


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
