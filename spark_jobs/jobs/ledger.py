"""Read an outside ledger: the rows that messages are compared with."""

import argparse
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from ..errors import PlaceError, root_cause

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PASSWORD: Final = "HALFMQ_LEDGER_PASSWORD"  # noqa: S105  the variable's name; a command line shows
_ROWS_PER_FETCH: Final = 10_000  # drivers ask for ten at a time, or for all at once
_JDBC: Final = "jdbc:"
_PACKAGE: Final = re.compile(r"[\w.-]+:[\w.-]+:[\w.-]+")
# A driver that came after Spark's start is not found by its URL, so its class must be named.
_DRIVERS: Final = {
    "derby": "org.apache.derby.jdbc.EmbeddedDriver",
    "h2": "org.h2.Driver",
    "mariadb": "org.mariadb.jdbc.Driver",
    "mysql": "com.mysql.cj.jdbc.Driver",
    "oracle": "oracle.jdbc.OracleDriver",
    "postgresql": "org.postgresql.Driver",
    "sqlite": "org.sqlite.JDBC",
    "sqlserver": "com.microsoft.sqlserver.jdbc.SQLServerDriver",
}


def read_ledger(spark: "SparkSession", options: argparse.Namespace) -> "DataFrame":
    """Read the ledger that the options of ``reconcile`` name; columns of a CSV file are strings.

    Raises:
        PlaceError: It cannot be read, or ``--where`` is no condition on it.
    """
    try:
        frame = _read(spark, options)
        return frame.where(options.where) if options.where else frame
    except (PySparkException, Py4JError) as error:
        reason = _reason(error, options.ledger)
        raise PlaceError(_shown(options.ledger), reason) from error


def _read(spark: "SparkSession", options: argparse.Namespace) -> "DataFrame":
    if options.ledger.startswith(_JDBC):
        return _database(spark, options)
    path, name = _existing(options.ledger), options.ledger.removesuffix(".gz").lower()
    if not name.endswith((".csv", ".tsv")):
        return spark.read.parquet(path)
    # Quotes inside quoted values are doubled, as every program but Spark writes them.
    separator = "\t" if name.endswith(".tsv") else ","
    return spark.read.csv(path, header=True, sep=separator, escape='"', multiLine=True)


def _existing(location: str) -> str:
    """Return an absolute path, as Spark has its own working directory; URIs are left alone."""
    if len(urlsplit(location).scheme) > 1:  # one letter is a Windows drive
        return location
    if not Path(location).exists():
        raise PlaceError(location, "no such file or directory")
    return str(Path(location).absolute())


def _database(spark: "SparkSession", options: argparse.Namespace) -> "DataFrame":
    if not options.table:
        raise PlaceError(_shown(options.ledger), "name the table with --table")
    _add_driver(spark, options)
    settings = {
        "url": options.ledger,
        "dbtable": options.table,
        "driver": options.driver or _DRIVERS.get(options.ledger.split(":")[1]),
        "user": options.user,
        "password": os.environ.get(PASSWORD),
        "fetchsize": str(_ROWS_PER_FETCH),
    }
    given = {name: value for name, value in settings.items() if value is not None}
    return spark.read.format("jdbc").options(**given).load()


def _add_driver(spark: "SparkSession", options: argparse.Namespace) -> None:
    if options.driver_jar:
        jar = Path(_existing(options.driver_jar)).as_uri()
        spark.sql(f"ADD JAR '{_quoted(jar)}'")
    if options.driver_package:
        if not _PACKAGE.fullmatch(options.driver_package):
            raise PlaceError(options.driver_package, "expected group:artifact:version")
        spark.sql(f"ADD JAR 'ivy://{options.driver_package}'")


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")


def _shown(location: str) -> str:
    """Leave out what may be secret: a database's URL can have a password after the ``?``."""
    return re.split(r"[?;]", location)[0] if location.startswith(_JDBC) else location


def _reason(error: Exception, ledger: str) -> str:
    message = str(error)
    if "No suitable driver" in message or "ClassNotFoundException" in message:
        return (
            "there is no driver for it: name its jar with --driver-jar or its package with"
            " --driver-package, and its class with --driver if it is not a well-known one"
        )
    return root_cause(error).replace(ledger, _shown(ledger))
