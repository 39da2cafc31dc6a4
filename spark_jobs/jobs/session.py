"""A Spark session that starts quickly, keeps quiet and listens on loopback only.

What a session of the user's already says is left alone: ``spark_session`` uses the active
session where there is one, and a master that ``spark-submit`` has set.
"""

import os
import sys
import warnings
from collections.abc import Iterator, Mapping
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

SMALL_LOG: Final = 256 << 20  # bytes; below, starting the JVM costs more than reading the log
_SHUFFLE_BYTES: Final = 256 << 20  # of log per shuffle partition: some 25 MB of it are shuffled
_HEAP_MAX: Final = 4 << 30  # bytes; an audit of ten million messages needs one

_SUBMITTED: Final = "PYSPARK_GATEWAY_PORT"  # set where spark-submit has started a JVM and this

# Spark's own lines explain nothing to whoever runs an audit; errors arrive as exceptions.
# The shell's logger is named because Spark otherwise announces that it changes the root's level.
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
# For a short life: no second compiler, no parallel collector to set up.
_SHORT_LIFE: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
# Rows live for moments, and nobody waits for a pause: collectors that work beside the program, as
# the JVM would choose one, take a third more of the processor for a read.
_LONG_LIFE: Final = "-XX:+UseParallelGC"
_LONG_LIFE_ON_FEW: Final = "-XX:+UseSerialGC"  # measured on two cores
# Compilers take a quarter of the processor time of an audit; most of what they compile by default
# runs too short to pay for it.
_COMPILE_LESS: Final = "-XX:CompileThresholdScaling=3"
_FEW_CORES: Final = 2


@contextmanager
def spark_session(*, log_bytes: int = 0) -> Iterator[SparkSession]:
    """Give the active Spark session, or a new local one that ends with the context.

    ``log_bytes`` is how much will be read: it decides how the JVM is tuned.

    Raises:
        JavaNotFoundError: There is no Java for it.
    """
    active = SparkSession.getActiveSession()
    if active is not None:
        yield active
        return
    session = start_session(log_bytes=log_bytes)
    try:
        yield session
    finally:
        _mute(session)
        session.stop()


def _mute(session: SparkSession) -> None:
    """Have a JVM that is about to end say nothing of what it cuts off, as a needless broadcast."""
    with suppress(Py4JError, OSError):  # it may have ended by itself
        java = session._jvm.java  # type: ignore[union-attr]  # noqa: SLF001  there is no other way
        nowhere = java.io.PrintStream(java.io.OutputStream.nullOutputStream())
        java.lang.System.setErr(nowhere)


def start_session(*, log_bytes: int = 0, settings: Mapping[str, str] | None = None) -> SparkSession:
    """Start a local session, or the one that ``spark-submit`` asks for; the caller stops it.

    ``settings`` are more of Spark's own.
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
        for key, value in _settings(log_bytes).items():
            builder = builder.config(key, value)
        for key, value in (settings or {}).items():
            builder = builder.config(key, value)
        builder = builder.config(
            "spark.driver.extraJavaOptions", _java_options(log_settings, log_bytes)
        )
        with warnings.catch_warnings():
            # PySpark imports pandas where it is installed; nothing here uses it.
            warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas")
            try:
                return builder.getOrCreate()
            except PySparkRuntimeError as error:  # it has said more on standard error
                raise JavaNotFoundError(f"the JVM for Spark did not start: {error}") from error


def _submitted_session(log_bytes: int) -> SparkSession:
    """Start a session in the JVM that ``spark-submit`` has started, as it was told to."""
    session = SparkSession.builder.appName("halfmq").getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    given = session.sparkContext.getConf()
    for key, value in _settings(log_bytes).items():
        if key.startswith("spark.sql.") and not given.contains(key):
            session.conf.set(key, value)
    return session


def _settings(log_bytes: int) -> dict[str, str]:
    cores = os.cpu_count() or 1
    short_life = log_bytes < SMALL_LOG
    return {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": f"{_heap() >> 20}m",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower(),
        # A wrong option is told in a line, not with the way that it took through a worker.
        "spark.sql.execution.pyspark.udf.hideTraceback.enabled": "true",
        "spark.sql.shuffle.partitions": str(max(cores, log_bytes // _SHUFFLE_BYTES)),
        # Compiling a query, or planning it again amid its run, takes longer than the rest of it.
        "spark.sql.adaptive.enabled": str(not short_life).lower(),
        "spark.sql.codegen.wholeStage": str(not short_life).lower(),
        "spark.sql.codegen.factoryMode": "NO_CODEGEN" if short_life else "FALLBACK",
        "spark.sql.session.timeZone": "UTC",
        # What is cached is numbers of high entropy; compressing them only costs.
        "spark.sql.inMemoryColumnarStorage.compressed": "false",
    }


def _heap() -> int:
    """Half of the machine's memory, at most what an audit can use."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not on this platform
        return _HEAP_MAX
    return min(_HEAP_MAX, memory // 2)


def _java_options(log_settings: Path, log_bytes: int) -> str:
    options = f"-Dlog4j2.configurationFile={log_settings.as_uri()}"
    if log_bytes < SMALL_LOG:
        return f"{options} {_SHORT_LIFE}"
    has_few = (os.cpu_count() or 1) <= _FEW_CORES
    return f"{options} {_COMPILE_LESS} {_LONG_LIFE_ON_FEW if has_few else _LONG_LIFE}"
