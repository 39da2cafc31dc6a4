"""A Spark session that starts quickly, logs nothing and listens on loopback only.

An active session and the settings of ``spark-submit`` take precedence.
"""

import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import SparkConf
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from ..errors import JavaNotFoundError
from .java import java_for_spark

_SHUFFLE_BYTES: Final = 256 << 20  # of log per shuffle partition; about 25 MB of it are shuffled
_SUBMITTED: Final = "PYSPARK_GATEWAY_PORT"  # set by spark-submit, which has started the JVM
_SETTINGS: Final = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "2g",  # an audit of ten million messages needs one
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower(),
    # A wrong option is reported in a line, without the trace of a worker.
    "spark.sql.execution.pyspark.udf.hideTraceback.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    # Replanning a query while it runs takes longer than it gains.
    "spark.sql.adaptive.enabled": "false",
    # Cached rows are mostly hashes, which do not compress.
    "spark.sql.inMemoryColumnarStorage.compressed": "false",
}
# Java's own choice of collector, G1, takes a third more processor time for a read.
_JVM: Final = "-XX:+UseSerialGC"
_SMALL_LOG: Final = 256 << 20  # bytes; below, optimizing Java's code costs more than it gains
_SMALL_LOG_JVM: Final = "-XX:TieredStopAtLevel=1"

# Spark's log lines do not help a user of a job; errors arrive as exceptions. The shell's logger is
# named because Spark otherwise prints that it changes the level of the root logger.
_QUIET_LOG: Final = """\
rootLogger.level = fatal
logger.shell.name = org.apache.spark.api.python.PythonGatewayServer
logger.shell.level = fatal
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %p %c{1}: %m%n
"""


@contextmanager
def spark_session(*, log_bytes: int = 0) -> Iterator[SparkSession]:
    """Return the active Spark session, or a new local one that ends with the context.

    ``log_bytes`` is the size of the log to read, by which the JVM is tuned.

    Raises:
        JavaNotFoundError: There is no Java for it.
    """
    active = SparkSession.getActiveSession()
    if active is not None:
        yield active
        return
    # In the main thread, SparkContext would replace the handler of Ctrl-C (interrupt.py).
    with ThreadPoolExecutor(1) as thread:
        session = thread.submit(start_session, log_bytes=log_bytes).result()
    try:
        yield session
    finally:
        _mute(session)
        session.stop()


def _mute(session: SparkSession) -> None:
    """Silence a JVM that is about to end: it would report each broadcast that it interrupts."""
    with suppress(Py4JError, OSError):  # it may have ended by itself
        java = session._jvm.java  # type: ignore[union-attr]  # noqa: SLF001  there is no other way
        nowhere = java.io.PrintStream(java.io.OutputStream.nullOutputStream())
        java.lang.System.setErr(nowhere)


def start_session(*, log_bytes: int = 0, settings: Mapping[str, str] | None = None) -> SparkSession:
    """Start a local session, or the one of ``spark-submit``; the caller stops it.

    ``settings`` are additional settings of Spark.
    """
    if _SUBMITTED in os.environ:
        return _submitted_session(log_bytes)
    # Without it the workers are started with whatever `python3` is first on the path.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName("halfmq audit")
    if not SparkConf().contains("spark.master"):
        builder = builder.master("local[*]")
    with TemporaryDirectory(prefix="halfmq-spark-") as folder, java_for_spark():
        log_settings = Path(folder, "log4j2.properties")
        log_settings.write_text(_QUIET_LOG)
        settings_ = {**_settings(log_bytes), **(settings or {})}
        options = f"-Dlog4j2.configurationFile={log_settings.as_uri()} {_JVM}"
        if log_bytes < _SMALL_LOG:
            options += f" {_SMALL_LOG_JVM}"
        builder = builder.config(map={**settings_, "spark.driver.extraJavaOptions": options})
        with warnings.catch_warnings():
            # PySpark imports pandas where it is installed; nothing here uses it.
            warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas")
            try:
                return builder.getOrCreate()
            except PySparkRuntimeError as error:  # the JVM has printed more on standard error
                raise JavaNotFoundError(f"the JVM for Spark did not start: {error}") from error


def _submitted_session(log_bytes: int) -> SparkSession:
    """Start a session in the JVM of ``spark-submit``, with its settings."""
    session = SparkSession.builder.appName("halfmq").getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    given = session.sparkContext.getConf()
    for key, value in _settings(log_bytes).items():
        if key.startswith("spark.sql.") and not given.contains(key):
            session.conf.set(key, value)
    return session


def _settings(log_bytes: int) -> dict[str, str]:
    shuffles = max(1, log_bytes // _SHUFFLE_BYTES)
    return {**_SETTINGS, "spark.sql.shuffle.partitions": str(shuffles)}
