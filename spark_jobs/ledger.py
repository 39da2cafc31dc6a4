"""Reads an outside ledger: the rows that messages are compared with."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from .errors import LedgerError

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Where a ledger is. The password of a database is in the environment: ``PASSWORD``."""

    location: str  # a path of Parquet or CSV files, or a JDBC URL
    format: str | None = None  # parquet, csv or jdbc; None: told by the location
    table: str | None = None  # of a database
    user: str | None = None
    driver: str | None = None  # Java class; None: that of the well-known databases
    driver_jar: str | None = None  # path
    driver_package: str | None = None  # group:artifact:version, fetched from Maven Central
    where: str | None = None  # a condition in Spark's SQL

    @property
    def kind(self) -> str:
        """The format, told by the location where it is not given."""
        if self.format:
            return self.format
        if self.location.startswith(_JDBC):
            return "jdbc"
        name = self.location.removesuffix(".gz").lower()
        return "csv" if name.endswith((".csv", ".tsv")) else "parquet"


def read_ledger(spark: "SparkSession", ledger: Ledger) -> "DataFrame":
    """Read a ledger; the columns of a CSV file, which begins with their names, are texts.

    Raises:
        LedgerError: It cannot be read, or ``where`` is no condition on it.
    """
    read = {"jdbc": _database, "csv": _csv, "parquet": _parquet}[ledger.kind]
    try:
        frame = read(spark, ledger)
        return frame.where(ledger.where) if ledger.where else frame
    except (PySparkException, Py4JError) as error:
        raise LedgerError(_shown(ledger.location), _reason(str(error), ledger)) from error


def _parquet(spark: "SparkSession", ledger: Ledger) -> "DataFrame":
    return spark.read.parquet(_existing(ledger.location))


def _csv(spark: "SparkSession", ledger: Ledger) -> "DataFrame":
    separator = "\t" if ".tsv" in ledger.location.lower() else ","
    reader = spark.read.option("header", "true").option("sep", separator)
    # A quote inside a quoted value is doubled, as everything but Spark writes it.
    return reader.option("escape", '"').option("multiLine", "true").csv(_existing(ledger.location))


def _existing(location: str) -> str:
    """Return a path that Spark takes as meant here; what another file system has, it will say."""
    if len(urlsplit(location).scheme) > 1:  # one letter is a Windows drive
        return location
    if not Path(location).exists():
        raise LedgerError(location, "no such file or directory")
    return str(Path(location).absolute())


def _database(spark: "SparkSession", ledger: Ledger) -> "DataFrame":
    if not ledger.table:
        raise LedgerError(_shown(ledger.location), "name the table with --table")
    _add_driver(spark, ledger)
    options = {
        "url": ledger.location,
        "dbtable": ledger.table,
        "driver": ledger.driver or _DRIVERS.get(ledger.location.split(":")[1]),
        "user": ledger.user,
        "password": os.environ.get(PASSWORD),
        "fetchsize": str(_ROWS_PER_FETCH),
    }
    given = {name: value for name, value in options.items() if value is not None}
    return spark.read.format("jdbc").options(**given).load()


def _add_driver(spark: "SparkSession", ledger: Ledger) -> None:
    if ledger.driver_jar:
        jar = Path(_existing(ledger.driver_jar)).absolute()
        spark.sql(f"ADD JAR '{_quoted(jar.as_uri())}'")
    if ledger.driver_package:
        if not _PACKAGE.fullmatch(ledger.driver_package):
            raise LedgerError(ledger.driver_package, "expected group:artifact:version")
        spark.sql(f"ADD JAR 'ivy://{ledger.driver_package}'")


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")


def _shown(location: str) -> str:
    """Leave out what may be a secret: a database's URL can have a password behind the ``?``."""
    return re.split(r"[?;]", location)[0] if location.startswith(_JDBC) else location


def _reason(message: str, ledger: Ledger) -> str:
    if "No suitable driver" in message or "ClassNotFoundException" in message:
        return (
            "there is no driver for it: name its jar with --driver-jar or its package with"
            " --driver-package, and its class with --driver if it is not a well-known one"
        )
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    # Of a Java exception the second line says what happened, the first where Python called.
    told = lines[1] if len(lines) > 1 and lines[0].startswith("An error occurred") else lines[0]
    text = re.sub(r"^: (?:[\w$]+\.)+[\w$]+: ", "", told)
    return text.replace(ledger.location, _shown(ledger.location))
